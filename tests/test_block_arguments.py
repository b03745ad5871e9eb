"""Lists of blocks as the core takes them: last of equal destinations, copies cut into batches, numbers beyond 32 bits."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import noise

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    block_arguments,
    own_pull,
)

U32, U64 = 2**32 - 1, 2**64 - 1
MANY = settings(max_examples=1000, deadline=None)
PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14)
Pairs = list[tuple[int, int]]


def one_by_one(blocks: list[int], pairs: Pairs) -> list[int]:
    """Each copy sees the earlier ones."""
    after = list(blocks)
    for src, dst in pairs:
        after[dst] = after[src]
    return after


@MANY
@given(PAIRS, st.randoms(use_true_random=False))
def test_batches_do_what_the_copies_do_one_by_one(pairs: Pairs, shuffled: random.Random) -> None:
    """In whatever order the copies of a batch are done, and with all reads of a batch before its writes."""
    found = list(range(100, 107))
    wanted = one_by_one(found, pairs)
    for batch in block_arguments.batches(pairs):
        in_any_order = list(batch)
        shuffled.shuffle(in_any_order)
        at_once = list(found)
        for src, dst in batch:
            at_once[dst] = found[src]
        found = one_by_one(found, in_any_order)
        assert found == at_once
    assert found == wanted


@MANY
@given(PAIRS)
def test_batches_write_no_block_twice_and_none_that_they_read(pairs: Pairs) -> None:
    for batch in block_arguments.batches(pairs):
        assert batch, "none is empty"
        written = [dst for _, dst in batch]
        assert len(set(written)) == len(written)
        assert not set(written) & {src for src, _ in batch}


@pytest.mark.parametrize(("pairs", "wanted"), [
    ([], 0), ([(0, 0)], 0), ([(0, 1), (2, 3), (0, 4)], 1), ([(0, 1), (1, 2)], 2), ([(0, 1), (2, 1)], 2), ([(0, 1), (2, 0)], 2),
    ([(0, 1), (1, 1), (2, 3)], 1), ([(n, n + 1) for n in range(5)], 5), ([(n, n + 10) for n in range(5)], 1),
], ids=str)
def test_number_of_batches(pairs: Pairs, wanted: int) -> None:
    assert len(list(block_arguments.batches(pairs))) == wanted


@MANY
@given(PAIRS)
def test_last_of_each_destination(pairs: Pairs) -> None:
    src, dst = [one for one, _ in pairs], [other for _, other in pairs]
    sources, targets, others = block_arguments.last_of_each(src, dst)
    assert dict(zip(targets, sources, strict=True)) == dict(zip(dst, src, strict=True))
    assert len(set(targets)) == len(targets)
    assert set(sources) | set(others) == set(src), "every source is still looked at"
    assert not set(sources) & set(others)


def test_neighbours_without_repeats_keep_their_order() -> None:
    lists = [4, 5, 6, 1], [0, 1, 2, 9]
    assert block_arguments.last_of_each(*lists) == (*lists, [])


@pytest.mark.parametrize("value", [0, 1, U32 - 1, U32, U32 + 1, 2**33, U64, True])
def test_numbers_fit_32_bits_afterwards(value: int) -> None:
    assert block_arguments.check_numbers("blocks", [value]) == [min(value, U32)]


@pytest.mark.parametrize("value", [-1, U64 + 1, -2**70])
def test_numbers_outside_uint64_are_named(value: int) -> None:
    with pytest.raises(LLMParamError, match=r"blocks\[1\].*" + str(value)):
        block_arguments.check_numbers("blocks", [3, value])


# -- a pull out of the own cluster whose blocks change meanwhile -------------------------------------------------------------

Change = Callable[[Any, Any], None]
OTHERS: dict[str, list[Change]] = {
    "unbound": [lambda caches, src: caches.unbind(src, [1])],
    "unbound, published": [lambda caches, src: caches.unbind(src, [1]), lambda caches, src: caches.publish(src, [1], 2)],
    "unbound, bound": [lambda caches, src: caches.unbind(src, [1]),
                       lambda caches, src: caches.bind(src, {1: CacheKey(1, 9).words}, publish=True)],
}
SAME: dict[str, list[Change]] = {
    "first key": [lambda caches, src: caches.bind(src, {1: CacheKey(1, 9).words}, publish=True)],
    "another block": [lambda caches, src: caches.unbind(src, [2])],
    "deallocated": [lambda caches, src: caches.deallocate(src)],
}


@pytest.fixture
def pulled(here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Change]], Any]:
    """pulled(changes): pull blocks 1 and 3 of the own cluster, which makes the changes between copy and the look behind it; the
    bytes that arrived and those that had to."""
    dist = here("PROMPT", 1, enable_switch_role=True)
    manager, caches = dist.kv_cache_manager, dist.kv_cache_manager._cluster.caches
    desc = CacheDesc(2, [4, 8], DataType.DT_INT8)
    src, dst = manager.allocate_blocks_cache(desc, BlocksCacheKey(1)), manager.allocate_blocks_cache(desc)
    before = noise(cache_bytes.geometry_of(src), 1)
    cache_bytes.write(src, before)
    dist.switch_role(LLMRole.DECODER)
    own, copy = src._own, own_pull._copy

    def run(changes: list[Change]) -> tuple[Any, Any]:
        def copy_and_change(*arguments: Any) -> int:
            status = copy(*arguments)
            with manager._cluster.lock:
                for change in changes:
                    change(caches, own)
            return status

        monkeypatch.setattr(own_pull, "_copy", copy_and_change)
        manager.pull_blocks(BlocksCacheKey(1), dst, [1, 3], [0, 2])
        return cache_bytes.read(dst)[:, :, [0, 2]], before[:, :, [1, 3]]

    return run


@pytest.mark.parametrize("changes", OTHERS.values(), ids=list(OTHERS))
def test_own_block_that_is_filled_again_meanwhile_is_not_there(pulled: Callable[[list[Change]], Any],
                                                               changes: list[Change]) -> None:
    with pytest.raises(LLMException) as refusal:
        pulled(changes)
    assert refusal.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize("changes", SAME.values(), ids=list(SAME))
def test_own_blocks_that_are_still_the_same_are_a_success(pulled: Callable[[list[Change]], Any], changes: list[Change]) -> None:
    found, wanted = pulled(changes)
    np.testing.assert_array_equal(found, wanted)
