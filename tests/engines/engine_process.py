"""The program of an Engine: one vLLM engine, its core in this very process. Reads a JSON command a line, answers a JSON line.

Started as ``engine_process.py {"model": ..., "connector": {...} or null, ...}``.
"""
from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

ANSWERS = os.dup(1)
os.dup2(2, 1)               # what vLLM prints is no answer

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402


class EngineAgent:
    """One method a command."""

    def __init__(self, model: str, connector: dict[str, Any] | None, dtype: str = "bfloat16", **options: Any) -> None:
        transfer = None if connector is None else KVTransferConfig(
            **{"kv_connector": "ShmkvConnector", "kv_connector_module_path": "shmkv.integrations.vllm", **connector})
        self.llm = LLM(model, kv_transfer_config=transfer, enforce_eager=True, dtype=dtype, skip_tokenizer_init=True,
                       disable_log_stats=False, **options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.counts: dict[str, int] = {}
        self.computed = 0
        self.scheduled = 0
        self.begun: list[str] = []
        self._watch_counts()

    def _watch_counts(self) -> None:
        """Add up what the connector gives to vLLM, on its way there, and the tokens of each step."""
        update = self.core.scheduler.update_from_output

        def updated(scheduled: Any, output: Any) -> Any:
            self.scheduled += sum(scheduled.num_scheduled_tokens.values())
            for outputs in (given := update(scheduled, output)).values():
                stats = outputs.scheduler_stats
                for name, count in ((stats and stats.kv_connector_stats) or {}).items():
                    self.counts[name] = self.counts.get(name, 0) + count
            return given

        self.core.scheduler.update_from_output = updated

    def generate(self, prompts: list[list[int]], max_tokens: int, salt: str | None = None) -> list[list[int]]:
        """Greedy continuations, all prompts in one batch."""
        wanted = [{"prompt_token_ids": prompt, **({} if salt is None else {"cache_salt": salt})} for prompt in prompts]
        outputs = self.llm.generate(wanted, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
                                    use_tqdm=False)
        self.computed += sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def each(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The same, one after the other."""
        return [self.generate([prompt], max_tokens)[0] for prompt in prompts]

    def say_apart(self, prompt: list[int], max_tokens: int, apart: int) -> list[int]:
        """What the engine says when it computes the last `apart` tokens of a prompt in a step of their own; where they are a whole
        block it has the others from its own prefix cache."""
        scheduler = self.core.scheduler
        scheduler.reset_prefix_cache()
        limit = scheduler.max_num_scheduled_tokens
        if apart < scheduler.block_size:
            scheduler.max_num_scheduled_tokens = len(prompt) - apart
        else:
            self.generate([prompt], 1)
        said = self.generate([prompt], max_tokens)[0]
        scheduler.max_num_scheduled_tokens = limit
        return said

    def timed(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Seconds from a request's beginning to its first and to its last token."""
        engine = self.llm.llm_engine
        begun = time.perf_counter()
        engine.add_request("timed", {"prompt_token_ids": prompt},
                           SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False))
        first = 0.0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs and outputs[0].outputs[0].token_ids and not first:
                first = time.perf_counter() - begun
        return [first, time.perf_counter() - begun]

    def endings(self, prompts: list[list[int]], max_tokens: int) -> list[str | None]:
        """Why each of them ended, one after the other: "length", "error"."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        return [output.outputs[0].finish_reason for prompt in prompts
                for output in self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)]

    def begin(self, prompts: list[list[int]], steps: int) -> None:
        """Begin all of them and make some steps."""
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        self.begun = [self.llm.llm_engine.add_request(f"begun-{number}", {"prompt_token_ids": prompt}, params)
                      for number, prompt in enumerate(prompts)]
        for _ in range(steps):
            self.llm.llm_engine.step()

    def give_up(self) -> int:
        """Abort what was begun: how many requests the engine keeps all the same, until their loads have ended."""
        self.llm.llm_engine.abort_request(self.begun, internal=True)
        return len(self.core.scheduler.requests)

    def settle(self) -> int:
        """Make steps until there is no request: how many are left."""
        deadline = time.monotonic() + 20
        while self.core.scheduler.requests and time.monotonic() < deadline:
            self.llm.llm_engine.step()           # a load beside the batch ends before its request does
        return len(self.core.scheduler.requests)

    def abort(self, prompts: list[list[int]], steps: int) -> int:
        """Begin all of them, make some steps, give them up: how many are left."""
        self.begin(prompts, steps)
        self.give_up()
        return self.settle()

    def reset_local(self) -> bool:
        """Forget vLLM's own prefix cache."""
        return bool(self.core.scheduler.reset_prefix_cache())

    def reset_shared(self) -> bool:
        return bool(self.core.scheduler.reset_connector_cache())

    def computed_tokens(self) -> int:
        """Tokens of prompts that the engine had neither itself nor from others, so far."""
        return self.computed

    def scheduled_tokens(self) -> int:
        """Tokens that went through the model so far, of prompts and of what it said."""
        return self.scheduled

    def counted(self) -> dict[str, int]:
        """What the connector has counted so far."""
        return self.counts

    def connector(self) -> Any:
        return self.core.scheduler.connector

    def state(self) -> dict[str, Any]:
        """What the connector keeps."""
        connector = self.connector()
        shared = connector._shared
        blocks = self.core.scheduler.kv_cache_manager.block_pool
        return {"cluster_id": shared.endpoint.cluster_id, "peers": list(shared.peers.usable),
                "stats": shared.endpoint.manager.stats(), "notes": len(connector._scheduler),
                "free_blocks": blocks.get_num_free_blocks()}

    def execute(self, code: str) -> Any:
        scope: dict[str, Any] = {"agent": self, "result": None}
        exec(code, scope)
        return scope["result"]


def main() -> None:
    answers = os.fdopen(ANSWERS, "w")
    agent = None
    try:
        agent = EngineAgent(**json.loads(sys.argv[1]))
        answer: dict[str, Any] = {"value": "ready"}
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(agent, name)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if agent is not None:
        agent.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
