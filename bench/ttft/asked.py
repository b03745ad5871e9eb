"""One request of an engine, timed. run.py has every engine import this file, which therefore knows vLLM and nothing of the ways."""
from __future__ import annotations

import time
from typing import Any

from vllm import SamplingParams


def prepare(agent: Any) -> None:
    """Take off what adds up the counts of ShmkvConnector for tests: it adds time, and cannot add those of other connectors."""
    vars(agent.core.scheduler).pop("update_from_output")


def ask(agent: Any, name: str, prompt: list[int], max_tokens: int, handed: dict[str, Any] | None) -> dict[str, Any]:
    """Seconds to the first and to the last token, all tokens, how many of the prompt were not computed.

    `handed` is what a proxy sends along for the connector and takes on to the next engine (vLLM's `kv_transfer_params`). What the
    engine before had in its own cache is taken out of it: vLLM would report that in place of what this engine did not compute.
    """
    if handed is not None:
        handed = {name: value for name, value in handed.items() if name != "remote_prefill_cached_tokens"}
    engine = agent.llm.llm_engine
    begun = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": prompt},
                       SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                                      extra_args=None if handed is None else {"kv_transfer_params": handed}))
    first, output = 0.0, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids and not first:
                first = time.perf_counter() - begun
    assert output is not None
    return {"first": first, "last": time.perf_counter() - begun, "tokens": list(output.outputs[0].token_ids),
            "loaded": output.num_cached_tokens, "handed": output.kv_transfer_params}
