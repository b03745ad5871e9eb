"""Contract, appendix A4 and B21: caches, keys and pools in cache-manager mode."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from peer import Namespace

from shmkv import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMException,
    LLMParamError,
    LLMStatusCode,
    Placement,
)

pytestmark = pytest.mark.timeout(120)
Managed = Callable[..., Any]
U64MAX = 2**64 - 1
SMALL = CacheDesc(4, [2, 8], DataType.DT_FLOAT16)
HOST = CacheDesc(4, [2, 8], DataType.DT_FLOAT16, Placement.HOST)


def pool(memory_size: int, page_shift: int = 16) -> str:
    return f'{{"memory_size": {memory_size}, "page_shift": {page_shift}}}'


def test_a4_6_two_keys_are_removed_after_deallocate(managed: Managed, namespace: Namespace) -> None:
    manager = managed(role="PROMPT").cache_manager
    cache = manager.allocate_cache(SMALL, [CacheKey(1, 1), CacheKey(1, 2)])
    manager.deallocate_cache(cache)
    assert cache.tensor_addrs == []
    assert len(namespace.segments()) == 1       # the keys keep it
    manager.remove_cache_key(CacheKey(1, 1))
    manager.remove_cache_key(CacheKey(1, 2))
    manager.remove_cache_key(CacheKey(1, 2))


@pytest.mark.parametrize("key", [None, BlocksCacheKey(1, 3)])
def test_a4_6_blocks_are_allocated_and_deallocated(managed: Managed, key: BlocksCacheKey | None) -> None:
    manager = managed().cache_manager
    for _ in range(2):                          # the key is free again
        cache = manager.allocate_blocks_cache(SMALL, key)
        assert cache.is_blocks_cache
        assert len(cache.tensor_addrs) == 4
        manager.deallocate_blocks_cache(cache)
        manager.deallocate_blocks_cache(cache)


def test_a4_7_a_pool_holds_what_fits(managed: Managed) -> None:
    manager = managed(mem_pool_cfg=pool(102428800)).cache_manager
    big = CacheDesc(10, [4, 64 << 10], DataType.DT_FLOAT16)
    caches = [manager.allocate_cache(big) for _ in range(8)]
    assert sum(cache.cache_desc.size * 10 for cache in caches) == 40 << 20


@pytest.mark.parametrize(("device", "host", "kept"), [
    (pool(1 << 20, 10), None, 1), (pool(2 << 20), None, 2), (pool(900 << 10, 10), None, 1), (None, pool(1 << 20, 10), 1),
    (None, pool(2 << 20), 2), (pool(1 << 20, 10), pool(1 << 20), 2), (pool(1 << 20, 10), pool(1 << 10), 1),
])
def test_freed_memory_that_is_kept_has_the_limit_of_the_pools(here: Managed, namespace: Namespace, device: str | None,
                                                             host: str | None, kept: int) -> None:
    """The second cache is too small for the memory of the first, and has some of its own."""
    pools = {name: text for name, text in (("mem_pool_cfg", device), ("host_mem_pool_cfg", host)) if text}
    manager = here("MIX", enable_cache_manager=True, **pools).cache_manager
    placement = Placement.DEVICE if device else Placement.HOST
    for nbytes in (900 << 10, 300 << 10):
        manager.deallocate_cache(manager.allocate_cache(CacheDesc(1, [1, nbytes], DataType.DT_INT8, placement)))
    assert len(namespace.segments()) == kept


def test_a4_3_deallocated_cache_is_no_destination(managed: Managed) -> None:
    manager = managed().cache_manager
    manager.allocate_cache(SMALL, [CacheKey(1, 1)])
    cache = manager.allocate_cache(SMALL)
    manager.deallocate_cache(cache)
    with pytest.raises(LLMException) as refusal:
        manager.pull_cache(CacheKey(1, 1), cache)
    assert refusal.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_b21_a_full_pool_is_out_of_memory(managed: Managed) -> None:
    manager = managed(mem_pool_cfg=pool(1 << 20, 17), host_mem_pool_cfg=pool(1 << 18, 16)).cache_manager
    first = manager.allocate_cache(SMALL)                       # 4 pages of 128 KiB for 32 bytes each
    with pytest.raises(LLMException, match="MemPoolConfig") as refusal:
        manager.allocate_cache(CacheDesc(5, [2, 8], DataType.DT_FLOAT16), [CacheKey(1, 5)])
    assert refusal.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    manager.allocate_cache(SMALL, [CacheKey(1, 5)])             # the failed call bound nothing
    with pytest.raises(LLMException) as refusal:
        manager.allocate_cache(CacheDesc(1, [1], DataType.DT_INT8))
    assert refusal.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    manager.deallocate_cache(first)
    manager.allocate_cache(SMALL)
    manager.allocate_cache(HOST)                                # a pool of its own
    with pytest.raises(LLMException, match="HostMemPoolConfig"):
        manager.allocate_cache(HOST)


def test_b21_memory_counts_until_its_last_key_is_gone(managed: Managed) -> None:
    manager = managed(mem_pool_cfg=pool(4 << 16)).cache_manager
    cache = manager.allocate_cache(SMALL, [CacheKey(1, 1)])
    manager.deallocate_cache(cache)
    with pytest.raises(LLMException):
        manager.allocate_cache(SMALL)
    manager.remove_cache_key(CacheKey(1, 1))
    manager.allocate_cache(SMALL)


@pytest.mark.parametrize(("desc", "option"), [(SMALL, "MemPoolConfig"), (HOST, "HostMemPoolConfig")])
def test_b21_a_placement_without_a_pool_is_refused(here: Managed, desc: CacheDesc, option: str) -> None:
    manager = here("MIX", 1, enable_cache_manager=True).cache_manager
    for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
        with pytest.raises(LLMParamError, match=option):
            allocate(desc)


def test_keys_are_unique_in_a_list_and_in_the_cluster(managed: Managed) -> None:
    manager = managed().cache_manager
    padding = CacheKey(1, U64MAX)
    with pytest.raises(LLMParamError, match="one key"):
        manager.allocate_cache(SMALL, [CacheKey(1, 1), CacheKey(2, 1)])
    manager.allocate_cache(SMALL, [padding, padding])           # these name nothing
    manager.allocate_cache(SMALL, [CacheKey(1, 1)])
    with pytest.raises(LLMParamError, match="bound"):
        manager.allocate_cache(SMALL, [CacheKey(1, 1)])
    with pytest.raises(LLMParamError):
        manager.allocate_cache(SMALL, [CacheKey(1, number) for number in range(7, 10)])
    manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1))
    with pytest.raises(LLMParamError, match="bound"):
        manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1))


def test_deallocate_asks_for_the_right_kind(managed: Managed) -> None:
    manager = managed().cache_manager
    rows, blocks = manager.allocate_cache(SMALL), manager.allocate_blocks_cache(SMALL)
    with pytest.raises(LLMParamError):
        manager.deallocate_cache(blocks)
    with pytest.raises(LLMParamError):
        manager.deallocate_blocks_cache(rows)
    assert len(rows.tensor_addrs) == len(blocks.tensor_addrs) == 4
    manager.deallocate_blocks_cache(Cache.create_cpu_cache(HOST, [1, 2, 3, 4]))
    for wrong in (None, 1, KvCache.create_cpu_cache(HOST, [1, 2, 3, 4])):
        with pytest.raises(TypeError):
            manager.deallocate_cache(wrong)


def test_a_cache_shows_what_it_is(managed: Managed, rng: np.random.Generator) -> None:
    manager = managed().cache_manager
    cache = manager.allocate_cache(SMALL, [CacheKey(1, 1)])
    assert (cache.cache_id, cache.is_blocks_cache, cache.cache_desc.shape) == (1, False, [2, 8])
    assert str(cache) == repr(cache) == "Cache(cache_id = 1, device_tensor_addrs = 4, is_blocks_cache = False)"
    content = [rng.integers(0, 256, (1, 2, 16)).astype(np.uint8) for _ in range(4)]
    cache_bytes.write(cache, content)
    np.testing.assert_array_equal(cache.tensors[2].numpy().view(np.uint8), content[2][0])
    del cache
    manager.pull_cache(CacheKey(1, 1), manager.allocate_cache(SMALL))       # no destructor
    assert manager.allocate_blocks_cache(HOST).cache_id == 3


@pytest.mark.parametrize(("desc", "addrs", "error"), [
    (SMALL, [1, 2, 3, 4], LLMParamError), (HOST, [1, 2], LLMParamError), (HOST, [], LLMParamError), (HOST, (1, 2, 3, 4), TypeError),
    (HOST, ["1"], TypeError), (HOST, None, TypeError), (None, [1], TypeError),
])
def test_a_cpu_cache_is_checked(desc: Any, addrs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Cache.create_cpu_cache(desc, addrs)


def test_a_cpu_cache_counts_as_blocks() -> None:
    cache = Cache.create_cpu_cache(HOST, [1, 2, 3, 4])
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs, cache.tensors) == (-1, True, [1, 2, 3, 4], ())
