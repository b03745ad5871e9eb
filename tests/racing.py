"""Threads of one process that do to one mapping what processes do to shared memory: for a build with ThreadSanitizer.

`python racing.py SCENARIO ROUNDS NAMESPACE`; a race is reported by the sanitizer, a wrong result by an assertion. What holds the
GIL is ordered by it, so each scenario needs threads inside a call that has let it go, at the same time as others.
"""
from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable

import memory
import numpy as np
from memory import NO_LIFE_FILE, Pair, destination, request, select
from rounds import LONGER

from shmkv import _copy, _crew, _link_record, _lookup, segment
from shmkv._acceptor import AcceptedLink
from shmkv._futex import LockWord
from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache

DEADLINE_S = 300 * max(1, round(LONGER))
TENSORS, ROWS = 40, 4               # two words of coverage a row
KEYS = 8
SPINS = 200
BIG_INNER = 256 << 10                # a row of so many bytes a tensor is more than one thread copies
CREW = 3
MAP_FIXED = 0x10
_libc = ctypes.PyDLL(None)              # keeps the GIL: letting it go would order more than the library does
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
# A pull meets whatever the owner has just done; all of these are answers, not damage.
ANSWERS = {0, *_lookup.MISSES, -2, -1007}


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own; the first exception comes out."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def lock(rounds: int, namespace: str) -> None:
    """Both sides of one lock word; each adds to an ordinary number under it."""
    region = memory.anonymous(4096)
    start = threading.Barrier(2)

    def add(side: int) -> None:
        word = LockWord(region, region.base, side)
        start.wait(DEADLINE_S)
        word.add_under(region.base + 256, rounds)

    together(lambda: add(0), lambda: add(1))
    total = int(memory.content(region)[256:264].view(np.uint64)[0])
    assert total == 2 * rounds, f"{total} of {2 * rounds}: the lock let two in"
    print("added", total)


class Arena:
    """An owner with keyed rows, and two links to it; the caches come and go, their memory stays."""

    def __init__(self, namespace: str, rows: int = ROWS, inner: int = 64) -> None:
        self.pair = Pair(namespace)
        self.rows, self.inner, self.nbytes = rows, inner, TENSORS * rows * inner
        self.source = self.pair.add(np.zeros((TENSORS, 1, rows, inner), np.uint8))
        self.owner = self.pair.owner
        other = self.owner.claim(2, 0xC3, 3)
        self.handles = [self.pair.handle, LinkHandle(self.owner.region, self.owner.members, NO_LIFE_FILE, other, self.pair.handle
                                                     .segment_path(0)[:-1].encode())]
        self.over = threading.Event()
        self.slot, self.generation, self.cache_id = self.source.slot, self.source.generation, self.source.cache_id
        self.shapes = [(4096 + i * rows * inner, rows * inner, 1, rows, inner, 4) for i in range(TENSORS)]
        self.answers: dict[int, int] = {}
        self.shared: list[int] = []     # where both sides have the bytes of the segment
        self.share_mappings()

    def close(self) -> None:
        self.pair.close()

    def pull(self, handle: LinkHandle, into: LocalCache, number: int) -> None:
        """One or all tensors, by key or cache id."""
        first, count = (0, -1) if number % 3 else (number % TENSORS, 1)
        words = memory.by_id(self.cache_id) if number % 2 else request(number % KEYS)
        want = select(src_first=first, src_count=count, dst_first=first, dst_count=count, src_row=number % ROWS)
        self.count(memory.pull(handle, into, words, want, consumes=True, timeout_ms=20000))

    def count(self, status: int) -> None:
        assert status in ANSWERS, status
        self.answers[status] = self.answers.get(status, 0) + 1

    def share_mappings(self) -> None:
        """The sanitizer knows addresses, not pages: let the owner write where the readers have mapped the segment to read it."""
        into, _ = destination(TENSORS, 1, self.rows, self.inner)
        for handle in self.handles:
            assert memory.pull(handle, into, memory.by_id(self.cache_id), select()) == 0
        fd = os.open(f"{segment.SHM_DIR}/{self.source.path}", os.O_RDWR | os.O_CLOEXEC)
        for line in memory.mapped(self.source.path):
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            if line.split()[1] == "r--s":
                got = _libc.mmap(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
                assert got == begin
                self.shared.append(begin + 4096)
        os.close(fd)
        assert len(self.shared) == len(self.handles)

    def write_bytes(self, value: int) -> None:
        """The owner's bytes for the next cache in the same memory."""
        for address in self.shared:
            _libc.memset(address, value, self.nbytes)

    def puller(self, number: int) -> Callable[[], None]:
        """A thread that pulls until it is over; the handle is shared by every other thread."""
        into, _ = destination(TENSORS, 1, ROWS, 64)

        def work() -> None:
            turn = number
            while not self.over.is_set():
                self.pull(self.handles[number % 2], into, turn)
                turn += 1

        return work

    def own(self, rounds: int) -> None:
        """The owner: keys come and go, the index grows, the cache leaves and its memory is used for the next one.

        It goes on until the pullers have had as many pulls with bytes as it had rounds: a busy machine may let it run alone.
        """
        try:
            for number in itertools.count():
                if number >= rounds and self.answers.get(0, 0) > rounds:
                    break
                self.keys(number)
                if number % 5 == 0:
                    self.recycle()
                if number % 40 == 0:
                    self.grow()
        finally:
            self.over.set()

    def keys(self, number: int) -> None:
        directory = self.owner.directory
        for row in range(ROWS):
            directory.bind(self.slot, row, request((number + row) % KEYS), TENSORS if row % 2 else 1)
            directory.publish(self.slot, row, TENSORS)
        directory.noticed_slots()
        directory.settle(self.slot)
        directory.remove(self.slot, number % ROWS)
        directory.unbind(self.slot, (number + 1) % ROWS)
        assert directory.find(request(KEYS + 1)) is None

    def recycle(self) -> None:
        """Retire, wait until nobody is in it, write other bytes and records, and let readers in again."""
        directory = self.owner.directory
        for row in range(self.rows):
            directory.remove(self.slot, row)
        directory.retire(self.slot)
        # Without letting the GIL go: a reader that takes it after its pull would be ordered before us by that alone.
        if all(self.owner.pinned(self.generation) for _ in range(SPINS)):
            memory.wait_until(lambda: not self.owner.pinned(self.generation), "nobody is in the cache")
        directory.release(self.slot)
        self.write_bytes(self.cache_id % 256)
        self.cache_id += 1
        self.slot, self.generation = directory.insert(self.source.region, None, cache_id=self.cache_id, serial=1,
                                                      tensors=self.shapes, num_rows=self.rows, published=TENSORS)

    def grow(self) -> None:
        """A bigger index, and other records in use; then all of that goes again."""
        slot, _, _ = self.owner.insert(1, 300, serial=77)
        for row in range(200):
            self.owner.directory.bind(slot, row, request(1000 + row))
        self.owner.directory.index.give_back_old_parts(NO_LIFE_FILE, self.owner.members)
        self.owner.directory.retire(slot)
        for row in range(300):
            self.owner.directory.unbind(slot, row)
        self.owner.directory.release(slot)

    def links(self) -> None:
        """Others link, look and go while pulls run."""
        while not self.over.is_set():
            record = self.owner.claim(4, 0xE5, 5)
            serial = _link_record.read(self.owner.region, record)["serial"]
            _link_record.dead_initiators(self.owner.region, NO_LIFE_FILE, self.owner.members)
            assert AcceptedLink(self.owner.region, self.owner.members, NO_LIFE_FILE, record, serial).end(1000, False)
            _link_record.abandon(self.owner.region, record)


def pulls(rounds: int, namespace: str) -> None:
    """Four threads on two links, one of them shared, against the owner and a linker."""
    arena = Arena(namespace)
    try:
        together(*(arena.puller(number) for number in range(4)), lambda: arena.own(rounds), arena.links)
    finally:
        arena.close()
    pulled = arena.answers[0]
    assert pulled > rounds, f"{arena.answers} in {rounds} rounds of the owner"
    print("pulled", pulled, "of", sum(arena.answers.values()))


def coverage(rounds: int, namespace: str) -> None:
    """Threads pull the tensors of a key one by one: each key is consumed once, by whoever had the last tensor."""
    arena = Arena(namespace)
    count = memory.word(arena.owner.region, "CacheRecord", arena.slot, "CacheRecord", "consumed")
    targets = [destination(TENSORS, 1, ROWS, 64)[0] for _ in range(4)]

    def part(number: int) -> None:
        for first in range(number, TENSORS, 4):
            want = select(src_first=first, src_count=1, dst_first=first, dst_count=1)
            assert memory.pull(arena.handles[number % 2], targets[number], request(1), want, consumes=True) == 0

    try:
        for number in range(rounds):
            arena.owner.directory.bind(arena.slot, number % ROWS, request(1))
            together(*(lambda number=number: part(number) for number in range(4)))
            assert count.value == number + 1, "consumed once"
            assert arena.owner.directory.settle(arena.slot) == 0
    finally:
        arena.close()
    print("consumed", count.value)


def crew(rounds: int, namespace: str) -> None:
    """Two threads pull more than one thread copies, each over its link: one of them has the crew. Who has pulled writes into its
    destination at once, and the owner writes other bytes as soon as nobody is in the cache."""
    _copy.configure(threshold=2**62, threads=CREW)      # ordinary stores: the sanitizer does not see streaming ones
    arena = Arena(namespace, 1, BIG_INNER)
    pulled = [0, 0]

    def puller(number: int) -> Callable[[], None]:
        into, written = destination(TENSORS, 1, 1, BIG_INNER)

        def work() -> None:
            while not arena.over.is_set():
                status = memory.pull(arena.handles[number], into, memory.by_id(arena.cache_id), select())
                arena.count(status)
                pulled[number] += status == 0
                for tensor in written:
                    _libc.memset(tensor.ctypes.data, number, BIG_INNER)

        return work

    def have_pulled_since(before: list[int]) -> Callable[[], bool]:
        return lambda: all(now > then for now, then in zip(pulled, before, strict=True))

    def own() -> None:
        try:
            while min(pulled) < rounds:
                memory.wait_until(have_pulled_since(list(pulled)), "both have pulled")
                arena.recycle()
        finally:
            arena.over.set()

    try:
        together(puller(0), puller(1), own)
    finally:
        arena.close()
    assert _crew.current()["started"] == CREW - 1
    print("pulled", min(pulled), "each")


if __name__ == "__main__":
    sys.setswitchinterval(0.001)        # pulls and owner in turn, not 5 ms each
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    {"lock": lock, "pulls": pulls, "coverage": coverage, "crew": crew}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
