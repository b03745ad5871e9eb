"""Contract, section 7.6, on caches whose tensors differ from each other, and on blocks of the own cluster that are published."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    Placement,
)

pytestmark = pytest.mark.timeout(60)
Here = Callable[..., Any]
OWN = 1
KEY = BlocksCacheKey(OWN)
# Blocks of 32, 8 and 12 bytes, in this order.
SHAPES, DTYPES = [[6, 4, 4], [6, 8], [6, 3]], [DataType.DT_FLOAT16, DataType.DT_INT8, DataType.DT_FLOAT]
PROMPT = {"llm.listenIpInfo": "127.0.0.1:1"}


def like(shapes: list[list[int]], placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc.of_tensors(shapes, DTYPES, placement=placement)


def content(cache: KvCache) -> list[Any]:
    """A copy of each tensor, as bytes of each block."""
    return [tensor.numpy().view(np.uint8).reshape(tensor.shape[0], -1).copy() for tensor in cache.tensors]


def fill(cache: KvCache, seed: int | None = None) -> None:
    drawn = np.random.default_rng(seed)
    for tensor in cache.tensors:
        whole = tensor.numpy().view(np.uint8)
        whole[...] = 0x5A if seed is None else drawn.integers(0, 256, whole.shape)


def is_untouched(cache: KvCache) -> bool:
    return all((tensor == 0x5A).all() for tensor in content(cache))


class Differing:
    """`src` under KEY and `dst` of the same shapes, of a cluster that pulls from itself."""

    def __init__(self, dist: Any) -> None:
        self.dist, self.manager = dist, dist.kv_cache_manager
        self.src, self.dst = self.manager.allocate_blocks_cache(like(SHAPES), KEY), self.manager.allocate_blocks_cache(like(SHAPES))
        fill(self.src, 1)
        fill(self.dst)
        dist.switch_role(LLMRole.DECODER)

    def pull(self, src: list[int], dst: list[int], into: KvCache | None = None, key: Any = KEY, **how: Any) -> None:
        self.manager.pull_blocks(key, self.dst if into is None else into, src, dst, **how)


@pytest.fixture
def differing(here: Here) -> Differing:
    return Differing(here("PROMPT", OWN, enable_switch_role=True))


def test_b18_blocks_of_each_tensor_have_bytes_of_their_own(differing: Differing) -> None:
    differing.pull([5, 0, 1, 1], [0, 4, 5, 2])
    for before, after in zip(content(differing.src), content(differing.dst), strict=True):
        np.testing.assert_array_equal(after[[0, 4, 5, 2]], before[[5, 0, 1, 1]])
        assert (after[[1, 3]] == 0x5A).all()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_b18_one_tensor_whose_blocks_differ_is_enough(differing: Differing, place: int) -> None:
    shapes = [list(shape) for shape in SHAPES]
    shapes[place][-1] += 1
    dst = differing.manager.allocate_blocks_cache(like(shapes))
    fill(dst)
    with pytest.raises(LLMParamError):
        differing.pull([5, 0], [0, 4], dst)
    assert is_untouched(dst)
    others = [tensor for tensor in range(3) if tensor != place]
    for tensor in others:
        layer = range(tensor, tensor + 1)
        differing.pull([5], [0], dst, src_layer_range=layer, dst_layer_range=layer, tensor_num_per_layer=1)
    after = content(dst)
    assert (after[place] == 0x5A).all()
    for tensor in others:
        np.testing.assert_array_equal(after[tensor][0], content(differing.src)[tensor][5])


def test_b18_rows_and_blocks_of_tensors_that_differ(differing: Differing) -> None:
    """The shortest row decides how many blocks fit, whichever tensor has it."""
    longer = [[2, 12, 4], [2, 24], [2, 8]]          # rows of 96, 24 and 32 bytes: 3, 3 and 2 blocks
    row = differing.manager.allocate_cache(like(longer))
    fill(row, 2)
    key = CacheKeyByIdAndIndex(OWN, row.cache_id, 1)
    with pytest.raises(LLMParamError):
        differing.pull([], [3, 1, 0], key=key)
    assert is_untouched(differing.dst)
    differing.pull([], [3, 1], key=key)
    for source, after in zip(content(row), content(differing.dst), strict=True):
        np.testing.assert_array_equal(after[[3, 1]].reshape(-1), source[1][:2 * after.shape[1]])
    fill(row)
    with pytest.raises(LLMParamError):
        differing.pull([4, 2, 0], [], row)
    assert is_untouched(row)
    differing.pull([4, 2], [], row, batch_index=1)
    for source, after in zip(content(differing.src), content(row), strict=True):
        np.testing.assert_array_equal(after[1][:2 * source.shape[1]], source[[4, 2]].reshape(-1))
        assert (after[0] == 0x5A).all()
        assert (after[1][2 * source.shape[1]:] == 0x5A).all()


def test_b19_copies_within_a_cache_whose_tensors_differ(differing: Differing) -> None:
    before = content(differing.src)
    differing.manager.copy_blocks(differing.src, {0: [1], 1: [2, 3], 5: [0]})
    for old, after in zip(before, content(differing.src), strict=True):
        np.testing.assert_array_equal(after, old[[5, 0, 0, 0, 4, 5]])


def test_b19_swap_between_caches_whose_tensors_differ(differing: Differing) -> None:
    arrays = [np.full((7, tensor.shape[1]), 0x5A, np.uint8) for tensor in content(differing.src)]
    addresses = [int(array.ctypes.data) for array in arrays]
    host = KvCache.create_cpu_cache(like([[7, *shape[1:]] for shape in SHAPES], Placement.HOST), addresses)
    differing.manager.swap_blocks(differing.src, host, {0: 6, 5: 1})
    for source, array in zip(content(differing.src), arrays, strict=True):
        np.testing.assert_array_equal(array[[6, 1]], source[[0, 5]])
        assert (np.delete(array, [6, 1], axis=0) == 0x5A).all()
    wrong = KvCache.create_cpu_cache(like([[7, 4, 4], [7, 8], [7, 4]], Placement.HOST), addresses)
    with pytest.raises(LLMParamError, match="tensor 2"):
        differing.manager.swap_blocks(wrong, differing.dst, {0: 0})
    assert is_untouched(differing.dst)


def test_b18_own_blocks_are_pulled_when_they_are_published(here: Here) -> None:
    dist = here("PROMPT", OWN, enable_switch_role=True)
    manager, desc = dist.kv_cache_manager, CacheDesc(2, [4, 8], DataType.DT_INT8)
    src, dst = manager.allocate_blocks_cache(desc, KEY, publish=False), manager.allocate_blocks_cache(desc)
    fill(src, 3)
    fill(dst)
    dist.switch_role(LLMRole.DECODER)
    manager.publish(src, rows=[1])
    for blocks in ([0], [1, 0], [0, 1]):
        with pytest.raises(LLMException) as refusal:
            manager.pull_blocks(KEY, dst, blocks, blocks)
        assert refusal.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    with pytest.raises(LLMException):
        manager.pull_blocks(KEY, dst, [0, 1], [3, 3])
    assert is_untouched(dst)
    manager.pull_blocks(KEY, dst, [1, 1], [0, 3])
    dist.switch_role(LLMRole.PROMPT, PROMPT)
    manager.unbind(src, [1])
    dist.switch_role(LLMRole.DECODER)
    with pytest.raises(LLMException):
        manager.pull_blocks(KEY, dst, [1], [2])
    manager.publish(src, rows=[1], layers=1, tensor_num_per_layer=1)
    one = {"src_layer_range": range(1), "dst_layer_range": range(1, 2), "tensor_num_per_layer": 1}
    manager.pull_blocks(KEY, dst, [1], [2], **one)
    after = content(dst)
    for place, source in enumerate(content(src)):
        np.testing.assert_array_equal(after[place][[0, 3]], source[[1, 1]])
    np.testing.assert_array_equal(after[1][2], content(src)[0][1])
    assert (after[0][2] == 0x5A).all()
