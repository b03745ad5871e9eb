"""Contract, 8.3: memory registered by address that is private to its owner is pulled from and pushed into by other processes, where
the kernel lets them; else a status, with a text that says how to allow it."""
from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, blocks, by_id, req
from test_peer_access import BECOME, CALLS, FILTER

pytestmark = pytest.mark.timeout(120)
GONE, INVALID, OK, TIMEOUT = "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID", "LLM_SUCCESS", "LLM_TIMEOUT"
Bytes = np.ndarray[Any, Any]


class Private:
    """A cache of DT_INT8 in private memory of a peer, with random bytes; `bytes`: (tensors, rows, bytes of a row)."""

    def __init__(self, peer: Peer, rng: np.random.Generator, tensors: int, rows: int, inner: int, **how: Any) -> None:
        self.peer = peer
        self.cache_id = peer.call("v2_register", name="private", num_tensors=tensors, shape=[rows, inner], dtype="DT_INT8", **how)
        self.bytes = rng.integers(0, 256, (tensors, rows, inner)).astype(np.uint8)
        peer.call("execute", code=f"""
import ctypes
for tensor, content in zip(agent.memory["private"], {[tensor.tobytes().hex() for tensor in self.bytes]}):
    ctypes.memmove(tensor, bytes.fromhex(content), {rows * inner})
""")

    def read(self) -> Bytes:
        code = 'result = [bytes(memoryview(tensor)).hex() for tensor in agent.memory["private"]]'
        tensors = [np.frombuffer(bytes.fromhex(tensor), np.uint8) for tensor in self.peer.call("execute", code=code)]
        return np.stack(tensors).reshape(self.bytes.shape)

    def assert_as_before(self) -> None:
        np.testing.assert_array_equal(self.read(), self.bytes)


@pytest.fixture
def owner(member: StartPeer) -> Peer:
    return member(1, remote=True)


@pytest.fixture
def other(owner: Peer, member: StartPeer) -> Peer:
    return member(2, link=(1,), remote=True)


def rows_of(peer: Peer, name: str) -> Bytes:
    """(tensors, rows, bytes of a row)."""
    return peer.read(name)[:, 0]


def filled(peer: Peer, name: str, tensors: int, rows: int, inner: int, *, is_blocks: bool = False) -> Bytes:
    allocate = "v2_allocate_blocks" if is_blocks else "v2_allocate"
    peer.call(allocate, name=name, num_tensors=tensors, shape=[rows, inner], dtype="DT_INT8")
    peer.call("noise", name=name, seed=tensors * rows + inner)
    return rows_of(peer, name)


# -- bytes -------------------------------------------------------------------------------------------------------------

def test_a_row_is_pulled_by_id(owner: Peer, other: Peer, rng: np.random.Generator, rounds: Any) -> None:
    for number in range(rounds(6)):
        tensors, rows, inner = 2 * int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 30_000))
        private = Private(owner, rng, tensors, rows, inner)
        before = filled(other, f"kv{number}", tensors, 3, inner)
        row = int(rng.integers(rows))
        other.call("v2_pull", key=by_id(1, private.cache_id, row), name=f"kv{number}", batch_index=1)
        before[:, 1] = private.bytes[:, row]
        np.testing.assert_array_equal(rows_of(other, f"kv{number}"), before)
        private.assert_as_before()
        owner.call("v2_unregister", cache_id=private.cache_id)


def test_layers_and_windows_are_pulled(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 6, 2, 1000)
    before = filled(other, "kv", 6, 2, 1000)
    other.call("v2_pull", key=by_id(1, private.cache_id, 1), name="kv", batch_index=0, size=300, src_cache_offset=111,
               dst_cache_offset=500, src_layer_range=range(1, 3), dst_layer_range=range(2))
    before[:4, 0, 500:800] = private.bytes[2:, 1, 111:411]
    np.testing.assert_array_equal(rows_of(other, "kv"), before)


LAST = "from shmkv import _pull; result = list(_pull.last_pull())"


def test_a_big_row_is_pulled_and_pushed(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 2, 1, (6 << 20) + 5)
    filled(other, "kv", 2, 1, (6 << 20) + 5)
    other.call("v2_pull", key=by_id(1, private.cache_id), name="kv")
    np.testing.assert_array_equal(rows_of(other, "kv"), private.bytes)
    assert other.call("execute", code=LAST)[3:] == ["process_vm_readv", False]
    other.call("noise", name="kv", seed=77)
    other.call("v2_push", key=by_id(1, private.cache_id), name="kv")
    assert other.call("execute", code=LAST)[3:] == ["process_vm_writev", False]
    np.testing.assert_array_equal(private.read(), rows_of(other, "kv"))


def test_blocks_are_pulled(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 4, 3000, 50, is_blocks=True, blocks_key=blocks(1))
    before = filled(other, "b", 4, 3000, 50, is_blocks=True)
    src, dst = (rng.permutation(3000)[:2500].tolist() for _ in range(2))        # more runs than one call of the kernel takes
    other.call("v2_pull_blocks", key=blocks(1), name="b", src=src, dst=dst)
    before[:, dst] = private.bytes[:, src]
    np.testing.assert_array_equal(rows_of(other, "b"), before)
    private.assert_as_before()


def test_a_row_is_pushed(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 4, 3, 700)
    content = filled(other, "kv", 4, 2, 700)
    other.call("v2_push", key=by_id(1, private.cache_id, 2), name="kv", src_batch_index=1)
    private.bytes[:, 2] = content[:, 1]
    private.assert_as_before()
    other.call("v2_push", key=by_id(1, private.cache_id), name="kv", src_layer_range=range(1, 2), dst_layer_range=range(1))
    private.bytes[:2, 0] = content[2:, 0]
    private.assert_as_before()


def test_blocks_are_pushed(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 4, 3000, 50, is_blocks=True, blocks_key=blocks(1))
    content = filled(other, "b", 4, 3000, 50, is_blocks=True)
    src, dst = (rng.permutation(3000)[:2500].tolist() for _ in range(2))
    other.call("v2_push_blocks", key=blocks(1), name="b", src=src, dst=dst)
    private.bytes[:, dst] = content[:, src]
    private.assert_as_before()


def test_layers_are_transferred_to_a_key(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 6, 2, 900)
    content = filled(other, "kv", 6, 2, 900)
    other.call("v2_transfer", name="kv", configs=[[by_id(1, private.cache_id, 1), range(3), range(3)]])
    assert other.call("results") == [OK]
    private.bytes[:, 1] = content[:, 0]
    private.assert_as_before()


def test_layers_are_transferred_to_addresses(member: StartPeer, rng: np.random.Generator) -> None:
    owner, other = member(1), member(2, link=(1,))
    private = Private(owner, rng, 4, 2, 900)
    content = filled(other, "kv", 4, 1, 900)
    other.call("v2_transfer", name="kv", configs=[[1, owner.call("v2_addresses", name="private")]])
    assert other.call("results") == [OK]
    private.bytes[:, 0] = content[:, 0]
    private.assert_as_before()
    second = [address + 900 for address in owner.call("v2_addresses", name="private")]
    other.call("v2_transfer", name="kv", configs=[[1, second]])
    assert other.call("results") == [OK]
    private.bytes[:, 1] = content[:, 0]
    private.assert_as_before()


def test_keys_of_private_memory_are_pulled_and_never_consumed(member: StartPeer, rng: np.random.Generator) -> None:
    owner, other = member(1), member(2, link=(1,))
    private = Private(owner, rng, 2, 2, 100, keys=[req(1, 5), req(1, 6)])
    filled(other, "kv", 2, 1, 100)
    for number, row in ((5, 0), (6, 1), (5, 0)):
        other.call("v2_pull", key=req(1, number), name="kv")
        np.testing.assert_array_equal(rows_of(other, "kv")[:, 0], private.bytes[:, row])


# -- ends --------------------------------------------------------------------------------------------------------------

def test_what_is_unregistered_is_gone(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 2, 2, 100)
    filled(other, "kv", 2, 2, 100)
    owner.call("v2_unregister", cache_id=private.cache_id)
    for call in ("v2_pull", "v2_push"):
        assert other.outcome(call, key=by_id(1, private.cache_id), name="kv") == GONE
    private.assert_as_before()


@pytest.mark.parametrize("call", ["v2_pull", "v2_push"])
def test_the_owner_is_killed(owner: Peer, other: Peer, rng: np.random.Generator, call: str) -> None:
    private = Private(owner, rng, 2, 2, 100)
    before = filled(other, "kv", 2, 2, 100)
    owner.kill()
    answer = other.attempt(call, key=by_id(1, private.cache_id), name="kv")
    assert answer.outcome == TIMEOUT
    assert answer.ms < 10_000
    np.testing.assert_array_equal(rows_of(other, "kv"), before)


@pytest.mark.parametrize("call", ["v2_pull", "v2_push"])
def test_addresses_without_memory_name_the_tensor(owner: Peer, other: Peer, rng: np.random.Generator, call: str) -> None:
    """Registering touches nothing: tensors at addresses that nobody has."""
    private = Private(owner, rng, 4, 1, 4096)
    base = private.peer.call("v2_addresses", name="private")
    cache_id = owner.call("execute", code=f"""
desc = shmkv.CacheDesc(4, [1, 4096], shmkv.DataType.DT_INT8)
result = agent.dist.cache_manager.register_cache(desc, [{base[0]}, {base[1]}, 4096, {base[3]}]).cache_id
""")
    filled(other, "kv", 4, 1, 4096)
    answer = other.attempt(call, key=by_id(1, cache_id), name="kv")
    assert answer.outcome == INVALID
    assert f"address 0x1000 (tensor 2 of its cache {cache_id})" in answer.text
    other.call(call, key=by_id(1, cache_id), name="kv", src_layer_range=range(1), dst_layer_range=range(1))


def test_own_addresses_without_memory_are_named(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 1, 1, 4096)
    answer = other.attempt("execute", code=f"""
desc = shmkv.CacheDesc(1, [1, 4096], shmkv.DataType.DT_INT8)
own = agent.dist.cache_manager.register_cache(desc, [8192])
agent.dist.cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, {private.cache_id}, 0), own)
""")
    assert answer.outcome == INVALID
    assert "this process has no memory at address 0x2000" in answer.text


def test_what_is_not_remote_accessible_is_not_written(member: StartPeer, rng: np.random.Generator) -> None:
    owner, other = member(1), member(2, link=(1,))
    private = Private(owner, rng, 2, 1, 100, remote_accessible=False)
    filled(other, "kv", 2, 1, 100)
    other.call("v2_transfer", name="kv", configs=[[1, owner.call("v2_addresses", name="private")]])
    assert other.call("results") == [INVALID]
    private.assert_as_before()


# -- where the kernel does not allow it --------------------------------------------------------------------------------

@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_an_owner_that_is_not_dumpable(namespace: Any, rng: np.random.Generator) -> None:
    pool = {"enable_cache_manager": True, "mem_pool_cfg": '{"memory_size": 104857600}', "enable_remote_cache_accessible": True}
    owner, other = namespace.start(), namespace.start()
    for peer, number in ((owner, 1), (other, 2)):
        peer.call("execute", code=BECOME.format(uid=1000, dumpable=int(peer is other)))
        peer.call("init", role="MIX", cluster_id=number, options={"sync_kv_timeout": 20000, **pool}, raw={})
    assert other.call("link", ids=[1]) == [OK, [OK]]
    private = Private(owner, rng, 2, 1, 100)
    before = filled(other, "kv", 2, 1, 100)
    for call in ("v2_pull", "v2_push"):
        answer = other.attempt(call, key=by_id(1, private.cache_id), name="kv")
        assert answer.outcome == INVALID
        assert f"private to process {owner.pid}" in answer.text
        assert "allocate_cache" in answer.text
    other.call("v2_transfer", name="kv", configs=[[by_id(1, private.cache_id), range(1), range(1)]])
    assert other.call("results") == [INVALID]
    private.assert_as_before()
    np.testing.assert_array_equal(rows_of(other, "kv"), before)


@pytest.mark.skipif(os.geteuid() != 0 or CALLS is None, reason="needs root, and numbers of system calls of this processor")
def test_a_filter_of_system_calls(owner: Peer, other: Peer, rng: np.random.Generator) -> None:
    private = Private(owner, rng, 2, 1, 100)
    filled(other, "kv", 2, 1, 100)
    other.call("execute", code=FILTER + f"refuse({CALLS}, {errno.EPERM})")
    for call in ("v2_pull", "v2_push"):
        answer = other.attempt(call, key=by_id(1, private.cache_id), name="kv")
        assert answer.outcome == INVALID
        assert "seccomp" in answer.text
    private.assert_as_before()

