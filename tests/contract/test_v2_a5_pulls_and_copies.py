"""Contract, appendix A5 and B21: pulls and copies in cache-manager mode."""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from agent import cluster_info
from peer import Peer, StartPeer, blocks, by_id, prefix, req

from shmkv import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMParamError,
    LLMStatusCode,
    Placement,
)

pytestmark = pytest.mark.timeout(120)
Managed = Callable[..., Any]
GONE, INVALID, OK = "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID", "LLM_SUCCESS"
TENSORS = CacheDesc(10, [4, 16], DataType.DT_FLOAT16)
ONE = CacheDesc(1, [2, 8], DataType.DT_INT8)


@pytest.fixture
def pair(member: StartPeer) -> tuple[Peer, Peer]:
    """Cluster 1 with keys, and cluster 2 that is linked to it."""
    source = member(1)
    return source, member(2, link=(1,))


def fill(peer: Peer, name: str, seed: int) -> np.ndarray[Any, Any]:
    peer.call("noise", name=name, seed=seed)
    return peer.read(name)


def test_a5_2_copy_cache_with_defaults(managed: Managed, rng: np.random.Generator) -> None:
    manager = managed().cache_manager
    src, dst = manager.allocate_cache(TENSORS), manager.allocate_cache(TENSORS)
    content = [rng.integers(0, 256, (1, 4, 32)).astype(np.uint8) for _ in range(10)]
    cache_bytes.write(src, content)
    manager.copy_cache(dst, src)
    manager.copy_cache(dst, src, 2, 3, 4, 8, req_id=2**64 - 1)
    expected = np.zeros((10, 1, 4, 32), np.uint8)
    expected[:, :, 0], expected[:, :, 2, 4:12] = np.stack(content)[:, :, 0], np.stack(content)[:, :, 3, 4:12]
    np.testing.assert_array_equal(cache_bytes.read(dst), expected)
    for size in (-2, 0):
        with pytest.raises(LLMException):
            manager.copy_cache(dst, src, size=size)
    with pytest.raises(LLMParamError):
        manager.copy_cache(manager.allocate_blocks_cache(TENSORS), src)
    with pytest.raises(LLMParamError):
        manager.copy_cache(dst, src, req_id=-1)


def test_a5_3_a_refused_pull_keeps_the_key(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("v2_allocate", name="kv", num_tensors=1, keys=[req(1, 1)])
    target.call("v2_allocate", name="kv", num_tensors=1)
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    assert target.outcome("v2_pull", key=req(1, 1), name="kv", size=4, **layers) == INVALID
    assert target.outcome("v2_pull", key=req(1, 1), name="kv", size=4) == OK
    assert target.outcome("v2_pull", key=req(1, 1), name="kv") == GONE


TENSORS_A_LAYER = [(2, OK), (-1, INVALID), (0, INVALID), (1.0, "TypeError"), ("x", "TypeError")]


@pytest.mark.parametrize(("number", "outcome"), TENSORS_A_LAYER)
def test_a5_4_tensors_a_layer_of_a_pull(pair: tuple[Peer, Peer], number: Any, outcome: str) -> None:
    source, target = pair
    source.call("v2_allocate", name="kv", num_tensors=10, keys=[prefix(1, 1)])
    source.call("v2_allocate_blocks", name="b", num_tensors=10, key=blocks(1))
    target.call("v2_allocate", name="kv", num_tensors=10)
    target.call("v2_allocate_blocks", name="b", num_tensors=10)
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": number}
    assert target.outcome("v2_pull", key=prefix(1, 1), name="kv", **layers) == outcome
    assert target.outcome("v2_pull_blocks", key=blocks(1), name="b", src=[1], dst=[2], **layers) == outcome


def test_a5_5_blocks_are_pulled(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("v2_allocate_blocks", name="b", key=blocks(1))
    content = fill(source, "b", 3)
    target.call("v2_allocate_blocks", name="b")
    for src, dst in (([0], [0]), ([7, 1], [3, 4])):
        target.call("v2_pull_blocks", key=blocks(1), name="b", src=src, dst=dst)
        np.testing.assert_array_equal(target.read("b")[:, :, dst], content[:, :, src])
    assert target.outcome("v2_pull_blocks", key=blocks(1), name="b", src=[8], dst=[0]) == INVALID
    assert target.outcome("v2_pull_blocks", key=blocks(1, 9), name="b", src=[0], dst=[0]) == GONE


def test_a5_5_and_b21_a_row_is_pulled_into_blocks(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("v2_allocate", name="kv", shape=[2, 50], dtype="DT_INT8", keys=[req(1, 1), req(1, 2)])
    content = fill(source, "kv", 5)
    target.call("v2_allocate_blocks", name="b")
    target.call("canary", name="b")
    assert target.outcome("v2_pull_blocks", key=req(1, 1), name="b", src=[0], dst=[1]) == INVALID
    assert target.outcome("v2_pull_blocks", key=req(1, 1), name="b", src=[], dst=[0, 1, 2, 3]) == INVALID     # 64 of 50 bytes
    target.call("v2_pull_blocks", key=req(1, 1), name="b", src=[], dst=[5, 0, 3])
    read = target.read("b")
    for chunk, block in enumerate([5, 0, 3]):
        np.testing.assert_array_equal(read[:, 0, block], content[:, 0, 0, 16 * chunk:16 * chunk + 16])
    assert (read[:, :, [1, 2, 4, 6, 7]] == 0x5A).all()
    assert target.outcome("v2_pull_blocks", key=req(1, 1), name="b", src=[], dst=[0]) == GONE        # consumed
    target.call("v2_pull_blocks", key=by_id(1, 1, 1), name="b", src=[], dst=[0])
    np.testing.assert_array_equal(target.read("b")[:, 0, 0], content[:, 0, 1, :16])


def test_b21_offsets_mean_what_they_mean_elsewhere(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("v2_allocate", name="kv", keys=[req(1, 1)])
    content = fill(source, "kv", 7)
    target.call("v2_allocate", name="kv")
    target.call("canary", name="kv")
    for _ in range(2):                          # an offset keeps the key
        target.call("v2_pull", key=req(1, 1), name="kv", batch_index=1, size=6, src_cache_offset=2, dst_cache_offset=10)
    read = target.read("kv")
    np.testing.assert_array_equal(read[:, :, 1, 10:], content[:, :, 0, 2:8])
    assert (read[:, :, 1, :10] == 0x5A).all()
    assert target.outcome("v2_pull", key=req(1, 1), name="kv", src_cache_offset=4) == INVALID


def test_a5_6_remote_accessible_pulls_are_by_id_and_consume_nothing(member: StartPeer) -> None:
    source, target = member(1, remote=True), member(2, link=(1,), remote=True)
    cache_id = source.call("v2_allocate", name="kv", keys=[req(1, 1)])
    content = fill(source, "kv", 9)
    target.call("v2_allocate", name="kv")
    for _ in range(2):
        target.call("v2_pull", key=by_id(1, cache_id), name="kv", size=-1)
    np.testing.assert_array_equal(target.read("kv")[:, :, 0], content[:, :, 0])
    assert target.outcome("v2_pull", key=req(1, 1), name="kv") == "TypeError"


def test_either_side_may_be_of_any_role_and_placement(member: StartPeer) -> None:
    source, target = member(1, role="DECODER"), member(2, link=(1,), role="PROMPT")
    source.call("v2_allocate", name="kv", placement="HOST", keys=[req(1, 1)])
    content = fill(source, "kv", 11)
    target.call("v2_allocate", name="kv", placement="HOST")
    target.call("v2_pull", key=req(1, 1), name="kv")
    np.testing.assert_array_equal(target.read("kv")[:, :, 0], content[:, :, 0])


def test_a_pull_of_kinds_that_do_not_fit(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("v2_allocate", name="kv", keys=[req(1, 1)])
    source.call("v2_allocate_blocks", name="b", key=blocks(1))
    target.call("v2_allocate", name="kv")
    target.call("v2_allocate_blocks", name="b")
    assert target.outcome("v2_pull", key=req(1, 1), name="b") == INVALID
    assert target.outcome("v2_pull_blocks", key=blocks(1), name="kv", src=[0], dst=[0]) == INVALID
    assert target.outcome("v2_pull", key=blocks(1), name="kv") == "TypeError"
    assert target.outcome("v2_pull", key=req(3, 1), name="kv") == "LLM_NOT_YET_LINK"
    assert target.outcome("v2_pull", key=req(1, 1), name="kv", src_offset=1) == "TypeError"


def test_a_lost_peer_is_a_timeout(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("v2_allocate", name="kv", keys=[req(1, 1)])
    target.call("v2_allocate", name="kv")
    source.kill()
    answer = target.attempt("v2_pull", key=req(1, 1), name="kv")
    assert answer.outcome == "LLM_TIMEOUT"
    assert answer.ms < 10000


def test_x62_a_cluster_pulls_from_itself(managed: Managed) -> None:
    dist = managed(1)
    manager = dist.cache_manager
    source = manager.allocate_blocks_cache(ONE, BlocksCacheKey(1))
    target = manager.allocate_blocks_cache(ONE)
    cache_bytes.write(source, [np.arange(16, dtype=np.uint8).reshape(1, 2, 8)])
    manager.pull_blocks(BlocksCacheKey(1), target, (1,), (0,))
    np.testing.assert_array_equal(cache_bytes.read(target)[0, 0, 0], np.arange(8, 16))
    done = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    assert dist.link_clusters([cluster_info(1)], 5000) == done
    manager.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 1), manager.allocate_cache(ONE))


def test_a5_7_copy_blocks(managed: Managed) -> None:
    manager = managed().cache_manager
    cache = manager.allocate_blocks_cache(CacheDesc(2, [4, 8], DataType.DT_INT8))
    before = [np.arange(32, dtype=np.uint8).reshape(1, 4, 8) + 100 * tensor for tensor in range(2)]
    cache_bytes.write(cache, before)
    manager.copy_blocks(cache, {0: [1], 1: [2]})
    for place in (1, 2):
        np.testing.assert_array_equal(cache_bytes.read(cache)[:, :, place], np.stack(before)[:, :, 0])
    for wrong, text in (({0: "1"}, "only support"), ({0: ["1"]}, "inner type only support")):
        with pytest.raises(TypeError, match=text):
            manager.copy_blocks(cache, wrong)
    with pytest.raises(LLMParamError):
        manager.copy_blocks(cache, {0: [4]})
    with pytest.raises(LLMParamError):
        manager.copy_blocks(manager.allocate_cache(ONE), {0: [1]})


def test_a5_8_swap_blocks_out_and_in(managed: Managed, rng: np.random.Generator) -> None:
    manager = managed().cache_manager
    shape = [10, 64 << 10]
    device = manager.allocate_blocks_cache(CacheDesc(10, shape, DataType.DT_FLOAT16))
    other = manager.allocate_blocks_cache(CacheDesc(10, [20, 64 << 10], DataType.DT_FLOAT16))
    host = Cache.create_cpu_cache(CacheDesc(10, [20, 64 << 10], DataType.DT_FLOAT16, Placement.HOST), other.tensor_addrs)
    content = [rng.integers(0, 256, (1, 10, 128 << 10)).astype(np.uint8) for _ in range(10)]
    cache_bytes.write(device, content)
    blocks_of = {3: 4, 0: 0, 1: 1, 2: 2, 5: 6, 6: 7, 7: 8, 9: 9}
    manager.swap_blocks(device, host, blocks_of)
    for tensor, wanted in zip(cache_bytes.read_tensors(other), content, strict=True):
        np.testing.assert_array_equal(tensor[:, list(blocks_of.values())], wanted[:, list(blocks_of)])
    manager.swap_blocks(host, device, {there: here for here, there in blocks_of.items()})
    for tensor, wanted in zip(cache_bytes.read_tensors(device), content, strict=True):
        np.testing.assert_array_equal(tensor, wanted)
    manager.deallocate_blocks_cache(host)
    with pytest.raises(LLMParamError, match="HOST"):
        manager.swap_blocks(device, other, {0: 0})


def test_swap_blocks_with_an_allocated_host_cache(managed: Managed) -> None:
    manager = managed().cache_manager
    device = manager.allocate_blocks_cache(CacheDesc(2, [4, 8], DataType.DT_INT8))
    host = manager.allocate_blocks_cache(CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST))
    cache_bytes.write(device, [np.full((1, 4, 8), 3 + tensor, np.uint8) for tensor in range(2)])
    manager.swap_blocks(device, host, {1: 2})
    assert (cache_bytes.read(host)[:, :, 2] == np.array([3, 4])[:, None, None]).all()
    with pytest.raises(TypeError):
        manager.swap_blocks(None, host, {})


def test_blocks_are_pulled_into_private_memory(pair: tuple[Peer, Peer], managed: Managed) -> None:
    source, _ = pair
    source.call("v2_allocate_blocks", name="b", key=blocks(1))
    content = fill(source, "b", 13)
    dist = managed(3)
    assert dist.link_clusters([cluster_info(1)], 20000)[0] == LLMStatusCode.LLM_SUCCESS
    memory = [ctypes.create_string_buffer(8 * 16) for _ in range(4)]
    desc = CacheDesc(4, [8, 16], DataType.DT_INT8, Placement.HOST)
    cache = Cache.create_cpu_cache(desc, [ctypes.addressof(one) for one in memory])
    dist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [2, 3], [7, 0])
    for tensor, buffer in enumerate(memory):
        read = np.frombuffer(buffer, np.uint8).reshape(8, 16)
        np.testing.assert_array_equal(read[[7, 0]], content[tensor, 0, [2, 3]])


def test_check_cache_key(managed: Managed) -> None:
    manager = managed().cache_manager
    manager.check_cache_key(CacheKey(1, 1))
    with pytest.raises(LLMParamError):
        manager.check_cache_key(CacheKey(1, 1, 0, 1))
