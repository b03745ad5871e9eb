"""docs/llm_datadist.md, the rows of cache-manager mode. The numbers are in the names."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from guide_rows import DESC, U64MAX, Own, key, status_of
from peer import StartPeer

from shmkv import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    RegisterMemStatus,
    TransferWithCacheKeyConfig,
)

pytestmark = pytest.mark.timeout(120)
Managed = Callable[..., Any]
INVALID = LLMStatusCode.LLM_PARAM_INVALID


def noisy(cache: Cache, seed: int = 4) -> Cache:
    Own.filled(cache, seed)         # type: ignore[arg-type]
    return cache


@pytest.fixture
def manager(managed: Managed) -> Any:
    return managed().cache_manager


@pytest.fixture
def remote(managed: Managed) -> Any:
    """A manager that pushes to its own cluster."""
    return managed(remote=True).cache_manager


def test_what_the_first_rows_say_holds_here_too(managed: Managed) -> None:
    dist = managed()
    manager, blocks = dist.cache_manager, CacheDesc(2, [4, 16], DataType.DT_INT8)
    source, target = noisy(manager.allocate_cache(DESC, [key(3), key(4)])), manager.allocate_cache(DESC)
    for options in ({"src_layer_range": range(2, 2)}, {"src_layer_range": range(1), "dst_layer_range": range(2)},
                    {"tensor_num_per_layer": 5}, {"dst_cache_offset": 16}, {"src_cache_offset": 12}):
        assert status_of(lambda options=options: manager.pull_cache(key(3), target, **options)) == INVALID      # P1 to P3, P7
    with pytest.raises(TypeError, match="src_offset"):
        manager.pull_cache(key(3), target, src_offset=4)                # E4
    with pytest.raises(AttributeError):
        manager.pull_cache(None, target)                                # E3
    manager.pull_cache(key(3), target)                                  # P4
    for keys in ([key(5), key(6), key(7)], [key(4)], [CacheKey(1, 2, 0, 3)]):
        assert status_of(lambda keys=keys: manager.allocate_cache(DESC, keys)) == INVALID       # K3 to K5
    lists = manager.allocate_blocks_cache(blocks)
    assert status_of(lambda: manager.copy_blocks(lists, {0: [1], 2: [4]})) == INVALID           # P12
    for _ in range(2):
        manager.deallocate_cache(source)                                # K6
    dist.finalize()
    assert status_of(lambda: manager.allocate_cache(DESC)) == LLMStatusCode.LLM_ENGINE_FINALIZED      # E5


def test_m1_padding_is_no_duplicate(manager: Any) -> None:
    padding = CacheKey(1, U64MAX, prefix_id=U64MAX)
    manager.allocate_cache(DESC, [padding, padding])
    assert status_of(lambda: manager.allocate_cache(DESC, [key(3), key(3)])) == INVALID
    manager.allocate_cache(DESC, [key(3), padding])


def test_m2_offsets_are_obeyed(manager: Any) -> None:
    source, target = noisy(manager.allocate_cache(DESC, [key(3)])), manager.allocate_cache(DESC)
    before = cache_bytes.read(target).copy()
    for _ in range(2):              # and keep the key
        manager.pull_cache(key(3), target, 1, size=6, src_cache_offset=2, dst_cache_offset=8)
    before[:, 0, 1, 8:14] = cache_bytes.read(source)[:, 0, 0, 2:8]
    np.testing.assert_array_equal(cache_bytes.read(target), before)


def test_m3_caches_that_were_made_later_are_found(member: StartPeer) -> None:
    owner, reader = member(1), member(2, link=(1,))
    desc = "shmkv.CacheDesc(2, [1, 8], shmkv.DataType.DT_INT8)"
    fill = f"agent.cache = agent.dist.cache_manager.allocate_cache({desc}, [shmkv.CacheKey(1, {{0}})])\n" \
           "for tensor in agent.cache.tensors: tensor.numpy()[...] = {0}"
    pull = f"cache = agent.dist.cache_manager.allocate_cache({desc})\n" \
           "agent.dist.cache_manager.pull_cache(shmkv.CacheKey(1, {0}), cache)\n" \
           "result = [int(tensor.numpy().min()) for tensor in cache.tensors]"
    for number in (5, 6):
        owner.call("execute", code=fill.format(number))
        assert reader.call("execute", code=pull.format(number)) == [number, number]


def test_m4_each_key_counts_its_own_layers(manager: Any) -> None:
    manager.allocate_cache(DESC, [key(3), key(4)])
    target = manager.allocate_cache(DESC)
    half = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    rest = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
    manager.pull_cache(key(3), target, **half)
    manager.pull_cache(key(4), target, **rest)
    manager.pull_cache(key(3), target, **rest)
    assert status_of(lambda: manager.pull_cache(key(3), target)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    manager.pull_cache(key(4), target, **half)
    assert status_of(lambda: manager.pull_cache(key(4), target)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize("call", ["register_cache", "register_blocks_cache"])
@pytest.mark.parametrize("addresses", [[], [64], [64, 0], [64, 64, 64]])
def test_m5_addresses_are_counted(manager: Any, call: str, addresses: list[int]) -> None:
    assert status_of(lambda: getattr(manager, call)(CacheDesc(2, [2, 8], DataType.DT_INT8), addresses)) == INVALID


def test_m6_a_push_has_to_fit(remote: Any) -> None:
    source = noisy(remote.allocate_cache(DESC))
    short = remote.allocate_cache(CacheDesc(4, [2, 4], DataType.DT_FLOAT16))
    assert status_of(lambda: remote.push_cache(CacheKeyByIdAndIndex(1, short.cache_id), source)) == INVALID
    assert not cache_bytes.read(short).any()


def test_m7_fewer_tensors_than_a_layer_has(remote: Any) -> None:
    one = CacheDesc(1, [2, 8], DataType.DT_FLOAT16)
    source, target = noisy(remote.allocate_cache(one)), remote.allocate_cache(one)
    remote.push_cache(CacheKeyByIdAndIndex(1, target.cache_id, 1), source)
    np.testing.assert_array_equal(cache_bytes.read(target)[:, :, 1], cache_bytes.read(source)[:, :, 0])


@pytest.mark.parametrize("cache_id", [0, -1, 99])
def test_m8_no_such_cache(remote: Any, cache_id: int) -> None:
    source = remote.allocate_cache(DESC)
    assert status_of(lambda: remote.push_cache(CacheKeyByIdAndIndex(1, cache_id), source)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class Computed(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def test_m9_layers_are_counted_within_the_ranges(remote: Any) -> None:
    desc = CacheDesc(8, [1, 8], DataType.DT_INT8)
    source, target = noisy(remote.allocate_cache(desc)), remote.allocate_cache(desc)
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, target.cache_id), range(2, 4), range(2))
    assert remote.transfer_cache_async(source, Computed(), [config]).synchronize(20_000) == LLMStatusCode.LLM_SUCCESS
    np.testing.assert_array_equal(cache_bytes.read(target)[:4], cache_bytes.read(source)[4:])
    assert not cache_bytes.read(target)[4:].any()


def test_m10_the_own_cluster_needs_no_link(manager: Any) -> None:
    source, target = noisy(manager.allocate_cache(DESC, [key(3)])), manager.allocate_cache(DESC)
    manager.pull_cache(key(3), target)
    np.testing.assert_array_equal(cache_bytes.read(target)[:, :, 0], cache_bytes.read(source)[:, :, 0])


def test_m11_members_are_linked_when_they_are_there(managed: Managed, member: StartPeer) -> None:
    dist = managed(1)
    number = dist.link("both", {1: 0, 2: 1}, "{}")
    assert dist.query_register_mem_status(number) == RegisterMemStatus.PREPARING
    cache = dist.cache_manager.allocate_cache(DESC)
    assert status_of(lambda: dist.cache_manager.pull_cache(CacheKey(2, 3), cache)) == LLMStatusCode.LLM_NOT_YET_LINK
    member(2).call("execute", code="result = agent.dist.link('both', {1: 0, 2: 1}, '{}')")
    assert dist.query_register_mem_status(number) == RegisterMemStatus.OK
    assert status_of(lambda: dist.cache_manager.pull_cache(CacheKey(2, 3), cache)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_m12_private_memory_goes_by_the_kernel(managed: Managed, member: StartPeer) -> None:
    owner = member(2)
    register = """
agent.memory = np.full((2, 1, 64), 7, np.uint8)
private = [tensor.ctypes.data for tensor in agent.memory]
inside = agent.dist.cache_manager.allocate_cache(shmkv.CacheDesc(2, [1, 64], shmkv.DataType.DT_INT8))
desc = shmkv.CacheDesc(2, [1, 64], shmkv.DataType.DT_INT8)
agent.kept = [agent.dist.cache_manager.register_blocks_cache(desc, private, shmkv.BlocksCacheKey(2, 1)),
              agent.dist.cache_manager.register_blocks_cache(desc, inside.tensor_addrs, shmkv.BlocksCacheKey(2, 2))]
"""
    owner.call("execute", code=register)
    dist = managed(1)
    dist.link("both", {1: 0, 2: 1}, "{}")
    mine = dist.cache_manager.allocate_blocks_cache(CacheDesc(2, [1, 64], DataType.DT_INT8))
    dist.cache_manager.pull_blocks(BlocksCacheKey(2, 1), mine, [0], [0])
    assert (cache_bytes.read(mine) == 7).all()
    dist.cache_manager.pull_blocks(BlocksCacheKey(2, 2), mine, [0], [0])
    assert (cache_bytes.read(mine) == 0).all()
