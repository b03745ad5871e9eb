"""Shared memory for unit tests of the core: anonymous regions, raw looks at records, a directory with both of its ends.

Nothing here needs another process: with the descriptor -1 for the life file every recorded member counts as alive ("cannot
tell" lives), and a member dies by having its record cleared.
"""
from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shmkv import _layout, _link_record, _members, _pull, segment
from shmkv._directory import Directory
from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache
from shmkv._mapping import Region

LIVENESS_S = 20.0
NO_LIFE_FILE = -1
ACCEPTOR, INITIATOR = 0, 1
KEY_NONE, KEY_REQUEST, KEY_PREFIX, KEY_BLOCKS = 0, 1, 2, 3
U64MAX = 2**64 - 1
OFFSETS = {(struct, name): offset for struct, name, offset, _ in _layout.fields()}
WIDTHS = {(struct, name): width for struct, name, _, width in _layout.fields()}
TABLES = {name: (width, offset) for name, width, _, offset in _layout.tables()}


def request(req_id: int, model_id: int = 0) -> tuple[int, int, int, int]:
    """The words of a request key."""
    return KEY_REQUEST, req_id, U64MAX, model_id


def prefix(prefix_id: int, model_id: int = 0) -> tuple[int, int, int, int]:
    """The words of a prefix key."""
    return KEY_PREFIX, U64MAX, prefix_id, model_id


def by_id(cache_id: int) -> tuple[int, int, int, int]:
    """What stands for a cache id where the core wants key words."""
    return KEY_NONE, cache_id, 0, 0


def blocks_key(model_id: int) -> tuple[int, int, int, int]:
    """The words of a blocks key."""
    return KEY_BLOCKS, 0, 0, model_id


def anonymous(nbytes: int, *, writable: bool = True) -> Region:
    """Shared memory without a name."""
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, nbytes)
        return Region.map(fd, nbytes, writable=writable, populate=False)
    finally:
        os.close(fd)


def is_mapped(name: str, *, writable: bool) -> bool:
    """Has this process such a mapping of a file in /dev/shm?"""
    kind = "rw" if writable else "r-"
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"{segment.SHM_DIR}/{name}" in line)
    return any(fields[1].startswith(kind) for fields in lines)


def content(region: Region, offset: int = 0, nbytes: int | None = None) -> Any:
    """The memory itself as a numpy array of bytes, which keeps it mapped."""
    nbytes = region.nbytes - offset if nbytes is None else nbytes
    raw = (ctypes.c_ubyte * nbytes).from_address(region.base + offset)
    raw.region = region
    return np.ctypeslib.as_array(raw)


def word(region: Region, table: str, index: int, struct: str, name: str, extra: int = 0) -> Any:
    """A field of a record as a ctypes object: read and write its `value`."""
    width, start = TABLES.get(table, (0, 0))
    kind = ctypes.c_uint32 if WIDTHS[struct, name] == 4 else ctypes.c_uint64
    return kind.from_address(region.base + start + index * width + OFFSETS[struct, name] + extra)


def header_word(region: Region, name: str) -> Any:
    """A field of the header that every file begins with."""
    return word(region, "", 0, "Header", name)


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Poll; the seconds that it took. Fails below the liveness deadline only if something is stuck."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < LIVENESS_S / 2, f"never came: {what}"
        time.sleep(0.0005)
    return time.monotonic() - began


def mapped(name: str) -> list[str]:
    """The lines of this process's memory map that name a file."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


class Owner:
    """A directory over anonymous memory, and the members table that its links are judged by."""

    def __init__(self, incarnation: int = 0xA1, cluster_id: int = 1) -> None:
        self.fd = os.memfd_create("directory")
        os.ftruncate(self.fd, _layout.DIRECTORY_SIZE)
        self.reserved: list[tuple[int, int]] = []
        self.full_after: int | None = None          # reservations until ENOSPC
        self.incarnation = incarnation
        self.cluster_id = cluster_id
        self.region = Region.map(self.fd, _layout.DIRECTORY_SIZE, populate=False)
        self.directory = Directory(self.region, self._reserve, incarnation=incarnation, cluster_id=cluster_id, role=1)
        self.members = anonymous(_layout.MEMBERS_SIZE)
        _members.create(self.members)
        self.add_member(0, incarnation, cluster_id)
        self._next_id = 1

    def close(self) -> None:
        os.close(self.fd)

    def _reserve(self, offset: int, nbytes: int) -> None:
        if self.full_after is not None:
            if self.full_after == 0:
                raise OSError(28, "no space left (as the test wants)")
            self.full_after -= 1
        if nbytes:
            self.reserved.append((offset, nbytes))
            os.posix_fallocate(self.fd, offset, nbytes)

    def used_nbytes(self) -> int:
        """Bytes of pages behind the directory."""
        return os.fstat(self.fd).st_blocks * 512

    def add_member(self, slot: int, incarnation: int, cluster_id: int) -> None:
        _members.write(self.members, slot, incarnation=incarnation, cluster_id=cluster_id, pid=os.getpid(), role=2,
                       start_time=1, directory=f"d.{incarnation:016x}".encode())

    def insert(self, num_tensors: int = 1, rows: int = 1, *, outer: int = 1, inner: int = 64, serial: int = 1,
               published: int | None = None, memory: Region | None = None,
               blocks_model_id: int | None = None) -> tuple[int, int, int]:
        """A cache of equal tensors, one after the other: (slot, generation, cache id). With a model id it is one of blocks."""
        each = outer * rows * inner
        shapes = [(_layout.SEGMENT_DATA + i * each, each, outer, rows, inner, 4) for i in range(num_tensors)]
        memory = anonymous(_layout.SEGMENT_DATA + each * num_tensors) if memory is None else memory
        cache_id, self._next_id = self._next_id, self._next_id + 1
        slot, generation = self.directory.insert(
            memory, None, cache_id=cache_id, serial=serial, tensors=shapes, num_rows=rows,
            published=num_tensors if published is None else published, kind=int(blocks_model_id is not None),
            blocks_model_id=blocks_model_id)
        return slot, generation, cache_id

    def claim(self, slot: int = 1, incarnation: int = 0xB2, cluster_id: int = 2) -> int:
        """A link from the member in `slot`: the number of its record."""
        self.add_member(slot, incarnation, cluster_id)
        found = _link_record.claim(self.region, NO_LIFE_FILE, self.members,
                                   [(0, self.incarnation, self.cluster_id), (slot, incarnation, cluster_id)])
        assert found is not None
        return int(found)

    def side(self, record: int, side: int, name: str, number: int = 0) -> Any:
        """A field of one side of a link record, as a ctypes object."""
        from_record = OFFSETS["LinkRecord", "sides"] + side * (WIDTHS["LinkRecord", "sides"] // 2)
        at = TABLES["LinkRecord"][1] + record * TABLES["LinkRecord"][0] + from_record + OFFSETS["LinkSide", name]
        width = 8 if name in ("leases", "counters") else WIDTHS["LinkSide", name]
        kind = ctypes.c_uint32 if width == 4 else ctypes.c_uint64
        return kind.from_address(self.region.base + at + number * width)

    def pinned(self, generation: int) -> bool:
        return bool(self.directory.pinned(generation, NO_LIFE_FILE, self.members, []))


class Source:
    """A cache with real bytes in a file of its own."""

    def __init__(self, owner: Owner, prefix_: str, serial: int, bytes_: Any, published: int | None = None,
                 blocks_model_id: int | None = None) -> None:
        tensors, outer, rows, inner = bytes_.shape
        self.path = f"{prefix_}{serial:x}"
        nbytes = _layout.SEGMENT_DATA + bytes_.nbytes
        fd = segment.create(self.path, nbytes, nbytes)
        try:
            self.region = Region.map(fd, nbytes)
        finally:
            os.close(fd)
        content(self.region, _layout.SEGMENT_DATA)[:] = bytes_.reshape(-1)
        self.slot, self.generation, self.cache_id = owner.insert(
            tensors, rows, outer=outer, inner=inner, serial=serial, published=published, memory=self.region,
            blocks_model_id=blocks_model_id)

    def unlink(self) -> None:
        segment.unlink(self.path)


class Pair:
    """An owner with caches in files, and a reader linked to it."""

    def __init__(self, namespace: str, by_pread: bool = False) -> None:
        self.by_pread = by_pread
        self.owner = Owner()
        self.prefix = f"{namespace}.c.{self.owner.incarnation:016x}."
        self.sources: list[Source] = []
        self.record = self.owner.claim()
        self.handle = self.new_handle()

    def new_handle(self) -> LinkHandle:
        return LinkHandle(self.owner.region, self.owner.members, NO_LIFE_FILE, self.record,
                          f"{segment.SHM_DIR}/{self.prefix}".encode(), self.by_pread)

    def add(self, bytes_: Any, published: int | None = None, blocks_model_id: int | None = None) -> Source:
        made = Source(self.owner, self.prefix, len(self.sources) + 1, bytes_, published, blocks_model_id)
        self.sources.append(made)
        return made

    def close(self) -> None:
        for source in self.sources:
            source.unlink()
        self.owner.close()


def pair_with_keys(namespace: str, bytes_: Any) -> Pair:
    """A pair with one cache of these bytes; each row is bound to request(row)."""
    made = Pair(namespace)
    source = made.add(bytes_)
    for row in range(bytes_.shape[2]):
        made.owner.directory.bind(source.slot, row, request(row))
    return made


def destination(num_tensors: int, outer: int, rows: int, inner: int, lead: int = 64) -> tuple[LocalCache, Any]:
    """A cache of this process in anonymous memory full of 0x5A: its handle and its bytes, canaries of `lead` bytes around
    each tensor not included."""
    each, pitch = outer * rows * inner, outer * rows * inner + lead
    region = anonymous(lead + pitch * num_tensors)
    content(region)[:] = 0x5A
    cache = LocalCache(region, [(lead + i * pitch, each, outer, rows, inner) for i in range(num_tensors)])
    return cache, content(region, lead).reshape(num_tensors, pitch)[:, :each].reshape(num_tensors, outer, rows, inner)


def select(*, size: int = -1, src_offset: int = 0, dst_offset: int = 0, src_row: int = 0, dst_row: int = 0,
           src_first: int = 0, src_count: int = -1, dst_first: int = 0, dst_count: int = -1,
           divisor: int = 0) -> tuple[int, ...]:
    """A selection as the core takes it."""
    return size, src_offset, dst_offset, src_row, dst_row, src_first, src_count, dst_first, dst_count, divisor


def pull(handle: LinkHandle, into: LocalCache, words: tuple[int, ...], want: tuple[int, ...], *, consumes: bool = False,
         timeout_ms: int = 20000) -> int:
    """Pull the row behind key words; that of a cache id is the selection's src_row."""
    packed = struct.pack("=6Q", 1, *words, want[3])
    return int(_pull.pull(handle, into, packed, want, consumes, timeout_ms))
