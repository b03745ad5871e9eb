"""Blocks and heads in copies of many shares, whose borders fall anywhere in a run, by one thread and by several."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cache_bytes
import numpy as np
import pytest
from reference import PullBlocks, canary, expected_pull_blocks, noise

from shmkv import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, HeadSlice, KvCache, LLMRole, Placement, _copy

pytestmark = pytest.mark.timeout(300)
OWN = 1
KEY = BlocksCacheKey(OWN)


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A big copy is shared by so many threads."""
    yield int(request.param)
    _copy.configure()


def start(here: Callable[..., Any], threads: int) -> Any:
    dist = here("PROMPT", OWN, enable_switch_role=True)
    _copy.configure(threads=threads)
    return dist


def full(manager: Any, desc: CacheDesc, seed: int | None = None, key: BlocksCacheKey | None = None, **how: Any) -> KvCache:
    """A cache of noise, or of 0x5A; a blocks cache unless the batch stands elsewhere."""
    made: KvCache = manager.allocate_cache(desc, **how) if desc.batch_dim or how else manager.allocate_blocks_cache(desc, key)
    form = cache_bytes.geometry_of(made)
    cache_bytes.write(made, canary(form) if seed is None else noise(form, seed))
    return made


def test_many_blocks(here: Callable[..., Any], threads: int) -> None:
    """Blocks of an odd number of bytes; neighbours, jumps and repeats."""
    dist = start(here, threads)
    manager, desc = dist.kv_cache_manager, CacheDesc(4, [97, 60_001], DataType.DT_INT8)
    src, dst = full(manager, desc, 1, KEY), full(manager, desc)
    before, empty = cache_bytes.read(src), cache_bytes.read(dst)
    dist.switch_role(LLMRole.DECODER)
    rng = np.random.default_rng(threads)
    lists = [int(number) for number in rng.integers(0, 97, 40)] + list(range(10, 50)), [int(n) for n in rng.permutation(97)[:80]]
    manager.pull_blocks(KEY, dst, *lists)
    assert manager.last_pull().nbytes == 80 * 60_001 * 4 > _copy.CREW_THRESHOLD
    np.testing.assert_array_equal(cache_bytes.read(dst), expected_pull_blocks(before, empty, PullBlocks(*lists))[1])
    overlapping = list(range(90)), list(range(5, 95))
    manager.pull_blocks(KEY, src, *overlapping)
    np.testing.assert_array_equal(cache_bytes.read(src), expected_pull_blocks(before, before, PullBlocks(*overlapping))[1])


def test_a_strided_row_and_many_blocks(here: Callable[..., Any], threads: int) -> None:
    dist = start(here, threads)
    manager = dist.kv_cache_manager
    blocks = CacheDesc(3, [80, 70_003], DataType.DT_INT8)
    rows = CacheDesc(3, [70_003 * 2, 3, 31], DataType.DT_INT8, batch_dim_index=1)
    src, into = full(manager, rows, 2), full(manager, rows)
    dst, out_of = full(manager, blocks), full(manager, blocks, 3, KEY)
    numbers = [int(number) for number in np.random.default_rng(threads).permutation(80)[:62]]
    states = [cache_bytes.read(cache) for cache in (src, dst, out_of, into)]
    dist.switch_role(LLMRole.DECODER)
    manager.pull_blocks(CacheKeyByIdAndIndex(OWN, src.cache_id, 2), dst, [], numbers)
    how = PullBlocks([], numbers, by_row=True, src_row=2)
    np.testing.assert_array_equal(cache_bytes.read(dst), expected_pull_blocks(states[0], states[1], how)[1])
    manager.pull_blocks(KEY, into, numbers, [], batch_index=1)
    how = PullBlocks(numbers, [], into_row=True, batch_index=1)
    np.testing.assert_array_equal(cache_bytes.read(into), expected_pull_blocks(states[2], states[3], how)[1])


def test_blocks_between_private_and_shared_memory(here: Callable[..., Any], threads: int) -> None:
    manager = start(here, threads).kv_cache_manager
    cache = full(manager, CacheDesc(2, [70, 100_003], DataType.DT_INT8), 4)
    private = np.full((2, 64, 100_003), 0x5A, np.uint8)
    host = KvCache.create_cpu_cache(CacheDesc(2, [64, 100_003], DataType.DT_INT8, Placement.HOST),
                                    [int(tensor.ctypes.data) for tensor in private])
    numbers = {int(src): dst for dst, src in enumerate(np.random.default_rng(threads).permutation(70)[:60])}
    manager.swap_blocks(cache, host, numbers)
    content = cache_bytes.read(cache)[:, 0]
    for src, dst in numbers.items():
        np.testing.assert_array_equal(private[:, dst], content[:, src])
    assert (private[:, 60:] == 0x5A).all()
    manager.copy_blocks(cache, {0: list(range(1, 60))})
    assert (cache_bytes.read(cache)[:, 0, :60] == content[:, :1]).all()
    np.testing.assert_array_equal(cache_bytes.read(cache)[:, 0, 60:], content[:, 60:])


@pytest.mark.parametrize("heads_dim", [1, 2], ids=["heads, tokens", "tokens, heads"])
@pytest.mark.parametrize("batch_dims", [(0, 0), (0, 2), (3, 0), (1, 3)], ids=str)
def test_halves_of_heads(here: Callable[..., Any], threads: int, heads_dim: int, batch_dims: tuple[int, int]) -> None:
    """Tokens, heads and dims with odd numbers of bytes; the rows of either side may be in pieces, too."""
    dist = start(here, threads)
    manager = dist.kv_cache_manager

    def desc(count: int, batch_dim: int) -> tuple[CacheDesc, int]:
        row = [523, count, 171] if heads_dim == 2 else [count, 523, 171]
        place = heads_dim - 1 + (batch_dim <= heads_dim - 1)
        return CacheDesc(9, [*row[:batch_dim], 2, *row[batch_dim:]], DataType.DT_FLOAT16, batch_dim_index=batch_dim), place

    (whole, whole_dim), (half, half_dim) = desc(8, batch_dims[0]), desc(6, batch_dims[1])
    src, dst = full(manager, whole, 5, publish=True), full(manager, half, publish=True)
    arrays = [[tensor.numpy().view(np.uint16) for tensor in cache.tensors] for cache in (src, dst)]
    dist.switch_role(LLMRole.DECODER)
    key = CacheKeyByIdAndIndex(OWN, src.cache_id, 1)
    manager.pull_cache(key, dst, 0, heads=HeadSlice(half_dim, 8, range(1, 7)))
    assert manager.last_pull().nbytes == 9 * 523 * 6 * 171 * 2 > _copy.CREW_THRESHOLD
    for source, target in zip(*arrays, strict=True):
        taken = np.take(np.take(source, [1], batch_dims[0]), range(1, 7), whole_dim).squeeze(batch_dims[0])
        np.testing.assert_array_equal(np.take(target, 0, batch_dims[1]), taken)
        assert (np.take(target, 1, batch_dims[1]) == 0x5A5A).all()
    back = HeadSlice(whole_dim, 6, range(6), range(2, 8))
    before = [source.copy() for source in arrays[0]]
    manager.pull_cache(CacheKeyByIdAndIndex(OWN, dst.cache_id, 0), src, 0, heads=back)
    for source, target, old in zip(*arrays, before, strict=True):
        taken = np.take(np.take(source, 0, batch_dims[0]), range(2, 8), heads_dim - 1)
        np.testing.assert_array_equal(taken, np.take(target, 0, batch_dims[1]))
        np.testing.assert_array_equal(np.take(source, 1, batch_dims[0]), np.take(old, 1, batch_dims[0]))
        np.testing.assert_array_equal(np.take(np.take(source, 0, batch_dims[0]), range(2), heads_dim - 1),
                                      np.take(np.take(old, 0, batch_dims[0]), range(2), heads_dim - 1))
