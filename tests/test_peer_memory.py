"""The mover for private memory of a peer: bytes as numpy has them, in both directions, and who is not reached."""
from __future__ import annotations

import errno
import hashlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import memory
import numpy as np
import pytest
from handlers import Stop, handler_when
from members import namespace_of, wait_until_dead
from peer import StartPeer

from shmkv import _link, _peer_memory, membership

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
IOV_MAX = 1024
PATIENCE_MS = 20_000

# In the peer: private memory with random bytes, and its address.
MADE = """
import mmap
agent.memory = mmap.mmap(-1, {nbytes}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
agent.bytes = np.frombuffer(agent.memory, np.uint8)
agent.bytes[:] = np.random.default_rng({seed}).integers(0, 256, {nbytes}, np.uint8)
result = agent.bytes.ctypes.data
"""
ONES = """
agent.ones = np.ones({nbytes}, np.uint8)
result = agent.ones.ctypes.data
"""
DIGEST = "import hashlib\nresult = hashlib.sha256(agent.bytes).hexdigest()"


@dataclass
class Owner:
    """A cluster in another process with private memory of its own."""

    peer: Any
    namespace: membership.Namespace
    member: membership.Member
    base: int
    bytes: Any                      # what stands there, as the test believes

    def transfer(self, runs: list[tuple[int, int, int]], *, writes: bool, timeout_ms: int = PATIENCE_MS) -> tuple[int, int, int]:
        """Runs with addresses of this process and offsets in the peer's memory."""
        there = [(here, self.base + offset, nbytes) for here, offset, nbytes in runs]
        return _peer_memory.transfer(self.namespace.table, self.namespace.life_fd, self.member.slot, self.member.incarnation, there,
                                     writes, timeout_ms)

    def assert_as_believed(self) -> None:
        assert self.peer.call("execute", code=DIGEST) == hashlib.sha256(self.bytes).hexdigest()

    def record(self, name: str) -> Any:
        """A field of its member record."""
        return memory.word(self.namespace.table, "MemberRecord", self.member.slot, "MemberRecord", name)


def owner_of(peer: Any, name: str, nbytes: int, seed: int = 1) -> Owner:
    namespace = namespace_of(name)
    member = next(each for each in namespace.members() if each.pid == peer.pid)
    base = peer.call("execute", code=MADE.format(nbytes=nbytes, seed=seed))
    return Owner(peer, namespace, member, base, np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def owner_of_ones(peer: Any, name: str) -> Owner:
    """With 64 MiB of ones."""
    owner = owner_of(peer, name, MIB)
    owner.base = peer.call("execute", code=ONES.format(nbytes=64 * MIB))
    return owner


def endless_runs(own: Any) -> list[tuple[int, int, int]]:
    """The same 64 MiB so often that no machine is through with them before `PATIENCE_MS`: whatever is to happen in the middle of
    the move does, however late its thread runs."""
    return [(own.ctypes.data, 0, 64 * MIB)] * 100_000


@pytest.fixture
def owner(prompt: StartPeer, name: str) -> Owner:
    return owner_of(prompt(1), name, 4 * MIB)


def random_runs(rng: Any, count: int, nbytes: int, longest: int) -> list[tuple[int, int, int]]:
    """Runs (offset here, offset there, bytes) in random order that overlap on neither side; some touch on one side or on both."""
    lengths = rng.integers(1, longest, count)
    lengths = lengths[np.cumsum(lengths) <= nbytes // 2]

    def offsets() -> Any:
        gaps = rng.multinomial(nbytes // 2, np.ones(len(lengths) + 1) / (len(lengths) + 1))[:-1] * rng.integers(0, 2, len(lengths))
        order = rng.permutation(len(lengths))
        starts = np.empty(len(lengths), np.int64)
        starts[order] = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(lengths[order])[:-1]])
        return starts

    return list(zip(offsets().tolist(), offsets().tolist(), lengths.tolist(), strict=True))


@pytest.mark.parametrize("writes", [False, True])
def test_random_runs_move_exactly_their_bytes(owner: Owner, rng: Any, rounds: Any, writes: bool) -> None:
    for count in (1, 2, 17, 300, *rng.integers(1, 2000, rounds(20)).tolist()):
        own = rng.integers(0, 256, len(owner.bytes), np.uint8)
        before, there = own.copy(), owner.bytes
        runs = random_runs(rng, count, len(own), int(rng.choice([3, 100, 5000, 100_000])))
        status = owner.transfer([(own.ctypes.data + here, place, nbytes) for here, place, nbytes in runs], writes=writes)
        assert status == (0, 0, owner.peer.pid)
        for here, place, nbytes in runs:
            if writes:
                there[place:place + nbytes] = before[here:here + nbytes]
            else:
                before[here:here + nbytes] = there[place:place + nbytes]
        np.testing.assert_array_equal(own, before)
        owner.assert_as_believed()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("count", [IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 10 * IOV_MAX + 7])
def test_more_runs_than_one_call_takes(owner: Owner, count: int, writes: bool) -> None:
    own = np.arange(count * 200, dtype=np.uint8)
    before = own.copy()
    assert owner.transfer([(own.ctypes.data + 100 * i, 300 * i, 99) for i in range(count)], writes=writes)[0] == 0
    for i in range(count):
        if writes:
            owner.bytes[300 * i:300 * i + 99] = before[100 * i:100 * i + 99]
        else:
            before[100 * i:100 * i + 99] = owner.bytes[300 * i:300 * i + 99]
    np.testing.assert_array_equal(own, before)
    owner.assert_as_believed()


@pytest.mark.parametrize("writes", [False, True])
def test_big_moves_use_the_crew_and_come_out_right(prompt: StartPeer, name: str, rng: Any, writes: bool) -> None:
    owner = owner_of(prompt(1), name, 40 * MIB)
    own = rng.integers(0, 256, 40 * MIB, np.uint8)
    before = own.copy()
    runs = [(own.ctypes.data + 5, 3, 33 * MIB), (own.ctypes.data + 34 * MIB, 34 * MIB, 5 * MIB + 1)]
    assert owner.transfer(runs, writes=writes)[0] == 0
    for here, there, nbytes in ((5, 3, 33 * MIB), (34 * MIB, 34 * MIB, 5 * MIB + 1)):
        if writes:
            owner.bytes[there:there + nbytes] = before[here:here + nbytes]
        else:
            before[here:here + nbytes] = owner.bytes[there:there + nbytes]
    np.testing.assert_array_equal(own, before)
    owner.assert_as_believed()


@pytest.mark.parametrize("writes", [False, True])
def test_a_deadline_ends_a_big_move(prompt: StartPeer, name: str, writes: bool) -> None:
    owner = owner_of(prompt(1), name, MIB)
    peer_base = owner.peer.call("execute", code=MADE.format(nbytes=256 * MIB, seed=2))
    owner.base = peer_base
    own = np.zeros(256 * MIB, np.uint8)
    began = time.monotonic()
    assert owner.transfer([(own.ctypes.data, 0, len(own))], writes=writes, timeout_ms=2)[0] == _link.TIMEOUT
    assert time.monotonic() - began < 10
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=False)[0] == 0, "the next one works"


def test_a_handler_that_raises_ends_a_big_move(prompt: StartPeer, name: str) -> None:
    owner, own = owner_of_ones(prompt(1), name), np.zeros(64 * MIB, np.uint8)

    def stop() -> None:
        raise Stop

    with handler_when(lambda: bool(own[0]), stop), pytest.raises(Stop):
        owner.transfer(endless_runs(own), writes=False)
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=False)[0] == 0, "the next one works"


def test_a_peer_that_is_killed_in_the_middle_of_a_big_move(prompt: StartPeer, name: str) -> None:
    owner, own = owner_of_ones(prompt(1), name), np.zeros(64 * MIB, np.uint8)

    def kill() -> None:
        memory.wait_until(lambda: bool(own[0]), "the first bytes")
        owner.peer.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    status = owner.transfer(endless_runs(own), writes=False)[0]
    killer.join()
    assert status == _link.PEER_GONE


def test_a_program_that_has_no_children_to_wait_for_is_told_so() -> None:
    """Where SIGCHLD is ignored, a child that asks leaves no answer."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert _peer_memory.ask() == -errno.ECHILD
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_stopped_peer_is_reached(owner: Owner) -> None:
    own = np.zeros(MIB, np.uint8)
    owner.peer.stop()
    assert owner.transfer([(own.ctypes.data, 0, MIB)], writes=False)[0] == 0
    owner.peer.cont()
    np.testing.assert_array_equal(own, owner.bytes[:MIB])


@pytest.mark.parametrize("writes", [False, True])
def test_a_dead_peer_is_gone(owner: Owner, writes: bool) -> None:
    own = np.zeros(64, np.uint8)
    owner.peer.kill()
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=writes)[0] == _link.PEER_GONE
    assert not own.any()


def test_a_finalized_peer_is_gone(owner: Owner) -> None:
    own = np.zeros(64, np.uint8)
    owner.peer.call("finalize")
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=False)[0] == _link.PEER_GONE
    assert not own.any()


@pytest.mark.parametrize("writes", [False, True])
def test_memory_that_is_not_there_is_named(owner: Owner, writes: bool) -> None:
    """A hole in the third page of a run: what comes before it may have been moved, and the address is the hole's."""
    page = owner.peer.call("execute", code="""
import ctypes, mmap
agent.hole = agent.bytes.ctypes.data + 8 * mmap.PAGESIZE
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
assert libc.mmap(agent.hole, mmap.PAGESIZE, 0, 0x32, -1, 0) == agent.hole       # nothing may be done with it
result = mmap.PAGESIZE
""")
    own = np.full(5 * page, 7, np.uint8)
    status, fault, _ = owner.transfer([(own.ctypes.data, 6 * page, 5 * page)], writes=writes)
    assert (status, fault) == (_peer_memory.UNMAPPED, owner.base + 8 * page)
    assert owner.transfer([(own.ctypes.data, 9 * page, page)], writes=writes)[0] == 0
    status, fault, _ = owner.transfer([(own.ctypes.data, 0, 8), (own.ctypes.data + 8, 1 - owner.base, 8)], writes=writes)
    assert (status, fault) == (_peer_memory.UNMAPPED, 1), "an address that nobody has"


def test_memory_that_may_only_be_read_is_not_written(owner: Owner) -> None:
    owner.peer.call("execute", code="""
import ctypes, mmap
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(agent.bytes.ctypes.data), mmap.PAGESIZE, 1) == 0
""")
    own = np.full(64, 7, np.uint8)
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=True)[:2] == (_peer_memory.UNMAPPED, owner.base)
    owner.assert_as_believed()
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=False)[0] == 0
    np.testing.assert_array_equal(own, owner.bytes[:64])


@pytest.mark.parametrize("writes", [False, True])
def test_own_memory_that_is_not_there_is_told_apart(owner: Owner, writes: bool) -> None:
    own = np.zeros(64, np.uint8)
    status, fault, _ = owner.transfer([(own.ctypes.data, 0, 64), (1, 64, 64)], writes=writes)
    assert (status, fault) == (_peer_memory.OWN_UNMAPPED, 1)


@pytest.mark.parametrize(("field", "status"), [("pid", _peer_memory.ELSEWHERE), ("start_time", _peer_memory.REPLACED),
                                               ("incarnation", _link.PEER_GONE)])
def test_a_record_that_does_not_name_the_holder_of_the_life_byte(owner: Owner, field: str, status: int) -> None:
    own = np.full(64, 7, np.uint8)
    word = owner.record(field)
    right = word.value
    word.value = os.getpid() if field == "pid" else right + 1
    try:
        for writes in (False, True):
            assert owner.transfer([(own.ctypes.data, 0, 64)], writes=writes)[0] == status
    finally:
        word.value = right
    assert (own == 7).all()
    owner.assert_as_believed()
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=False)[0] == 0


def test_a_peer_that_went_on_under_another_program_is_gone(owner: Owner) -> None:
    """exec closes the life file: the pid and the start time stay, the memory is another one."""
    own = np.zeros(64, np.uint8)
    owner.peer.send("execute", code="import os\nos.execv('/bin/sleep', ['sleep', '60'])")
    wait_until_dead(owner.namespace, owner.member)
    assert owner.transfer([(own.ctypes.data, 0, 64)], writes=False)[0] == _link.PEER_GONE
    owner.peer.kill()


@pytest.mark.parametrize("runs", [[(0, 8, 8)], [(8, 0, 8)], [(8, 8, 0)], [(2**63, 8, 8)], [(8, 2**63 - 4, 8)], [(8, 8)]])
def test_runs_that_no_memory_can_have(owner: Owner, runs: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"run|values"):
        _peer_memory.transfer(owner.namespace.table, owner.namespace.life_fd, 0, 1, runs, False, 1)


def test_nothing_to_move_still_asks_who_is_there(owner: Owner) -> None:
    assert owner.transfer([], writes=False) == (0, 0, owner.peer.pid)
    owner.peer.kill()
    assert owner.transfer([], writes=False)[0] == _link.PEER_GONE
