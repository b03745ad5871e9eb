"""Contract, appendix A5, A7 and B21: pushes in cache-manager mode."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from peer import Peer, StartPeer, blocks, by_id, prefix

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMException,
    LLMParamError,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

pytestmark = pytest.mark.timeout(120)
Managed = Callable[..., Any]
GONE, INVALID, OK = "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID", "LLM_SUCCESS"
DESC = CacheDesc(4, [2, 8], DataType.DT_INT8)


class Ready(LayerSynchronizer):
    """All layers are computed."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@pytest.fixture(params=["its own link", "the other's link"])
def pair(member: StartPeer, request: pytest.FixtureRequest) -> tuple[Peer, Peer]:
    """Clusters 1 and 2, which pushes to it, over a link that the one or the other made."""
    if request.param == "its own link":
        target = member(1, remote=True)
        return target, member(2, link=(1,), remote=True)
    source = member(2, remote=True)
    return member(1, link=(2,), remote=True), source


@pytest.fixture
def one_pair(member: StartPeer) -> tuple[Peer, Peer]:
    target = member(1, remote=True)
    return target, member(2, link=(1,), remote=True)


def fill(peer: Peer, name: str, seed: int) -> np.ndarray[Any, Any]:
    peer.call("noise", name=name, seed=seed)
    return peer.read(name)


def test_a5_6_a_row_is_pushed(pair: tuple[Peer, Peer]) -> None:
    target, source = pair
    cache_id = target.call("v2_allocate", name="kv", shape=[3, 8])
    target.call("canary", name="kv")
    source.call("v2_allocate", name="kv")
    content = fill(source, "kv", 3)
    source.call("v2_push", key=by_id(1, cache_id, 2), name="kv", src_batch_index=1)
    read = target.read("kv")
    np.testing.assert_array_equal(read[:, :, 2], content[:, :, 1])
    assert (read[:, :, :2] == 0x5A).all()
    layer = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    source.call("v2_push", key=by_id(1, cache_id), name="kv", **layer)
    read = target.read("kv")
    np.testing.assert_array_equal(read[:2, :, 0], content[2:, :, 0])
    assert (read[2:, :, 0] == 0x5A).all()


def test_a5_6_blocks_are_pushed(pair: tuple[Peer, Peer]) -> None:
    target, source = pair
    target.call("v2_allocate_blocks", name="b", key=blocks(1))
    source.call("v2_allocate_blocks", name="b")
    content = fill(source, "b", 5)
    source.call("v2_push_blocks", key=blocks(1), name="b", src=[0, 1], dst=[0, 1])
    source.call("v2_push_blocks", key=blocks(1), name="b", src=[7, 3, 2], dst=[4, 6, 4])    # of equal ones the last
    read = target.read("b")
    np.testing.assert_array_equal(read[:, :, [0, 1, 6, 4]], content[:, :, [0, 1, 3, 2]])
    assert (read[:, :, [2, 3, 5, 7]] == 0).all()


def test_a5_6_one_tensor_and_default_ranges(one_pair: tuple[Peer, Peer]) -> None:
    target, source = one_pair
    cache_id = target.call("v2_allocate", name="kv", num_tensors=1)
    target.call("v2_allocate_blocks", name="b", num_tensors=1, key=blocks(1))
    source.call("v2_allocate", name="kv", num_tensors=1)
    source.call("v2_allocate_blocks", name="b", num_tensors=1)
    rows, chunks = fill(source, "kv", 1), fill(source, "b", 2)
    source.call("v2_push", key=by_id(1, cache_id), name="kv")
    source.call("v2_push_blocks", key=blocks(1), name="b", src=[1], dst=[2])
    np.testing.assert_array_equal(target.read("kv")[0, 0, 0], rows[0, 0, 0])
    np.testing.assert_array_equal(target.read("b")[0, 0, 2], chunks[0, 0, 1])


@pytest.mark.parametrize(("number", "outcome"), [(2, OK), (-1, INVALID), (0, INVALID), (1.0, "TypeError"), ("x", "TypeError"),
                                                 (3, INVALID)])
def test_a5_4_tensors_a_layer_of_a_push(one_pair: tuple[Peer, Peer], number: Any, outcome: str) -> None:
    target, source = one_pair
    cache_id = target.call("v2_allocate", name="kv", num_tensors=10)
    target.call("v2_allocate_blocks", name="b", num_tensors=10, key=blocks(1))
    source.call("v2_allocate", name="kv", num_tensors=10)
    source.call("v2_allocate_blocks", name="b", num_tensors=10)
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": number}
    assert source.outcome("v2_push", key=by_id(1, cache_id), name="kv", **layers) == outcome
    assert source.outcome("v2_push_blocks", key=blocks(1), name="b", src=[1], dst=[2], **layers) == outcome


def test_b21_rows_of_the_destination_that_are_too_short(one_pair: tuple[Peer, Peer]) -> None:
    target, source = one_pair
    short = target.call("v2_allocate", name="short", shape=[2, 7])
    long = target.call("v2_allocate", name="long", shape=[2, 9])
    target.call("v2_allocate_blocks", name="b", shape=[8, 15], key=blocks(1))
    for name in ("short", "long", "b"):
        target.call("canary", name=name)
    source.call("v2_allocate", name="kv")
    source.call("v2_allocate_blocks", name="b")
    content = fill(source, "kv", 7)
    assert source.outcome("v2_push", key=by_id(1, short), name="kv") == INVALID
    assert source.outcome("v2_push_blocks", key=blocks(1), name="b", src=[0], dst=[0]) == INVALID
    assert (target.read("short") == 0x5A).all()
    assert (target.read("b") == 0x5A).all()
    source.call("v2_push", key=by_id(1, long), name="kv")
    read = target.read("long")
    np.testing.assert_array_equal(read[:, 0, 0, :16], content[:, 0, 0])
    assert (read[:, 0, 0, 16:] == 0x5A).all()
    assert (read[:, 0, 1] == 0x5A).all()


@pytest.mark.parametrize(("key", "how", "outcome"), [
    (by_id(1, 99), {}, GONE), (by_id(1, 0), {}, GONE), (by_id(1, -1), {}, GONE), (by_id(1, 1, 2), {}, INVALID),
    (by_id(3, 1), {}, "LLM_NOT_YET_LINK"), (by_id(1, 1), {"size": 8}, INVALID), (by_id(1, 1), {"size": "8"}, "TypeError"),
    (by_id(1, 1), {"src_batch_index": 2}, INVALID), (by_id(1, 1), {"src_batch_index": -1}, INVALID),
    (by_id(1, 1), {"src_layer_range": range(1)}, INVALID), (by_id(1, 1), {"dst_layer_range": range(2, 3)}, INVALID),
    (by_id(1, 1), {"src_layer_range": range(2), "dst_layer_range": range(1)}, INVALID),
    (by_id(1, 1), {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}, INVALID),
    (by_id(1, 1), {"src_layer_range": range(1), "dst_layer_range": range(2, 3)}, INVALID), (prefix(1, 1), {}, "TypeError"),
    (blocks(1), {}, "TypeError"),
])
def test_a_push_that_is_refused_writes_nothing(one_pair: tuple[Peer, Peer], key: list[Any], how: dict[str, Any],
                                               outcome: str) -> None:
    target, source = one_pair
    target.call("v2_allocate", name="kv", keys=[prefix(1, 1)])
    target.call("canary", name="kv")
    source.call("v2_allocate", name="kv")
    fill(source, "kv", 9)
    assert source.outcome("v2_push", key=key, name="kv", **how) == outcome
    assert (target.read("kv") == 0x5A).all()


@pytest.mark.parametrize(("src", "dst", "outcome"), [
    ([0], [8], INVALID), ([8], [0], INVALID), ([0], [2**63], INVALID), ([-1], [0], INVALID), ([], [], INVALID),
    ([0], [0, 1], INVALID), (["0"], [0], "TypeError"), ([0, 8], [1, 1], INVALID),
])
def test_blocks_that_are_not_there(one_pair: tuple[Peer, Peer], src: list[Any], dst: list[Any], outcome: str) -> None:
    target, source = one_pair
    target.call("v2_allocate_blocks", name="b", key=blocks(1))
    target.call("canary", name="b")
    source.call("v2_allocate_blocks", name="b")
    assert source.outcome("v2_push_blocks", key=blocks(1), name="b", src=src, dst=dst) == outcome
    assert source.outcome("v2_push_blocks", key=blocks(1, 7), name="b", src=[0], dst=[0]) == GONE
    assert (target.read("b") == 0x5A).all()


def test_a_push_needs_the_option(managed: Managed) -> None:
    manager = managed().cache_manager
    rows, chunks = manager.allocate_cache(DESC), manager.allocate_blocks_cache(DESC)
    with pytest.raises(LLMParamError, match="enable_remote_cache_accessible"):
        manager.push_cache(CacheKeyByIdAndIndex(1, rows.cache_id), rows)
    with pytest.raises(LLMParamError, match="enable_remote_cache_accessible"):
        manager.push_blocks(BlocksCacheKey(1), chunks, [0], [0])


def test_a_cluster_pushes_to_itself(managed: Managed, rng: np.random.Generator) -> None:
    manager = managed(remote=True).cache_manager
    src, dst = manager.allocate_cache(DESC), manager.allocate_cache(CacheDesc(4, [3, 10], DataType.DT_INT8))
    src_blocks, dst_blocks = manager.allocate_blocks_cache(DESC), manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    content = [rng.integers(0, 256, (1, 2, 8)).astype(np.uint8) for _ in range(4)]
    for cache in (src, src_blocks):
        cache_bytes.write(cache, content)
    manager.push_cache(CacheKeyByIdAndIndex(1, dst.cache_id, 2), src, 1)
    manager.push_blocks(BlocksCacheKey(1), src_blocks, [1], [0])
    np.testing.assert_array_equal(cache_bytes.read(dst)[:, :, 2, :8], np.stack(content)[:, :, 1])
    assert (cache_bytes.read(dst)[:, :, 2, 8:] == 0).all()
    np.testing.assert_array_equal(cache_bytes.read(dst_blocks)[:, :, 0], np.stack(content)[:, :, 1])
    with pytest.raises(LLMParamError):
        manager.push_cache(CacheKeyByIdAndIndex(1, src.cache_id), dst)      # too short
    with pytest.raises(LLMException) as refusal:
        manager.push_cache(CacheKeyByIdAndIndex(1, 99), src)
    assert refusal.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_a_push_to_a_dead_peer_is_a_timeout(one_pair: tuple[Peer, Peer]) -> None:
    target, source = one_pair
    cache_id = target.call("v2_allocate", name="kv")
    source.call("v2_allocate", name="kv")
    source.call("v2_push", key=by_id(1, cache_id), name="kv")
    target.kill()
    answer = source.attempt("v2_push", key=by_id(1, cache_id), name="kv")
    assert answer.outcome == "LLM_TIMEOUT"
    assert answer.ms < 10000


# -- transfers --------------------------------------------------------------------------------------------------------------

def test_a7_7_layers_go_to_caches_that_keys_name(one_pair: tuple[Peer, Peer]) -> None:
    target, source = one_pair
    cache_id = target.call("v2_allocate_blocks", name="by id", num_tensors=6)
    target.call("v2_allocate_blocks", name="by key", num_tensors=6, key=blocks(1))
    source.call("v2_allocate_blocks", name="b", num_tensors=6)
    content = fill(source, "b", 11)
    configs = [[blocks(1), range(3), range(3)], [by_id(1, cache_id, 5), range(1, 3), range(2)]]
    source.call("v2_transfer", name="b", configs=configs)
    assert source.call("results") == [OK, OK]
    np.testing.assert_array_equal(target.read("by key")[:, :, 0], content[:, :, 0])
    np.testing.assert_array_equal(target.read("by id")[:4, :, 5], content[2:, :, 0])
    assert (target.read("by id")[4:] == 0).all()
    source.call("v2_transfer", name="b", configs=configs[:1], src_block_indices=[3, 4], dst_block_indices=[6, 1])
    assert source.call("synchronize") == OK
    np.testing.assert_array_equal(target.read("by key")[:, :, [6, 1]], content[:, :, [3, 4]])


def test_a7_a_row_is_cut_into_blocks_of_a_key_or_of_addresses(member: StartPeer) -> None:
    for remote in (True, False):
        target = member(10 + remote, remote=remote)
        source = member(20 + remote, link=(10 + remote,), remote=remote)
        target.call("v2_allocate_blocks", name="b", num_tensors=2, key=blocks(10 + remote))
        source.call("v2_allocate", name="kv", num_tensors=2, shape=[2, 50], dtype="DT_INT8")
        content = fill(source, "kv", 13)
        key = [blocks(11), range(1), range(1)] if remote else [10, target.call("v2_addresses", name="b"), None, 1]
        row = 0 if remote else 1
        source.call("v2_transfer", name="kv", configs=[key], dst_block_indices=[7, 0, 3], dst_block_memory_size=16)
        assert source.call("results") == [OK]
        read = target.read("b")
        for chunk, block in enumerate([7, 0, 3]):
            np.testing.assert_array_equal(read[:, 0, block], content[:, 0, row, 16 * chunk:16 * chunk + 16])
        source.call("v2_transfer", name="kv", configs=[key], dst_block_indices=[7, 0, 3, 1], dst_block_memory_size=16)
        assert source.call("results") == [INVALID]
        if remote:
            source.call("v2_transfer", name="kv", configs=[key], dst_block_indices=[7], dst_block_memory_size=8)
            assert source.call("results") == [INVALID]
        source.close()
        target.close()


def test_x34_a_running_task_is_a_timeout(one_pair: tuple[Peer, Peer]) -> None:
    target, source = one_pair
    target.call("v2_allocate_blocks", name="b", key=blocks(1))
    source.call("v2_allocate_blocks", name="b")
    source.call("v2_transfer", name="b", configs=[[blocks(1), range(2), range(2)]], slow=[1])
    assert source.call("synchronize", timeout=0) == "LLM_TIMEOUT"
    assert source.call("results", timeout=0) == ["LLM_TIMEOUT"]
    source.call("computed", layer=1)
    assert source.call("synchronize") == OK


def test_a7_6_arguments_of_a_transfer(managed: Managed) -> None:
    for remote in (False, True):
        dist = managed(remote=remote)
        manager = dist.cache_manager
        cache = manager.allocate_cache(DESC)
        host = manager.allocate_cache(CacheDesc(4, [2, 8], DataType.DT_INT8, Placement.HOST))
        by_key = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 1), range(2), range(2))
        by_address = TransferConfig(1, cache.tensor_addrs)
        good, bad = (by_key, by_address) if remote else (by_address, by_key)
        for arguments in (("cache", Ready(), [good]), (None, Ready(), [good]), (cache, None, [good]), (cache, Ready(), [bad])):
            with pytest.raises(TypeError):
                manager.transfer_cache_async(*arguments)
        with pytest.raises(LLMParamError, match="DEVICE"):
            manager.transfer_cache_async(host, Ready(), [good])
        with pytest.raises(LLMParamError):
            manager.transfer_cache_async(cache, Ready(), [good], [], [0])
        assert manager.transfer_cache_async(cache, Ready(), [good]).synchronize() == LLMStatusCode.LLM_SUCCESS
        dist.finalize()


def test_keys_are_untouched_by_a_push(managed: Managed) -> None:
    manager = managed(remote=True).cache_manager
    dst = manager.allocate_cache(DESC, [CacheKey(1, 1)])
    manager.push_cache(CacheKeyByIdAndIndex(1, dst.cache_id), manager.allocate_cache(DESC))
    with pytest.raises(LLMParamError, match="bound"):
        manager.allocate_cache(DESC, [CacheKey(1, 1)])


def test_a_missing_range_stands_for_whole_layers(one_pair: tuple[Peer, Peer]) -> None:
    target, source = one_pair
    cache_id = target.call("v2_allocate", name="kv", num_tensors=3)
    source.call("v2_allocate", name="kv", num_tensors=3)
    for number, outcome in ((2, INVALID), (3, OK), (1, OK), (4, OK)):        # fewer tensors than a layer are one
        assert source.outcome("v2_push", key=by_id(1, cache_id), name="kv", tensor_num_per_layer=number) == outcome
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    assert source.outcome("v2_push", key=by_id(1, cache_id), name="kv", **layers) == OK
