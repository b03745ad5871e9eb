"""A model's cache from one process to another, for each family of models: the bytes, and every token that is said behind them."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from model_peers import Pair, pair_in
from peer import Namespace, prefix
from tiny_models import FAMILIES, WINDOW
from tiny_models import prompt_ids as ids_of

pytestmark = [pytest.mark.llm, pytest.mark.timeout(300)]
STEPS, LENGTH = 14, 17
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both processes, for all tests of this file."""
    yield from pair_in(Namespace(tmp_path_factory.mktemp("families")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_says_what_one_process_says(pair: Pair, family: str) -> None:
    prompt, decoder = pair.prompt, pair.decoder
    model, said = {"family": family}, []
    for seed in SEEDS:
        key, ids = pair.key(), ids_of(LENGTH + seed, seed)
        prompt.call("new_cache", cache="p", model=model, tokens=len(ids))
        first = prompt.call("feed", cache="p", model=model, ids=ids)
        bytes_there = prompt.call("digest", cache="p")
        assert prompt.call("handoff", cache="p", key=key) == len(ids)
        assert decoder.call("receive", cache="d", key=key, model=model, room=STEPS) == [len(ids)]
        assert decoder.call("digest", cache="d") == bytes_there
        tokens = decoder.call("greedy", cache="d", model=model, first=first, steps=STEPS)
        assert tokens == decoder.call("alone", model=model, ids=ids, steps=STEPS + 1)
        assert decoder.call("lengths", cache="d") == [len(ids) + STEPS]
        decoder.call("close", cache="d")
        said.append(tokens)
    # The models are no parrots: what they say depends on the prompt, and goes on changing.
    assert len({tuple(tokens) for tokens in said}) == len(SEEDS)
    assert all(len(set(tokens)) > 2 for tokens in said)


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_of_one_prefix_say_the_same_without_a_copy(pair: Pair, family: str) -> None:
    prompt, decoder = pair.prompt, pair.decoder
    model, key, ids = {"family": family}, prefix(1, FAMILIES.index(family)), ids_of(LENGTH, 4)
    prompt.call("new_cache", cache="p", model=model, tokens=LENGTH + STEPS)
    first = prompt.call("feed", cache="p", model=model, ids=ids)
    prompt.call("handoff", cache="p", key=key)
    assert decoder.call("receive_fork", cache="a", key=key, model=model) == [LENGTH]
    assert decoder.call("receive_fork", cache="b", key=key, model=model) == [LENGTH]
    wanted = decoder.call("alone", model=model, ids=ids, steps=STEPS + 1)
    before = decoder.call("digest", cache="b")
    assert decoder.call("greedy", cache="a", model=model, first=first, steps=STEPS) == wanted
    assert decoder.call("digest", cache="b") == before
    assert decoder.call("greedy", cache="b", model=model, first=first, steps=STEPS) == wanted
    text = decoder.refusal("feed", cache="b", model=model, ids=[1])
    assert f"layer 0: {LENGTH + STEPS + 1} tokens do not fit into a cache of {LENGTH + STEPS}" in text
    for name in "ab":
        decoder.call("close", cache=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_of_transformers_goes_on_behind_what_was_received(pair: Pair, family: str) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    model, ids = {"family": family}, ids_of(LENGTH, 5)
    prompt.call("new_cache", cache="p", model=model, tokens=LENGTH)
    first = prompt.call("feed", cache="p", model=model, ids=ids)
    prompt.call("handoff", cache="p", key=key)
    decoder.call("receive", cache="d", key=key, model=model, room=STEPS)
    tokens = decoder.call("generate", cache="d", model=model, ids=[*ids, first], steps=STEPS)
    assert [first, *tokens] == decoder.call("alone", model=model, ids=ids, steps=STEPS + 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_a_conversation_moves_only_what_is_new(pair: Pair, family: str) -> None:
    """The prompt's cache is taken back after each turn, and the decoder keeps its own."""
    prompt, decoder = pair.prompt, pair.decoder
    model, room = {"family": family}, 80
    prompt.call("new_cache", cache="p", model=model, tokens=room)
    decoder.call("new_cache", cache="d", model=model, tokens=room)
    ids: list[int] = []
    told = held = 0                 # tokens that each side has keys and values of
    for turn in range(3):
        if turn:
            prompt.call("resume", cache="p")
        ids += ids_of(9, 20 + turn)
        first = prompt.call("feed", cache="p", model=model, ids=ids[told:])
        key = pair.key()
        told = prompt.call("handoff", cache="p", key=key, keep=True)
        assert decoder.call("receive_into", cache="d", key=key, start=held) == told == len(ids)
        assert decoder.call("digest", cache="d", first=held) == prompt.call("digest", cache="p", first=held)
        tokens = decoder.call("greedy", cache="d", model=model, first=first, steps=STEPS)
        assert tokens == decoder.call("alone", model=model, ids=ids, steps=STEPS + 1)
        held = told + STEPS         # the last token was said and not fed
        ids += tokens
    assert held > 2 * WINDOW
    prompt.call("close", cache="p")
    decoder.call("close", cache="d")


def test_two_prompts_of_one_batch_go_on_in_other_rows(pair: Pair) -> None:
    prompt, decoder = pair.prompt, pair.decoder
    model, prompts = {"family": "llama"}, [ids_of(LENGTH, 6), ids_of(LENGTH, 7)]
    prompt.call("new_cache", cache="p", model=model, tokens=LENGTH, rows=2)
    firsts = prompt.call("feed_rows", cache="p", model=model, rows=prompts)
    keys = [pair.key(), pair.key()]
    for row, key in enumerate(keys):
        prompt.call("handoff", cache="p", key=key, row=row)
    decoder.call("new_cache", cache="d", model=model, tokens=LENGTH + STEPS, rows=2)
    for row, key in enumerate(keys):
        assert decoder.call("receive_into", cache="d", key=key, row=1 - row) == LENGTH
    tokens = [firsts[::-1]]
    for _ in range(STEPS):
        tokens.append(decoder.call("feed_rows", cache="d", model=model, rows=[[token] for token in tokens[-1]]))
    for row, ids in enumerate(prompts):
        assert [said[1 - row] for said in tokens] == decoder.call("alone", model=model, ids=ids, steps=STEPS + 1)


def test_a_prompt_of_one_token(pair: Pair) -> None:
    prompt, decoder = pair.prompt, pair.decoder
    for family in FAMILIES:
        model, key = {"family": family}, pair.key()
        prompt.call("new_cache", cache="p", model=model, tokens=1)
        first = prompt.call("feed", cache="p", model=model, ids=[33])
        assert prompt.call("handoff", cache="p", key=key) == 1
        assert decoder.call("receive", cache="d", key=key, model=model, room=5) == [1]
        assert decoder.call("greedy", cache="d", model=model, first=first, steps=5) == decoder.call(
            "alone", model=model, ids=[33], steps=6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_element_types(pair: Pair, dtype: str) -> None:
    prompt, decoder, key = pair.prompt, pair.decoder, pair.key()
    model, ids = {"family": "llama", "dtype": dtype}, ids_of(LENGTH, 8)
    prompt.call("new_cache", cache="p", model=model, tokens=LENGTH)
    prompt.call("feed", cache="p", model=model, ids=ids)
    before = prompt.call("digest", cache="p")
    prompt.call("handoff", cache="p", key=key)
    assert decoder.call("receive", cache="d", key=key, model=model) == [LENGTH]
    assert decoder.call("digest", cache="d") == before
