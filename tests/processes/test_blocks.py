"""Blocks between processes: keys, bad numbers, owners that end, an index that grows, a cache that is its own source."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, array, blocks, req
from reference import (
    NOT_EXIST,
    PARAM_INVALID,
    SUCCESS,
    Bytes,
    Geometry,
    PullBlocks,
    canary,
    expected_pull_blocks,
    geometry,
    pattern,
)

pytestmark = pytest.mark.timeout(300)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
T_MS = 20000
AT_ONCE = {"SHMKV_RECYCLE_BYTES": "0"}
BLOCKS: dict[str, Any] = {"num_tensors": 4, "shape": (8, 16), "dtype": "DT_INT8"}
FORM = geometry(4, [8, 16], 1)
KEY = blocks(1)


def content(generation: int, form: Geometry = FORM) -> Bytes:
    return pattern(form, generation)


def pull(d: Peer, src: list[int], dst: list[int], key: list[Any] = KEY, **how: Any) -> str:
    return d.outcome("pull_blocks", key=key, name="kv", src=src, dst=dst, **how)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P with a blocks cache under KEY, memory given back at once; D with one of the same shape."""
    p, d = prompt(1, env=AT_ONCE), decoder(2)
    p.call("allocate_blocks", name="kv", key=KEY, **BLOCKS)
    p.call("fill", name="kv", generation=1)
    d.call("allocate_blocks", name="kv", **BLOCKS)
    d.call("canary", name="kv")
    return p, d


def test_key_goes_with_its_cache_and_comes_with_the_next(pair: tuple[Peer, Peer], namespace: Namespace) -> None:
    p, d = pair
    for generation in (2, 3):
        before = namespace.segments()
        p.call("deallocate", name="kv")
        assert len(before - namespace.segments()) == 1, "the key keeps no memory"
        assert pull(d, [1], [0]) == NOT_EXIST
        p.call("allocate_blocks", name="kv", key=KEY, **{**BLOCKS, "shape": (8 + generation, 16)})
        p.call("fill", name="kv", generation=generation)
        last = 7 + generation
        assert pull(d, [1, last], [0, 7]) == SUCCESS
        wanted = content(generation, geometry(4, [8 + generation, 16], 1))
        np.testing.assert_array_equal(d.read("kv")[:, :, [0, 7]], wanted[:, :, [1, last]])


def test_same_model_id_of_two_clusters_and_two_of_one(pair: tuple[Peer, Peer], prompt: StartPeer) -> None:
    p, d = pair
    q = prompt(3)
    for peer, key, name, generation in ((q, blocks(3), "kv", 5), (p, blocks(1, 1), "more", 6)):
        peer.call("allocate_blocks", name=name, key=key, **BLOCKS)
        peer.call("fill", name=name, generation=generation)
    d.call("link", ids=[3])
    keys = {1: KEY, 5: blocks(3), 6: blocks(1, 1)}
    assert p.outcome("allocate_blocks", name="no", key=KEY) == PARAM_INVALID
    for generation, key in keys.items():
        assert pull(d, [4], [generation], key) == SUCCESS
        np.testing.assert_array_equal(d.read("kv")[:, :, generation], content(generation)[:, :, 4])
    assert [pull(d, [4], [0], blocks(3, 1)), pull(d, [4], [0], blocks(1, 2))] == [NOT_EXIST] * 2


def test_bad_numbers_over_a_link_move_nothing(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    d.call("allocate_blocks", name="other", **{**BLOCKS, "shape": (8, 32)})
    wrong: list[tuple[list[int], list[int], dict[str, Any]]] = [
        ([8], [0], {}), ([0, 8], [0, 1], {}), ([8, 1], [0, 0], {}), ([0], [8], {}), ([2**32], [0], {}), ([0], [2**64 - 1], {}),
        ([-1], [0], {}), ([0, 1], [0], {}), ([], [], {}), ([0], [0], {"src_layer_range": range(1)}),
        ([0], [0], {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}), ([0], [0], {"batch_index": 1}),
        ([0], [0], {"name": "other"})]
    said = [d.attempt("pull_blocks", **{"key": KEY, "name": "kv", "src": src, "dst": dst, **how}) for src, dst, how in wrong]
    assert [answer.outcome for answer in said] == [PARAM_INVALID] * len(wrong)
    assert all({"ValueError", "LLMException"} <= set(answer.kinds) for answer in said)
    assert (d.read("kv") == 0x5A).all()
    assert not d.read("other").any()
    assert pull(d, list(range(8)), list(range(8))) == SUCCESS
    np.testing.assert_array_equal(d.read("kv"), content(1))
    np.testing.assert_array_equal(p.read("kv"), content(1))


def test_unlinked_and_dead_owners(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    d.call("unlink", ids=[1])
    assert pull(d, [0], [0]) == "LLM_NOT_YET_LINK"
    d.call("link", ids=[1])
    assert pull(d, [0], [0]) == SUCCESS
    d.call("canary", name="kv")
    p.kill()
    answer = d.attempt("pull_blocks", key=KEY, name="kv", src=[0], dst=[0])
    assert (answer.outcome, answer.ms < T_MS / 2) == (TIMED_OUT, True)
    assert (d.read("kv") == 0x5A).all()


def test_owner_that_finalizes(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("finalize")
    assert pull(d, [0], [0]) == TIMED_OUT
    assert (d.read("kv") == 0x5A).all()


def test_thousands_of_blocks_keys_while_the_index_grows(prompt: StartPeer, decoder: StartPeer,
                                                        rounds: Callable[[int], int]) -> None:
    """Blocks keys, request keys and cache ids are in one index, which grows several times."""
    p, d = prompt(1), decoder(2)
    count, small = rounds(3000), {"num_tensors": 1, "shape": (2, 16), "dtype": "DT_INT8"}
    d.call("allocate_blocks", name="kv", num_tensors=1, shape=(2, 16))
    made = p.batch([step for number in range(count) for step in (
        ("allocate_blocks", {"name": f"b{number}", "key": blocks(1, number), **small}),
        ("fill", {"name": f"b{number}", "generation": number}))])
    assert all(answer.outcome == SUCCESS for answer in made)
    p.call("allocate", name="requests", num_tensors=1, shape=(5000, 1), dtype="DT_INT8", keys=[req(1, n) for n in range(5000)])
    numbers = list(range(0, count, 7))
    p.batch([("deallocate", {"name": f"b{number}"}) for number in range(0, count, 21)])
    said = d.batch([step for number in numbers for step in (
        ("pull_blocks", {"key": blocks(1, number), "name": "kv", "src": [1], "dst": [0]}), ("read", {"name": "kv"}))])
    form = geometry(1, [2, 16], 1)
    for place, number in enumerate(numbers):
        answer, found = said[2 * place:2 * place + 2]
        assert answer.outcome == (SUCCESS if number % 21 else NOT_EXIST), number
        if number % 21:
            np.testing.assert_array_equal(array(found.value)[:, :, 0], content(number, form)[:, :, 1])
    assert d.outcome("pull_blocks", key=blocks(1, count), name="kv", src=[1], dst=[0]) == NOT_EXIST
    assert d.outcome("pull", key=req(1, 4999), name="kv", size=1) == SUCCESS


CHURN = """
manager, desc = agent.dist.kv_cache_manager, shmkv.CacheDesc(1, [2, 16], shmkv.DataType.DT_INT8)
for number in range({count}):
    key = shmkv.BlocksCacheKey(1, 1000 + number)
    made = manager.allocate_blocks_cache(desc, key)
    manager.deallocate_cache(made)
"""


def test_blocks_keys_stay_while_thousands_of_others_come_and_go(prompt: StartPeer, decoder: StartPeer,
                                                                rounds: Callable[[int], int]) -> None:
    """Places of the index that were used once are cleared now and then by filling it anew."""
    p, d = prompt(1), decoder(2)
    small, form = {"num_tensors": 1, "shape": (2, 16)}, geometry(1, [2, 16], 1)
    d.call("allocate_blocks", name="kv", **small)
    for number in range(9):
        p.call("allocate_blocks", name=f"b{number}", key=blocks(1, number), **small)
        p.call("fill", name=f"b{number}", generation=number)
    p.call("execute", code=CHURN.format(count=rounds(3000)))
    for number in range(9):
        assert pull(d, [1], [0], blocks(1, number)) == SUCCESS
        np.testing.assert_array_equal(d.read("kv")[:, :, 0], content(number, form)[:, :, 1])
    assert [pull(d, [1], [0], blocks(1, each)) for each in (9, 1000, 999 + rounds(3000))] == [NOT_EXIST] * 3


@pytest.mark.parametrize("linked", [False, True])
def test_pull_into_the_source_itself(decoder: StartPeer, linked: bool) -> None:
    """Overlapping lists within one cache are as if through a temporary, with a link to the own cluster and without."""
    d = decoder(2, link=(), enable_switch_role=True)
    d.call("switch_role", role="PROMPT", options={"llm.listenIpInfo": "127.0.0.1:1"})
    d.call("allocate_blocks", name="kv", key=blocks(2), **BLOCKS)
    d.call("switch_role", role="DECODER")
    if linked:
        d.call("link", ids=[2])
    for src, dst in (([0, 1, 2, 3], [1, 2, 3, 4]), ([0, 1], [1, 0]), ([1, 2, 3], [0, 1, 2]), ([5, 5, 0], [0, 5, 0]),
                     (list(range(8)), list(range(7, -1, -1)))):
        d.call("fill", name="kv", generation=3)
        assert pull(d, src, dst, blocks(2)) == SUCCESS
        answer, wanted = expected_pull_blocks(content(3), content(3), PullBlocks(src, dst))
        assert answer == SUCCESS
        np.testing.assert_array_equal(d.read("kv"), wanted, err_msg=f"{src} to {dst}")


def test_two_decoders_and_their_threads_pull_the_same_blocks(prompt: StartPeer, decoder: StartPeer) -> None:
    p = prompt(1)
    p.call("allocate_blocks", name="kv", key=KEY, **BLOCKS)
    p.call("fill", name="kv", generation=1)
    ds = [decoder(2), decoder(3)]
    lists = [list(range(8)), list(range(7, -1, -1)), [0, 0, 4, 4, 2, 2, 6, 6], [3, 1, 7, 5, 0, 2, 4, 6]]
    for d in ds:
        for number in range(len(lists)):
            d.call("allocate_blocks", name=f"kv{number}", **BLOCKS)
            d.call("canary", name=f"kv{number}")
        d.send("parallel", batches=[[("pull_blocks", {"key": KEY, "name": f"kv{number}", "src": src, "dst": list(range(8))})] * 50
                                    for number, src in enumerate(lists)])
    for d in ds:
        said = d.receive()
        assert not said.kinds, said.trace
        assert all("error" not in answer for batch in said.value for answer in batch)
        for number, src in enumerate(lists):
            answer, wanted = expected_pull_blocks(content(1), canary(FORM), PullBlocks(src, list(range(8))))
            assert answer == SUCCESS
            np.testing.assert_array_equal(d.read(f"kv{number}"), wanted)
