"""Steps of a life that reads and writes memory which is private to the healthy peer, where nothing of it is in /dev/shm."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from lives import PEER_ID, Life

from shmkv import _peer_memory
from shmkv.errors import LLMException
from shmkv.peer_access import access_code, access_sentence

# Where the peer's memory is, in its process: an address that nothing else is given.
ADDRESS, NBYTES, HALF = 0x5A00_0000_0000, 10 << 20, 5 << 20
RUNS = 1500                             # more than one call takes


@dataclass
class PrivateLife(Life):
    """What comes out of the first half of the peer's memory is compared; the second half is written."""

    def pull_private(self) -> None:
        own = np.zeros(HALF, np.uint8)
        self._transfer(own, [(0, 0, HALF)], writes=False)
        if not np.array_equal(own, _bytes()[:HALF]):
            self.faults.append("wrong bytes of private memory")

    def push_private(self) -> None:
        own = _bytes()[HALF:].copy()
        runs = [(place * 100, HALF + place * 100, 99) for place in range(RUNS)]
        self._transfer(own, runs, writes=True)

    def _transfer(self, own: Any, runs: list[tuple[int, int, int]], *, writes: bool) -> None:
        """Offsets here and there: LLMException with the status of the contract unless all of it was moved."""
        cluster = self.dist._cluster
        peer = cluster.namespace.find(PEER_ID)
        if peer is None:
            raise LLMException("the peer is not there")
        found = [(own.ctypes.data + here, ADDRESS + there, nbytes) for here, there, nbytes in runs]
        try:
            status, fault, _ = _peer_memory.transfer(cluster.namespace.table, cluster.namespace.life_fd, peer.slot,
                                                     peer.incarnation, found, writes, 5000)
        except MemoryError as error:
            raise cluster.no_memory("the runs", error) from error
        if status != 0:
            raise LLMException(access_sentence(status, "the peer", peer.pid, f"{fault:#x}"),
                               status_code=access_code(status, cluster.settings))


def _bytes() -> Any:
    return np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)


def peer_memory() -> str:
    """Run by the healthy peer: what is read, and written with what it has."""
    return f"""
import ctypes, mmap
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE = 2, 0x20, 0x100000
assert libc.mmap({ADDRESS}, {NBYTES}, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == {ADDRESS}
private = np.ctypeslib.as_array((ctypes.c_ubyte * {NBYTES}).from_address({ADDRESS}))
private[:] = np.arange({NBYTES}, dtype=np.uint32).astype(np.uint8)
"""
