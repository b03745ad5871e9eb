"""Contract, section 7.6: pull_blocks moves exactly the bytes that the numpy twin says, in one process and between two."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from block_cases import BlockCase, case_in_one_blocks_cache, random_block_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Peer, StartPeer, array, blocks, by_id, req
from pull_cases import Side
from reference import SUCCESS, Bytes, canary, expected_pull_blocks, noise

from shmkv import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, KvCache, LLMDataDist, LLMException, LLMRole

pytestmark = pytest.mark.timeout(600)
Here = Callable[..., Any]
MANY = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
OWN = 1
KEY = BlocksCacheKey(OWN, 5)


class OneProcess:
    """A cluster that allocates as a prompt and pulls from itself as a decoder."""

    def __init__(self, dist: LLMDataDist) -> None:
        self.dist, self.manager = dist, dist.kv_cache_manager

    def become(self, role: LLMRole) -> None:
        self.dist.switch_role(role, {"llm.listenIpInfo": "127.0.0.1:1"})

    def allocate(self, side: Side, content: Bytes, *, is_blocks: bool, key: BlocksCacheKey | None = None) -> KvCache:
        desc = CacheDesc(side.num_tensors, side.shape, DataType[side.dtype], batch_dim_index=side.batch_dim)
        made = self.manager.allocate_blocks_cache(desc, key) if is_blocks else self.manager.allocate_cache(desc)
        cache_bytes.write(made, content)
        return made

    def pull(self, case: BlockCase, src: KvCache, dst: KvCache) -> str:
        pull = case.pull
        key = CacheKeyByIdAndIndex(OWN, src.cache_id, pull.src_row) if pull.by_row else KEY
        self.become(LLMRole.DECODER)
        try:
            self.manager.pull_blocks(key, dst, list(pull.prompt_blocks), list(pull.decoder_blocks), **pull.options())
        except LLMException as error:
            return error.status_code.name
        return SUCCESS


def is_blocks(case: BlockCase, side: str) -> bool:
    """Can that side be made by allocate_blocks_cache?"""
    as_row = case.pull.by_row if side == "src" else case.pull.into_row
    return not as_row and getattr(case, side).batch_dim == 0


def test_b18_self_pull_moves_what_the_twin_moves(here: Here) -> None:
    one = OneProcess(here("DECODER", OWN, enable_switch_role=True))

    @MANY
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = random_block_case(lambda low, high: data.draw(st.integers(low, high)))
        before, empty = noise(case.src.geometry, data.draw(st.integers(0, 99))), canary(case.dst.geometry)
        one.become(LLMRole.PROMPT)
        src = one.allocate(case.src, before, is_blocks=not case.pull.by_row, key=None if case.pull.by_row else KEY)
        dst = one.allocate(case.dst, empty, is_blocks=is_blocks(case, "dst"))
        said = one.pull(case, src, dst)
        answer, wanted = expected_pull_blocks(before, empty, case.pull)
        after, source_after = cache_bytes.read(dst), cache_bytes.read(src)
        one.manager.deallocate_cache(src)
        one.manager.deallocate_cache(dst)
        assert said == answer, case
        np.testing.assert_array_equal(after, wanted)
        np.testing.assert_array_equal(source_after, before)

    check()


def test_b18_pull_within_one_blocks_cache_is_as_if_through_a_temporary(here: Here) -> None:
    one = OneProcess(here("DECODER", OWN, enable_switch_role=True))

    @settings(MANY, max_examples=1000)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = case_in_one_blocks_cache(lambda low, high: data.draw(st.integers(low, high)))
        before = noise(case.src.geometry, data.draw(st.integers(0, 99)))
        one.become(LLMRole.PROMPT)
        cache = one.allocate(case.src, before, is_blocks=True, key=KEY)
        said = one.pull(case, cache, cache)
        answer, wanted = expected_pull_blocks(before, before, case.pull)
        after = cache_bytes.read(cache)
        one.manager.deallocate_cache(cache)
        assert said == answer == SUCCESS, case
        np.testing.assert_array_equal(after, wanted)

    check()


@pytest.mark.parametrize(("seed", "copy"), [(0, "memory"), (1, "memory"), (2, "memory"), (0, "pread"), (3, "pread")])
def test_b18_random_blocks_between_two_processes(prompt: StartPeer, decoder: StartPeer, seed: int, copy: str) -> None:
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY": copy})
    check_between(p, d, [random_block_case(random.Random(1000 * seed + number).randint) for number in range(150)])


def test_b18_row_into_blocks_consumes_a_request_key(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=(2, 64), dtype="DT_INT8", keys=[req(1, 7), req(1, 8)])
    p.call("noise", name="kv", seed=1)
    d.call("allocate_blocks", name="kv")
    d.call("canary", name="kv")
    wrong = [{"dst": [0, 1, 2, 3, 4]}, {"dst": [8]}, {"src": [0], "dst": [0]}, {"dst": []}]
    said = [d.outcome("pull_blocks", key=req(1, 8), name="kv", **{"src": [], **each}) for each in wrong]
    assert said == ["LLM_PARAM_INVALID"] * 4
    assert (d.read("kv") == 0x5A).all()
    for wanted in (SUCCESS, "LLM_KV_CACHE_NOT_EXIST"):
        assert d.outcome("pull_blocks", key=req(1, 8), name="kv", src=[], dst=[6, 0, 3]) == wanted
    chunks = p.read("kv")[:, 0, 1].reshape(4, 4, 16)
    np.testing.assert_array_equal(d.read("kv")[:, 0, [6, 0, 3]], chunks[:, :3])
    assert d.outcome("pull", key=req(1, 7), name="kv", size=16) == SUCCESS, "the other key is where it was"


def test_b18_row_into_blocks_layer_by_layer_consumes_at_the_last(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=(2, 64), dtype="DT_INT8", keys=[req(1, 7)])
    d.call("allocate_blocks", name="kv")
    layers = [{"src_layer_range": layer, "dst_layer_range": layer} for layer in (range(1), range(1, 2))]
    order = [layers[1], layers[1], layers[0], layers[0]]
    said = [d.outcome("pull_blocks", key=req(1, 7), name="kv", src=[], dst=[1], **layer) for layer in order]
    assert said == [SUCCESS, SUCCESS, SUCCESS, "LLM_KV_CACHE_NOT_EXIST"]


def check_between(p: Peer, d: Peer, cases: list[BlockCase]) -> None:
    """Run the cases with sources in p and destinations in d, and compare every byte of d with the twin."""
    made = p.batch([_allocation(f"src{n}", case.src, None if case.pull.by_row else blocks(1, n)) for n, case in enumerate(cases)])
    p.batch([("noise", {"name": f"src{number}", "seed": number}) for number in range(len(cases))])
    d.batch([_allocation(f"dst{number}", case.dst, [] if is_blocks(case, "dst") else None) for number, case in enumerate(cases)])
    d.batch([("canary", {"name": f"dst{number}"}) for number in range(len(cases))])
    pulls = d.batch([("pull_blocks", {
        "key": by_id(1, made[n].value, case.pull.src_row) if case.pull.by_row else blocks(1, n), "name": f"dst{n}",
        "src": case.pull.prompt_blocks, "dst": case.pull.decoder_blocks, **case.pull.options()}) for n, case in enumerate(cases)])
    read = d.batch([("read", {"name": f"dst{number}"}) for number in range(len(cases))])
    for number, case in enumerate(cases):
        answer, wanted = expected_pull_blocks(noise(case.src.geometry, number), canary(case.dst.geometry), case.pull)
        assert pulls[number].outcome == answer, (case, pulls[number].text, pulls[number].trace)
        np.testing.assert_array_equal(array(read[number].value), wanted, err_msg=str(case))
    assert {SUCCESS, "LLM_PARAM_INVALID"} <= {pull.outcome for pull in pulls}


def _allocation(name: str, side: Side, key: list[Any] | None) -> tuple[str, dict[str, Any]]:
    """A blocks cache, with a key unless that is empty, or an ordinary one where it is None."""
    common = {"name": name, "num_tensors": side.num_tensors, "shape": side.shape, "dtype": side.dtype}
    return ("allocate", {**common, "batch_dim": side.batch_dim}) if key is None else ("allocate_blocks", {**common, "key": key})
