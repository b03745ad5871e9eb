"""Contract, appendix A4: allocation and keys, as far as they concern the mode without cache manager."""
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMDataDist,
    LLMException,
    LLMParamError,
    LLMStatusCode,
    Placement,
    Tensor,
)

pytestmark = pytest.mark.timeout(120)
Here = Callable[..., Any]
SMALL = CacheDesc(2, [2, 8], DataType.DT_FLOAT16)


def test_a4_1_eighty_tensors_with_one_key_for_two_rows(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    cache = manager.allocate_cache(CacheDesc(80, [2, 8], DataType.DT_FLOAT16), [CacheKey(1, 1)])
    assert [len(addresses) for addresses in cache.per_device_tensor_addrs] == [80]
    (tensor,) = manager.get_cache_tensors(cache, 0)
    content = Tensor(tensor).numpy()
    assert (content.dtype, content.shape) == (np.dtype(np.float16), (2, 8))
    manager.deallocate_cache(cache)
    manager.remove_cache_key(CacheKey(1, 1))


@pytest.mark.parametrize(("index", "error"), [(-1, LLMException), (2, LLMParamError), ("0", TypeError)])
def test_a4_1_index_of_get_cache_tensors(here: Here, index: Any, error: type[Exception]) -> None:
    manager = here("PROMPT").kv_cache_manager
    cache = manager.allocate_cache(SMALL)
    with pytest.raises(error):
        manager.get_cache_tensors(cache, index)


def test_a4_1_tensors_of_a_cache_show_its_memory(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    cache = manager.allocate_cache(SMALL)
    (tensor,) = manager.get_cache_tensors(cache, 1)
    cache.tensors[1].numpy()[1, 3] = 2.5
    assert tensor.numpy()[1, 3] == 2.5
    assert not tensor.numpy().flags.writeable
    assert tensor.numpy(copy=True).flags.writeable


def test_a4_1_tensors_are_aligned_and_apart(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    cache = manager.allocate_cache(CacheDesc(5, [3, 7], DataType.DT_INT8))
    addresses = sorted(cache.per_device_tensor_addrs[0])
    assert all(address % 64 == 0 for address in addresses)
    assert all(after - before >= 21 for before, after in pairwise(addresses))


def test_a4_1_fresh_and_zeroed_caches_hold_zeros(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    for zero in (False, True, True):
        cache = manager.allocate_cache(CacheDesc(4, [2, 4096], DataType.DT_INT8), zero=zero)
        assert not any(tensor.numpy().any() for tensor in cache.tensors)
        for tensor in cache.tensors:
            tensor.numpy()[...] = 0x5A
        manager.deallocate_cache(cache)


def test_a4_1_cache_goes_by_a_snapshot_of_its_descriptor(here: Here) -> None:
    manager = here("DECODER").kv_cache_manager
    shape = [2, 8]
    cache = manager.allocate_cache(CacheDesc(1, shape, DataType.DT_INT8))
    shape[0] = 1000
    with pytest.raises(LLMParamError):
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache.cache_id, 0), cache, 2)
    assert cache.tensors[0].shape == (2, 8)


@pytest.mark.parametrize("desc", [
    CacheDesc(0, [2, 8], DataType.DT_INT8), CacheDesc(1, [2, 8], DataType.DT_INT8, Placement.HOST),
    CacheDesc(1, [2, 0], DataType.DT_INT8), CacheDesc(1, [2, -8], DataType.DT_INT8),
    CacheDesc(1, [1] * 32, DataType.DT_INT8), CacheDesc(1, [2**32, 2**32], DataType.DT_INT8),
], ids=["no tensors", "host", "zero dim", "negative dim", "32 dims", "overflow"])
def test_a4_1_descriptor_that_cannot_be_allocated(here: Here, desc: CacheDesc) -> None:
    manager = here("PROMPT").kv_cache_manager
    with pytest.raises(LLMParamError):
        manager.allocate_cache(desc)


def test_a4_1_private_memory_is_refused_with_the_calls_that_take_it(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    desc = CacheDesc(1, [2, 8], DataType.DT_INT8, Placement.HOST)
    for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
        with pytest.raises(LLMParamError, match=r"HOST.*register_cache, register_blocks_cache or create_cpu_cache"):
            allocate(desc)


def test_a4_1_more_memory_than_there_is(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    with pytest.raises(LLMException) as refusal:
        manager.allocate_cache(CacheDesc(4, [2**20, 2**30], DataType.DT_INT8))
    assert refusal.value.status_code == LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert manager.allocate_cache(SMALL).cache_desc.num_tensors == 2


def test_a4_1_wrong_types_at_allocate(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    for desc in (None, "desc", [2, 8]):
        with pytest.raises(TypeError):
            manager.allocate_cache(desc)
    for keys in (None, CacheKey(1, 1), ["key"], [BlocksCacheKey(1)], {CacheKey(1, 1)}):
        with pytest.raises(TypeError):
            manager.allocate_cache(SMALL, keys)
    with pytest.raises(TypeError):
        manager.allocate_cache(SMALL, (), unheard_of=1)


def test_a4_2_decoder_allocates_without_keys(here: Here) -> None:
    manager = here("DECODER").kv_cache_manager
    made = [manager.allocate_cache(SMALL), manager.allocate_cache(SMALL, [])]
    assert [cache.cache_id for cache in made] == [1, 2]


def test_a4_2_decoder_allocates_blocks_without_a_key(here: Here) -> None:
    manager = here("DECODER").kv_cache_manager
    made = manager.allocate_blocks_cache(SMALL)
    assert (made.cache_id, made.is_blocks_cache) == (1, True)
    assert [len(addresses) for addresses in made.per_device_tensor_addrs] == [2]
    with pytest.raises(LLMParamError):
        manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1))
    assert manager.allocate_blocks_cache(SMALL, None).cache_id == 2, "the refused one got no id"


@pytest.mark.parametrize("role", ["PROMPT", "MIX"])
def test_a4_2_other_roles_allocate_blocks_with_a_key(here: Here, role: str) -> None:
    manager = here(role).kv_cache_manager
    assert manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1)).is_blocks_cache
    assert not manager.allocate_cache(SMALL).is_blocks_cache


@pytest.mark.parametrize(("desc", "key", "error"), [
    (None, None, TypeError), ("desc", None, TypeError), (SMALL, "key", TypeError), (SMALL, CacheKey(1, 1), TypeError),
    (SMALL, [BlocksCacheKey(1)], TypeError), (SMALL, 0, TypeError),
    (CacheDesc(0, [2, 8], DataType.DT_INT8), None, LLMParamError),
    (CacheDesc(1, [2, 8], DataType.DT_INT8, Placement.HOST), BlocksCacheKey(1), LLMParamError),
    (CacheDesc(1, [2, 8], DataType.DT_INT8, batch_dim_index=1), BlocksCacheKey(1), LLMParamError),
    (CacheDesc(1, [0, 8], DataType.DT_INT8), BlocksCacheKey(1), LLMParamError),
], ids=str)
def test_a4_2_blocks_that_cannot_be_allocated(here: Here, desc: Any, key: Any, error: type[Exception]) -> None:
    manager = here("PROMPT").kv_cache_manager
    with pytest.raises(error):
        manager.allocate_blocks_cache(desc, key)
    with pytest.raises(TypeError, match="unheard_of"):
        manager.allocate_blocks_cache(SMALL, unheard_of=1)
    assert manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1)).cache_id == 1, "neither key nor id was used up"


@pytest.mark.parametrize("role", ["DECODER", "MIX"])
def test_a4_2_only_a_prompt_binds_and_removes_keys(here: Here, role: str) -> None:
    manager = here(role).kv_cache_manager
    with pytest.raises(LLMParamError):
        manager.allocate_cache(SMALL, [CacheKey(1, 1)])
    with pytest.raises(LLMParamError):
        manager.remove_cache_key("the role is looked at before the type")


@pytest.fixture
def decoder_with_two(here: Here) -> tuple[LLMDataDist, KvCache, KvCache]:
    """A decoder in this process, a living cache, and a deallocated one of the same shape."""
    dist = here("DECODER")
    alive, gone = (dist.kv_cache_manager.allocate_cache(SMALL) for _ in range(2))
    dist.kv_cache_manager.deallocate_cache(gone)
    return dist, alive, gone


@pytest.mark.parametrize("use", [
    lambda manager, alive, gone: manager.pull_cache(CacheKeyByIdAndIndex(1, alive.cache_id, 0), gone),
    lambda manager, alive, gone: manager.pull_cache(CacheKeyByIdAndIndex(1, gone.cache_id, 0), alive),
    lambda manager, alive, gone: manager.copy_cache(gone, alive),
    lambda manager, alive, gone: manager.copy_cache(alive, gone),
    lambda manager, alive, gone: manager.get_cache_tensors(gone),
], ids=["pull into", "pull from", "copy into", "copy from", "tensors"])
def test_a4_3_use_of_a_deallocated_cache(decoder_with_two: tuple[Any, Any, Any], use: Any) -> None:
    dist, alive, gone = decoder_with_two
    with pytest.raises(LLMException) as refusal:
        use(dist.kv_cache_manager, alive, gone)
    assert refusal.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_a4_3_deallocate_twice_is_no_error(decoder_with_two: tuple[Any, Any, Any]) -> None:
    dist, alive, gone = decoder_with_two
    dist.kv_cache_manager.deallocate_cache(gone)
    assert gone.per_device_tensor_addrs == []
    assert len(alive.per_device_tensor_addrs[0]) == 2
    for cache in (None, "cache"):
        with pytest.raises(TypeError):
            dist.kv_cache_manager.deallocate_cache(cache)


def test_a4_3_host_cache_cannot_be_deallocated(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    host = KvCache.create_cpu_cache(CacheDesc(2, [2, 8], DataType.DT_FLOAT16, Placement.HOST), [64, 128])
    assert host.cache_id == -1
    with pytest.raises(LLMParamError):
        manager.deallocate_cache(host)


def test_a4_4_small_memory_size_stops_no_allocation(here: Here) -> None:
    manager = here("PROMPT", raw={"ge.flowGraphMemMaxSize": "10240"}).kv_cache_manager
    desc = CacheDesc(10, [10, 96, 1024], DataType.DT_FLOAT16)
    made = [manager.allocate_cache(desc) for _ in range(2)]
    assert [cache.cache_id for cache in made] == [1, 2]
    assert sum(cache.cache_desc.size * 10 for cache in made) > 39_000_000


def test_a4_4_two_blocks_caches_of_different_models(here: Here) -> None:
    manager = here("PROMPT", raw={"ge.flowGraphMemMaxSize": "10240"}).kv_cache_manager
    desc = CacheDesc(10, [10, 96, 1024], DataType.DT_FLOAT16)
    made = [manager.allocate_blocks_cache(desc, BlocksCacheKey(1, model_id)) for model_id in (0, 1)]
    assert [cache.cache_id for cache in made] == [1, 2]
    assert sum(cache.cache_desc.size * 10 for cache in made) > 39_000_000


def test_a4_4_one_living_blocks_cache_a_model(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    first = manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1, 7))
    for key in (BlocksCacheKey(1, 7), BlocksCacheKey(99, 7)):        # the cluster id of a key is not looked at here
        with pytest.raises(LLMParamError):
            manager.allocate_blocks_cache(SMALL, key)
    assert manager.stats()["caches"] == 1
    manager.deallocate_cache(first)
    assert manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1, 7)).cache_id == 2
    again = manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1, 2**64 - 1))
    del again
    manager.collect()
    manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1, 2**64 - 1))


def test_a4_4_blocks_keys_and_padding_are_apart(here: Here) -> None:
    """A blocks key of model 3 and padding of model 3 share no entry of an index."""
    manager = here("PROMPT").kv_cache_manager
    nothing = 2**64 - 1
    manager.allocate_cache(SMALL, [CacheKey(1, nothing, 3), CacheKey(1, 5, 3)])
    blocks = manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1, 3))
    manager.remove_cache_key(CacheKey(1, nothing, 3))
    manager.allocate_cache(SMALL, [CacheKey(1, nothing, 3)])
    with pytest.raises(LLMParamError):
        manager.allocate_blocks_cache(SMALL, BlocksCacheKey(1, 3))
    assert blocks.is_blocks_cache


@pytest.mark.parametrize("zero", [False, True])
def test_a4_4_fresh_and_zeroed_blocks_hold_zeros(here: Here, zero: bool) -> None:
    manager = here("PROMPT").kv_cache_manager
    for _ in range(2 if zero else 1):
        cache = manager.allocate_blocks_cache(CacheDesc(4, [2, 4096], DataType.DT_INT8), zero=zero)
        assert not any(tensor.numpy().any() for tensor in cache.tensors)
        for tensor in cache.tensors:
            tensor.numpy()[...] = 0x5A
        manager.deallocate_cache(cache)


def test_a4_6_allocate_and_deallocate_blocks_with_and_without_a_key(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    for key in (None, BlocksCacheKey(1), None, BlocksCacheKey(1)):
        cache = manager.allocate_blocks_cache(SMALL, key)
        manager.deallocate_cache(cache)
        manager.deallocate_cache(cache)
        assert cache.per_device_tensor_addrs == []
    assert manager.stats()["caches"] == 0, "a blocks key keeps no memory"


def test_a4_6_remove_keys_after_deallocate(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    keys = [CacheKey(1, 1), CacheKey(1, 2)]
    cache = manager.allocate_cache(SMALL, keys)
    manager.deallocate_cache(cache)
    for key in keys:
        manager.remove_cache_key(key)
    assert manager.allocate_cache(SMALL, keys).cache_id == 2


def test_a4_6_remove_cache_key_wants_a_cache_key(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    for key in (None, "key", BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 1)):
        with pytest.raises(TypeError):
            manager.remove_cache_key(key)


def test_a4_6_check_cache_key_wants_a_usable_key(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    nothing = 2**64 - 1
    manager.check_cache_key(CacheKey(1, 1))
    manager.check_cache_key(CacheKey(1, nothing, 0, 1))
    for key in (CacheKey(1, nothing), CacheKey(1, 1, 0, 1)):
        with pytest.raises(LLMParamError):
            manager.check_cache_key(key)
