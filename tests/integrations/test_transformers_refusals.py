"""Two sides that do not fit, requests that are too long, prompts that die: refused by name, and nothing wrong is said."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from model_peers import ModelPeer, Pair, need_models, pair_in
from peer import Namespace, StartPeer, req
from tiny_models import prompt_ids as ids_of

pytestmark = [pytest.mark.llm, pytest.mark.timeout(300)]
LENGTH, STEPS = 11, 6
LLAMA = {"family": "llama"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both processes, for all tests of this file that kill nobody."""
    yield from pair_in(Namespace(tmp_path_factory.mktemp("refusals")))


@pytest.mark.parametrize(("theirs", "ours", "expected"), [
    (LLAMA, {**LLAMA, "num_hidden_layers": 3}, ("the prompt has 2 layers", "this process has 3 layers")),
    (LLAMA, {**LLAMA, "dtype": "bfloat16"}, ("layer 0: full attention, keys [2, 8] and values [2, 8] of float32", "of bfloat16")),
    (LLAMA, {**LLAMA, "num_key_value_heads": 4}, ("keys [2, 8] and values [2, 8]", "keys [4, 8] and values [4, 8]")),
    (LLAMA, {**LLAMA, "head_dim": 16}, ("keys [2, 8] and values [2, 8]", "keys [2, 16] and values [2, 16]")),
    (LLAMA, {**LLAMA, "seed": 1}, ("the prompt has model llama-", "this process has model llama-")),
    (LLAMA, {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, ("has model llama-", "process has model")),
    (LLAMA, {"family": "gpt2", "n_head": 2}, ("keys [2, 8]", "keys [2, 16]")),
    ({"family": "gemma3"}, {"family": "gemma3", "sliding_window": 7}, ("attention over 6 tokens", "attention over 7 tokens")),
    ({"family": "gemma3"}, {"family": "gemma3", "layer_types": ["full_attention"] * 3},
     ("layer 0: sliding attention over 6 tokens", "layer 0: full attention")),
    ({"family": "deepseek_v3"}, {"family": "deepseek_v3", "kv_lora_rank": 8}, ("keys [1, 16] and values [1, 8]", "keys [1, 8]")),
], ids=["layers", "dtype", "heads", "dim", "weights", "rope", "family", "window", "kinds", "latents"])
def test_another_model_is_refused_with_both_named(pair: Pair, theirs: dict[str, Any], ours: dict[str, Any],
                                                  expected: tuple[str, str]) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    prompt.call("new_cache", cache="p", model=theirs, tokens=LENGTH)
    prompt.call("feed", cache="p", model=theirs, ids=ids_of(LENGTH))
    digest = prompt.call("digest", cache="p")
    prompt.call("handoff", cache="p", key=key)
    for command in ("receive", "receive_fork"):
        text = decoder.refusal(command, cache="d", key=key, model=ours)
        assert all(part in text for part in expected), text
    # The key is still there for whom it fits.
    assert decoder.call("receive", cache="d", key=key, model=theirs) == [LENGTH]
    assert decoder.call("digest", cache="d") == digest


@pytest.mark.parametrize(("shape", "dtype"), [((1, 16384), "DT_UINT8"), ((1, 64), "DT_FLOAT16")], ids=["other bytes", "short row"])
def test_a_row_of_something_else_is_refused(pair: Pair, shape: tuple[int, ...], dtype: str) -> None:
    key = pair.key()
    pair.prompt.peer.call("allocate", name="plain", num_tensors=5, shape=shape, dtype=dtype, keys=(key,))
    pair.prompt.peer.call("noise", name="plain", seed=3)
    assert "receive of CacheKey" in pair.decoder.refusal("receive", cache="d", key=key, model=LLAMA)


def test_a_key_that_is_not_there(pair: Pair) -> None:
    assert pair.decoder.attempt("receive", cache="d", key=pair.key(), model=LLAMA).outcome == "LLM_KV_CACHE_NOT_EXIST"
    waited = pair.decoder.attempt("receive", cache="d", key=pair.key(), model=LLAMA, timeout_ms=50)
    assert waited.outcome == "LLM_WAIT_PROCESS_TIMEOUT"
    assert waited.ms >= 50


def test_a_request_key_is_received_once(pair: Pair) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    prompt.call("new_cache", cache="p", model={"family": "deepseek_v3"}, tokens=LENGTH)
    prompt.call("feed", cache="p", model={"family": "deepseek_v3"}, ids=ids_of(LENGTH))
    prompt.call("handoff", cache="p", key=key)
    assert decoder.call("receive", cache="d", key=key, model={"family": "deepseek_v3"}) == [LENGTH]
    again = decoder.attempt("receive", cache="d", key=key, model={"family": "deepseek_v3"})
    assert again.outcome == "LLM_KV_CACHE_NOT_EXIST"


def test_a_request_that_is_longer_than_the_cache(pair: Pair) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    ids = ids_of(LENGTH)
    prompt.call("new_cache", cache="p", model=LLAMA, tokens=LENGTH)
    text = prompt.refusal("feed", cache="p", model=LLAMA, ids=[*ids, 1])
    assert f"layer 0: {LENGTH + 1} tokens do not fit into a cache of {LENGTH}" in text
    assert prompt.call("lengths", cache="p") == [0]
    first = prompt.call("feed", cache="p", model=LLAMA, ids=ids)        # nothing was written: the whole prompt fits still
    prompt.call("handoff", cache="p", key=key)
    decoder.call("new_cache", cache="short", model=LLAMA, tokens=LENGTH - 1)
    text = decoder.refusal("receive_into", cache="short", key=key)
    assert f"{LENGTH} tokens do not fit into a cache of {LENGTH - 1}" in text
    assert decoder.call("receive", cache="d", key=key, model=LLAMA, room=STEPS) == [LENGTH]
    tokens = decoder.call("greedy", cache="d", model=LLAMA, first=first, steps=STEPS)
    assert tokens == decoder.call("alone", model=LLAMA, ids=ids, steps=STEPS + 1)
    assert "do not fit" in decoder.refusal("feed", cache="d", model=LLAMA, ids=[1])


def test_rows_and_starts_that_are_not_there(pair: Pair) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    prompt.call("new_cache", cache="p", model=LLAMA, tokens=LENGTH)
    assert "row 0 holds no token" in prompt.refusal("handoff", cache="p", key=key)
    prompt.call("feed", cache="p", model=LLAMA, ids=ids_of(LENGTH))
    assert "argument 'row' must be below 1, got 1" in prompt.refusal("handoff", cache="p", key=key, row=1)
    prompt.call("handoff", cache="p", key=key, keep=True)
    assert "one that was not handed over yet" in prompt.refusal("handoff", cache="p", key=pair.key())
    assert "was handed over" in prompt.refusal("feed", cache="p", model=LLAMA, ids=[1])
    decoder.call("new_cache", cache="d", model=LLAMA, tokens=2 * LENGTH)
    assert "argument 'row' must be below 1" in decoder.refusal("receive_into", cache="d", key=key, row=1)
    text = decoder.refusal("receive_into", cache="d", key=key, start=1)
    assert "argument 'start' must not be above the 0 tokens of row 0" in text
    decoder.call("feed", cache="d", model=LLAMA, ids=ids_of(LENGTH + 1))
    text = decoder.refusal("receive_into", cache="d", key=key, start=LENGTH + 1)
    assert f"must not be above the {LENGTH} tokens behind" in text
    assert decoder.call("lengths", cache="d") == [LENGTH + 1]
    prompt.call("close", cache="p")


def test_a_row_that_is_filled_anew_between_header_and_bytes(pair: Pair) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    prompt.call("new_cache", cache="p", model=LLAMA, tokens=2 * LENGTH)
    prompt.call("feed", cache="p", model=LLAMA, ids=ids_of(LENGTH))
    prompt.call("handoff", cache="p", key=key, keep=True)
    decoder.call("new_cache", cache="d", model=LLAMA, tokens=2 * LENGTH)
    assert decoder.call("look", header="old", key=key, model=LLAMA) == LENGTH
    prompt.call("resume", cache="p")
    prompt.call("set_lengths", cache="p", lengths=[0])
    prompt.call("feed", cache="p", model=LLAMA, ids=ids_of(LENGTH, seed=2))     # as long as before, and another text
    prompt.call("handoff", cache="p", key=key, keep=True)
    answer = decoder.attempt("bring", header="old", cache="d", key=key)
    assert answer.outcome == "LLM_KV_CACHE_NOT_EXIST"
    assert "the row was filled anew meanwhile" in answer.text
    assert decoder.call("lengths", cache="d") == [0]
    for name, peer in (("p", prompt), ("d", decoder)):
        peer.call("close", cache=name)


def test_a_prompt_that_is_killed_in_its_prefill(prompt: StartPeer, decoder: StartPeer) -> None:
    """The decoder waits meanwhile, hears of it, and does the work itself."""
    need_models()
    first, second = ModelPeer(prompt()), ModelPeer(decoder())
    ids = ids_of(LENGTH)
    first.call("new_cache", cache="p", model=LLAMA, tokens=LENGTH)
    second.call("load", model=LLAMA)
    second.send("receive", cache="d", key=req(1, 9), model=LLAMA, timeout_ms=20_000)
    first.send("feed_and_die", cache="p", model=LLAMA, ids=ids, layer=1)
    assert not first.peer.wait_stopped_or_dead()
    answer = second.peer.receive()
    assert answer.outcome == "LLM_WAIT_PROCESS_TIMEOUT"
    assert answer.ms < 10_000
    second.call("new_cache", cache="d", model=LLAMA, tokens=LENGTH + STEPS)
    said = second.call("feed", cache="d", model=LLAMA, ids=ids)
    tokens = second.call("greedy", cache="d", model=LLAMA, first=said, steps=STEPS)
    assert tokens == second.call("alone", model=LLAMA, ids=ids, steps=STEPS + 1)


def test_what_was_received_outlives_the_prompt(prompt: StartPeer, decoder: StartPeer) -> None:
    need_models()
    first, second = ModelPeer(prompt()), ModelPeer(decoder())
    ids, model = ids_of(LENGTH), {"family": "gemma3"}
    first.call("new_cache", cache="p", model=model, tokens=LENGTH + STEPS)
    token = first.call("feed", cache="p", model=model, ids=ids)
    first.call("handoff", cache="p", key=["key", 1, 2**64 - 1, 0, 3])
    for command, name in (("receive", "d"), ("receive_fork", "f")):
        more = {"room": STEPS} if command == "receive" else {}
        second.call(command, cache=name, key=["key", 1, 2**64 - 1, 0, 3], model=model, **more)
    first.peer.kill()
    wanted = second.call("alone", model=model, ids=ids, steps=STEPS + 1)
    for name in "df":
        assert second.call("greedy", cache=name, model=model, first=token, steps=STEPS) == wanted
