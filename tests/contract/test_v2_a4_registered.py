"""Contract, appendix A4 and 8.3: memory of the caller that is registered by its addresses, in cache-manager mode."""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from peer import Peer, StartPeer, blocks, by_id, req

from shmkv import (
    BlocksCacheKey,
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
U64MAX = 2**64 - 1
GONE, INVALID, OK = "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID", "LLM_SUCCESS"
DESC = CacheDesc(1, [2, 8], DataType.DT_INT8)
HOST = CacheDesc(1, [2, 8], DataType.DT_INT8, Placement.HOST)
FOUR = CacheDesc(4, [2, 16], DataType.DT_INT8)


class Memory:
    """Private memory of this process for tensors of a description."""

    def __init__(self, desc: CacheDesc) -> None:
        self.buffers = [ctypes.create_string_buffer(b"\x5a" * desc.size, desc.size) for _ in range(desc.num_tensors)]
        self.addresses = [ctypes.addressof(buffer) for buffer in self.buffers]


def fill(peer: Peer, name: str, seed: int) -> np.ndarray[Any, Any]:
    peer.call("noise", name=name, seed=seed)
    return peer.read(name)


def test_a4_5_ids_are_counted_together_and_nothing_is_touched(managed: Managed) -> None:
    manager = managed().cache_manager
    first, second = manager.register_cache(DESC, [1]), manager.register_blocks_cache(DESC, [1])
    assert (first.cache_id, second.cache_id) == (1, 2)
    assert (first.tensor_addrs, first.is_blocks_cache, second.is_blocks_cache, first.tensors) == ([1], False, True, ())
    manager.unregister_cache(1)
    manager.unregister_cache(1)
    manager.unregister_cache(99)
    assert manager.allocate_cache(DESC).cache_id == 3


@pytest.mark.parametrize(("desc", "how"), [(DESC, {}), (HOST, {}), (DESC, {"remote_accessible": True}),
                                           (HOST, {"remote_accessible": True}), (DESC, {"remote_accessible": False})])
def test_a4_5_registered_before_or_after_link(managed: Managed, desc: CacheDesc, how: dict[str, Any]) -> None:
    dist = managed(1)
    assert dist.cache_manager.register_cache(desc, [1], **how).cache_id == 1
    dist.finalize()
    dist = managed(1)
    dist.link("comm", {1: 0, 2: 1}, "{}")
    if how.get("remote_accessible"):
        with pytest.raises(LLMParamError, match="remote_accessible"):
            dist.cache_manager.register_cache(desc, [1], **how)
    else:
        assert dist.cache_manager.register_cache(desc, [1], **how).cache_id == 1


@pytest.mark.parametrize(("desc", "addrs", "more", "error"), [
    (FOUR, [1, 2, 3], {}, LLMParamError), (DESC, [], {}, LLMParamError), (DESC, [0], {}, LLMParamError),
    (DESC, [-1], {}, LLMParamError), (DESC, [2**63], {}, LLMParamError), (DESC, [2**63 - 8], {}, LLMParamError),
    (DESC, ["1"], {}, TypeError), (DESC, 1, {}, TypeError), (DESC, None, {}, TypeError), (None, [1], {}, TypeError),
    (DESC, [1], {"remote_accessible": 1}, TypeError),
])
def test_arguments_of_both_calls(managed: Managed, desc: Any, addrs: Any, more: dict[str, Any], error: type[Exception]) -> None:
    manager = managed().cache_manager
    for register in (manager.register_cache, manager.register_blocks_cache):        # X55: the same checks
        with pytest.raises(error):
            register(desc, addrs, **more)
    with pytest.raises(TypeError):
        manager.register_cache(DESC, [1], ["key"])
    with pytest.raises(TypeError):
        manager.register_blocks_cache(DESC, [1], CacheKey(1, 1))
    with pytest.raises(TypeError):
        manager.unregister_cache("1")


def test_private_memory_is_used_by_its_owner(managed: Managed, rng: np.random.Generator) -> None:
    manager = managed(remote=True).cache_manager
    memory = Memory(FOUR)
    cache = manager.register_cache(FOUR, memory.addresses)
    other = manager.allocate_cache(FOUR)
    content = [rng.integers(0, 256, (1, 2, 16)).astype(np.uint8) for _ in range(4)]
    cache_bytes.write(other, content)
    manager.pull_cache(CacheKeyByIdAndIndex(1, other.cache_id, 1), cache)
    manager.copy_cache(cache, other, 1, 0)
    read = np.stack([np.frombuffer(buffer, np.uint8).reshape(2, 16) for buffer in memory.buffers])
    np.testing.assert_array_equal(read, np.stack(content)[:, 0, ::-1])
    manager.push_cache(CacheKeyByIdAndIndex(1, other.cache_id, 1), cache)
    np.testing.assert_array_equal(cache_bytes.read(other)[:, 0, 1], np.stack(content)[:, 0, 1])
    manager.unregister_cache(cache.cache_id)
    with pytest.raises(LLMException) as refusal:
        manager.copy_cache(cache, other)
    assert refusal.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_keys_of_registered_memory_are_never_consumed_and_go_with_it(managed: Managed) -> None:
    manager = managed().cache_manager
    memory = Memory(DESC)
    cache = manager.register_cache(DESC, memory.addresses, [CacheKey(1, 1), CacheKey(1, U64MAX, 0, 5)])
    blocks_cache = manager.register_blocks_cache(DESC, memory.addresses, BlocksCacheKey(1))
    target = manager.allocate_cache(DESC)
    for _ in range(3):
        manager.pull_cache(CacheKey(1, 1), target)
        manager.pull_cache(CacheKey(1, U64MAX, 0, 5), target)
    assert (cache_bytes.read(target)[:, :, 0] == 0x5A).all()
    with pytest.raises(LLMParamError, match="bound"):
        manager.allocate_cache(DESC, [CacheKey(1, 1)])
    for number in (cache.cache_id, blocks_cache.cache_id):
        manager.unregister_cache(number)
    with pytest.raises(LLMException) as refusal:
        manager.pull_cache(CacheKey(1, 1), target)
    assert refusal.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    manager.allocate_cache(DESC, [CacheKey(1, 1)])
    manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))


def test_what_was_allocated_is_not_unregistered_and_the_other_way_round(managed: Managed) -> None:
    manager = managed().cache_manager
    allocated, registered = manager.allocate_cache(DESC), manager.register_cache(DESC, [4096])
    with pytest.raises(LLMParamError):
        manager.unregister_cache(allocated.cache_id)
    with pytest.raises(LLMParamError):
        manager.deallocate_cache(registered)


# -- memory inside a cache that was allocated ---------------------------------------------------------------------------

def test_memory_within_a_segment_is_pulled_and_pushed_to(member: StartPeer) -> None:
    owner, other = member(1, remote=True), member(2, link=(1,), remote=True)
    owner.call("v2_allocate", name="arena", shape=[4, 16])
    inner = owner.call("v2_register", name="inner", shape=[2, 8], over="arena", keys=[req(1, 1)])
    owner.call("v2_register", name="chunks", shape=[8, 4], over="arena", is_blocks=True, blocks_key=blocks(1))
    content = fill(owner, "arena", 3).reshape(4, 2, 64)
    other.call("v2_allocate", name="kv")
    other.call("v2_allocate_blocks", name="b", shape=[8, 4], dtype="DT_FLOAT16")
    other.call("v2_pull", key=by_id(1, inner, 1), name="kv")
    other.call("v2_pull_blocks", key=blocks(1), name="b", src=[7, 0], dst=[1, 2])
    np.testing.assert_array_equal(other.read("kv")[:, 0, 0], content[:, 0, 16:32])
    np.testing.assert_array_equal(other.read("b")[:, 0, [1, 2]], content[:, 0, :].reshape(4, 8, 8)[:, [7, 0]])
    pushed = fill(other, "kv", 5)
    other.call("v2_push", key=by_id(1, inner), name="kv", src_batch_index=1)
    np.testing.assert_array_equal(owner.read("arena").reshape(4, 2, 64)[:, 0, :16], pushed[:, 0, 1])
    other.call("v2_push_blocks", key=blocks(1), name="b", src=[1], dst=[0])
    np.testing.assert_array_equal(owner.read("arena").reshape(4, 2, 64)[:, 0, :8], content[:, 0, 56:])


def test_a_cache_stays_while_a_registered_one_lies_in_it(member: StartPeer, namespace: Any) -> None:
    owner, other = member(1), member(2, link=(1,))
    owner.call("v2_allocate", name="arena")
    content = fill(owner, "arena", 7)
    inner = owner.call("v2_register", name="inner", over="arena", keys=[req(1, 1)])
    owner.call("v2_deallocate", name="arena")
    owner.call("v2_allocate", name="another")           # would get the memory, were it free
    owner.call("canary", name="another")
    other.call("v2_allocate", name="kv")
    for _ in range(2):                                  # a key of registered memory is not consumed
        other.call("v2_pull", key=req(1, 1), name="kv")
    np.testing.assert_array_equal(other.read("kv")[:, :, 0], content[:, :, 0])
    owner.call("v2_unregister", cache_id=inner)
    assert other.outcome("v2_pull", key=req(1, 1), name="kv") == GONE
    segments = namespace.segments()
    owner.call("v2_allocate", name="third")
    assert namespace.segments() == segments             # the memory is used again


def test_a_push_needs_a_destination_that_is_remote_accessible(member: StartPeer) -> None:
    owner, other = member(1, remote=True), member(2, link=(1,), remote=True)
    owner.call("v2_allocate", name="arena")
    closed = owner.call("v2_register", name="closed", over="arena", remote_accessible=False)
    host = owner.call("v2_register", name="host", over="arena", placement="HOST")
    opened = owner.call("v2_register", name="open", over="arena", placement="HOST", remote_accessible=True)
    other.call("v2_allocate", name="kv")
    for number in (closed, host):
        answer = other.attempt("v2_push", key=by_id(1, number), name="kv")
        assert answer.outcome == INVALID
        assert "remote-accessible" in answer.text
    other.call("v2_push", key=by_id(1, opened), name="kv")


def test_addresses_of_registered_memory_can_be_pushed_to(member: StartPeer) -> None:
    owner, other = member(1), member(2, link=(1,))
    owner.call("v2_allocate", name="arena", num_tensors=2)
    owner.call("v2_register", name="inner", num_tensors=2, over="arena")
    other.call("v2_allocate", name="kv", num_tensors=2)
    content = fill(other, "kv", 9)
    other.call("v2_transfer", name="kv", configs=[[1, owner.call("v2_addresses", name="inner")]])
    assert other.call("results") == [OK]
    np.testing.assert_array_equal(owner.read("arena")[:, :, 0], content[:, :, 0])


def test_nobody_waits_at_the_end_for_keys_that_are_never_used_up(member: StartPeer) -> None:
    owner = member(1)
    owner.call("v2_register", name="kv", keys=[req(1, 1)])
    owner.call("v2_allocate", name="other", keys=[req(1, 2)])
    owner.call("v2_remove_key", key=req(1, 2))
    answer = owner.attempt("finalize", drain_ms=20000)
    assert answer.value == []
    assert answer.ms < 10000
