"""Contract, appendix B1 and B10: pull_cache moves exactly the bytes that the numpy twin says."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cache_bytes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Answer, Peer, StartPeer, array, by_id
from pull_cases import Case, Side, case_in_one_cache, random_case
from pull_table import DESTINATION_SHAPE, DESTINATION_TENSORS, TABLE
from reference import SUCCESS, Bytes, Pull, canary, expected_pull, noise

from shmkv import CacheDesc, CacheKeyByIdAndIndex, DataType, KvCache, LLMException

pytestmark = pytest.mark.timeout(600)
Here = Callable[..., Any]
MANY = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
OWN = 1
DESTINATION = Side(DESTINATION_TENSORS, DESTINATION_SHAPE, "DT_FLOAT16", 0)


def _allocate(manager: Any, side: Side, content: Bytes) -> KvCache:
    desc = CacheDesc(side.num_tensors, side.shape, DataType[side.dtype], batch_dim_index=side.batch_dim)
    cache = manager.allocate_cache(desc)
    cache_bytes.write(cache, content)
    return cache


def _pull(manager: Any, src: KvCache, dst: KvCache, pull: Pull) -> str:
    key = CacheKeyByIdAndIndex(OWN, src.cache_id, pull.src_row)
    try:
        manager.pull_cache(key, dst, **pull.options())
    except LLMException as error:
        return error.status_code.name
    return SUCCESS


def test_b1_self_pull_moves_what_the_twin_moves(here: Here) -> None:
    manager = here("DECODER", OWN).kv_cache_manager

    @MANY
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = random_case(lambda low, high: data.draw(st.integers(low, high)))
        before, empty = noise(case.src.geometry, data.draw(st.integers(0, 99))), canary(case.dst.geometry)
        src, dst = _allocate(manager, case.src, before), _allocate(manager, case.dst, empty)
        said = _pull(manager, src, dst, case.pull)
        answer, wanted = expected_pull(before, empty, case.pull)
        after, source_after = cache_bytes.read(dst), cache_bytes.read(src)
        manager.deallocate_cache(src)
        manager.deallocate_cache(dst)
        assert said == answer, case
        np.testing.assert_array_equal(after, wanted)
        np.testing.assert_array_equal(source_after, before)

    check()


def test_b1_pull_within_one_cache_is_as_if_through_a_temporary(here: Here) -> None:
    manager = here("DECODER", OWN).kv_cache_manager

    @settings(MANY, max_examples=1000)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = case_in_one_cache(lambda low, high: data.draw(st.integers(low, high)))
        before = noise(case.src.geometry, data.draw(st.integers(0, 99)))
        cache = _allocate(manager, case.src, before)
        said = _pull(manager, cache, cache, case.pull)
        answer, wanted = expected_pull(before, before, case.pull)
        after = cache_bytes.read(cache)
        manager.deallocate_cache(cache)
        assert said == answer, case
        np.testing.assert_array_equal(after, wanted)

    check()


@pytest.mark.parametrize(("seed", "copy"), [(0, "memory"), (1, "memory"), (2, "memory"), (0, "pread"), (3, "pread")])
def test_b1_random_pulls_between_two_processes(prompt: StartPeer, decoder: StartPeer, seed: int, copy: str) -> None:
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY": copy})
    cases = [random_case(random.Random(1000 * seed + number).randint) for number in range(120)]
    _check_between(p, d, cases)


def test_b1_each_row_of_the_table_between_two_processes(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    cases = [Case(Side(row.src_tensors, row.src_shape, row.src_dtype, 0), DESTINATION, row.pull)
             for row in TABLE]
    said = _check_between(p, d, cases)
    assert [answer.outcome for answer in said] == [row.answer for row in TABLE]


@pytest.mark.parametrize("src_dim", [0, 1, 2])
@pytest.mark.parametrize("dst_dim", [0, 1, 2])
def test_b10_batch_dimension_on_either_side(prompt: StartPeer, decoder: StartPeer, src_dim: int,
                                            dst_dim: int) -> None:
    p, d = prompt(1), decoder(2)
    sides = {0: Side(4, [5, 3, 4], "DT_FLOAT", 0), 1: Side(4, [3, 5, 4], "DT_FLOAT", 1),
             2: Side(4, [3, 4, 5], "DT_FLOAT", 2)}
    whole = Case(sides[src_dim], sides[dst_dim], Pull(src_row=3, batch_index=1))
    # Windows that begin and end inside a piece of the strided side, and one byte across a border of pieces.
    windows = [(5, 7, 30), (0, 16, 32), (15, 3, 2), (47, 0, 1), (1, 1, 47), (16, 16, -1)]
    cases = [whole] + [replace(whole, pull=replace(whole.pull, src_cache_offset=src, dst_cache_offset=dst,
                                                   size=size)) for src, dst, size in windows]
    assert [answer.outcome for answer in _check_between(p, d, cases)] == [SUCCESS] * len(cases)


def test_b10_rows_are_those_of_numpy_slicing(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    cache_id = p.call("allocate", name="kv", num_tensors=1, shape=[2, 3, 4], dtype="DT_INT32", batch_dim=1)
    p.call("execute", code="agent.caches['kv'].tensors[0].numpy()[...] = np.arange(24).reshape(2, 3, 4)")
    d.call("allocate", name="kv", num_tensors=1, shape=[3, 8], dtype="DT_INT32")
    d.call("pull", key=by_id(1, cache_id, 2), name="kv", batch_index=1)
    row = d.call("execute", code="result = agent.caches['kv'].tensors[0].numpy()[1].tolist()")
    assert row == np.arange(24).reshape(2, 3, 4)[:, 2, :].reshape(-1).tolist()


def _check_between(p: Peer, d: Peer, cases: list[Case]) -> list[Answer]:
    """Run the cases with sources in p and destinations in d, and compare every byte of d with the twin."""
    made = p.batch([_allocation(f"src{number}", case.src) for number, case in enumerate(cases)])
    p.batch([("noise", {"name": f"src{number}", "seed": number}) for number in range(len(cases))])
    d.batch([_allocation(f"dst{number}", case.dst) for number, case in enumerate(cases)])
    d.batch([("canary", {"name": f"dst{number}"}) for number in range(len(cases))])
    pulls = d.batch([("pull", {"key": by_id(1, made[number].value, case.pull.src_row), "name": f"dst{number}",
                               **case.pull.options()}) for number, case in enumerate(cases)])
    read = d.batch([("read", {"name": f"dst{number}"}) for number in range(len(cases))])
    for number, case in enumerate(cases):
        answer, wanted = expected_pull(noise(case.src.geometry, number), canary(case.dst.geometry), case.pull)
        assert pulls[number].outcome == answer, (case, pulls[number].trace)
        np.testing.assert_array_equal(array(read[number].value), wanted, err_msg=str(case))
    return pulls


def _allocation(name: str, side: Side) -> tuple[str, dict[str, Any]]:
    return "allocate", {"name": name, "num_tensors": side.num_tensors, "shape": side.shape,
                        "dtype": side.dtype, "batch_dim": side.batch_dim}
