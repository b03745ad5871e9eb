"""Valid tables, made by the owner's own code between guard pages; they can be put back as they were after each input."""
from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import memory
import numpy as np
from memory import Pair, prefix, request
from reference import Geometry

from shmkv import _layout, _members, segment
from shmkv._acceptor import AcceptedLink
from shmkv._directory import Directory
from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache
from shmkv._mapping import Region

from . import guards

CANARY = 0x5A
# 4096 bytes each: the last byte of a segment, and of a destination, is the last one before a guard.
SHAPES = [Geometry(4, 1, 2, 512), Geometry(2, 4, 2, 256), Geometry(64, 1, 1, 64)]
BLOCKS_SHAPE, MODEL_ID = Geometry(4, 1, 4, 256), 7
KEYS = [request(1), request(2, 7), prefix(3), request(4), request(5), request(6)]
ENDED = [request(8), request(9)]
UNKNOWN = [request(77), prefix(78)]
IN_USE = {"LinkRecord": 4, "CacheRecord": 32, "TensorRecord": 128, "RowRecord": 16, "coverage line": 32, "index entry": 256}
PUNCH = 0x01 | 0x02                 # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class GuardedOwner(memory.Owner):
    """An owner whose directory and members table stand between guards."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("fuzz-directory")
        os.ftruncate(self.fd, _layout.DIRECTORY_SIZE)
        self.reserved, self.full_after, self._next_id = [], None, 1
        self.incarnation, self.cluster_id = 0xA1, 1
        self.region = guards.guarded(self.fd, _layout.DIRECTORY_SIZE)
        self.directory = Directory(self.region, self._reserve, incarnation=0xA1, cluster_id=1, role=1)
        self.members_fd = os.memfd_create("fuzz-members")
        os.ftruncate(self.members_fd, _layout.MEMBERS_SIZE)
        self.members = guards.guarded(self.members_fd, _layout.MEMBERS_SIZE)
        _members.create(self.members)
        self.add_member(0, self.incarnation, self.cluster_id)

    def close(self) -> None:
        super().close()
        os.close(self.members_fd)


def raw(region: Region) -> memoryview:
    """The bytes of a mapping."""
    return memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.base)).cast("B")


@dataclass
class Kept:
    """A range of a mapping as it was."""

    address: int
    bytes: bytes

    @classmethod
    def of(cls, region: Region, offset: int, nbytes: int) -> Kept:
        return cls(region.base + offset, ctypes.string_at(region.base + offset, nbytes))

    def put_back(self) -> None:
        ctypes.memmove(self.address, self.bytes, len(self.bytes))

    def is_unchanged(self, nbytes: int) -> bool:
        return ctypes.string_at(self.address, nbytes) == self.bytes[:nbytes]


class Target:
    """A destination between guards, full of canaries; tells whether bytes outside of a window were written."""

    def __init__(self, shape: Geometry) -> None:
        self.shape = shape
        each = shape.outer * shape.rows * shape.inner
        self.region = guards.memory(each * shape.num_tensors)
        self.bytes = memory.content(self.region)
        self.bytes[:] = CANARY
        self.clean = self.bytes.tobytes()
        self.rows = self.bytes.reshape(shape)
        self.cache = LocalCache(self.region, [(i * each, each, *shape[1:]) for i in range(shape.num_tensors)])

    def was_written(self, select: tuple[int, ...], rows: list[int] | None = None) -> bool:
        """Did a pull move bytes? They are canaries again afterwards. AssertionError if one changed outside of its window, or
        outside of `rows` of the selected tensors."""
        if self.bytes.tobytes() == self.clean:
            return False
        size, _, offset, _, row, _, _, first, count, _ = select
        chosen = self.rows[first:first + count if count >= 0 else None]
        if rows is not None:
            chosen[:, :, rows] = CANARY
        else:
            window = chosen[:, :, row].reshape(len(chosen), -1)         # a copy
            window[:, offset:offset + size if size >= 0 else None] = CANARY
            chosen[:, :, row] = window.reshape(chosen[:, :, row].shape)
        outside = np.flatnonzero(self.bytes != CANARY)
        assert not len(outside), f"bytes {outside[:8]} of a destination of shape {self.shape} were written by {select}"
        return True


class Pusher:
    """A prompt that the owner has linked to: it pushes from memory between guards into the owner's segments."""

    def __init__(self, owner: GuardedOwner, prefix: str) -> None:
        self.owner, self.prefix = owner, prefix
        self.prompt = memory.Owner(0xF6, 7)
        self.record = self.prompt.claim(1, owner.incarnation, owner.cluster_id)
        self.source, self.block_source = Target(SHAPES[0]).cache, Target(BLOCKS_SHAPE).cache
        tensors = sum(shape.num_tensors for shape in SHAPES)
        self.addresses = [memory.word(owner.region, "TensorRecord", i, "TensorRecord", "base_address").value
                          for i in range(tensors)]
        self.kept = Kept.of(self.prompt.region, memory.TABLES["LinkRecord"][1], (self.record + 1) * memory.TABLES["LinkRecord"][0])
        self.link = self.new_link()

    def put_back(self) -> None:
        """The link, after a push that took the owner for dead."""
        self.kept.put_back()

    def new_link(self) -> AcceptedLink:
        """One that has mapped nothing yet."""
        link = AcceptedLink(self.prompt.region, self.prompt.members, memory.NO_LIFE_FILE, self.record, 1)
        link.attach(self.owner.region, f"{segment.SHM_DIR}/{self.prefix}".encode())
        return link


class World(Pair):
    """An owner with four caches in named segments, the last one of blocks; keys of all kinds and states, links of all states, and a
    reader."""

    owner: GuardedOwner

    def __init__(self, namespace: str) -> None:
        self.owner = GuardedOwner()
        self.prefix = f"{namespace}.c.{self.owner.incarnation:016x}."
        self.sources = []
        rng = np.random.default_rng(1)
        for shape in SHAPES:
            self.add(rng.integers(128, 256, tuple(shape), np.uint8))
        self._bind_keys()
        self.add(rng.integers(128, 256, tuple(BLOCKS_SHAPE), np.uint8), blocks_model_id=MODEL_ID)
        self._make_links()
        self.targets = [Target(shape) for shape in SHAPES]
        self.block_target = Target(BLOCKS_SHAPE)
        self.directory = raw(self.owner.region)
        self.members = raw(self.owner.members)
        self.segments = [raw(source.region) for source in self.sources]
        self._remember()
        self.handle = self.new_handle()
        self.pusher = Pusher(self.owner, self.prefix)

    def _bind_keys(self) -> None:
        directory = self.owner.directory
        places = [(source, row) for source, shape in zip(self.sources, SHAPES, strict=True) for row in range(shape.rows)]
        for number, words in enumerate(ENDED):
            directory.bind(self.sources[number].slot, 0, words)
            directory.remove(self.sources[number].slot, 0)
        for (source, row), words in zip(places, KEYS, strict=False):
            directory.bind(source.slot, row, words)

    def _make_links(self) -> None:
        self.record = self.owner.claim(1, 0xB2, 2)
        self.owner.claim(2, 0xC3, 3)
        _members.clear(self.owner.members, 2)               # dead
        other = self.owner.claim(3, 0xD4, 4)
        memory.word(self.owner.region, "LinkRecord", other, "LinkRecord", "state").value += 2       # removed

    def _remember(self) -> None:
        region = self.owner.region
        self.kept = [Kept.of(region, 0, memory.TABLES["LinkRecord"][1] + 4 * 4096)]
        for table in list(IN_USE)[1:]:
            width, start = memory.TABLES[table]
            self.kept.append(Kept.of(region, start, width * IN_USE[table]))
        self.kept.append(Kept.of(self.owner.members, 0, 4096 + 16 * 128))
        self.headers = [Kept.of(source.region, 0, 128) for source in self.sources]
        self.contents = [Kept.of(source.region, 4096, source.region.nbytes - 4096) for source in self.sources]

    def put_back(self) -> None:
        """All tables as they were made. What was written elsewhere stays until `begin`."""
        for kept in self.kept:
            kept.put_back()
        for header in self.headers:
            header.put_back()
        self.pusher.put_back()

    def put_contents_back(self) -> None:
        """The bytes of the segments, after they were pushed to."""
        for content in self.contents:
            content.put_back()

    def close(self) -> None:
        super().close()
        self.pusher.prompt.close()

    def begin(self) -> None:
        """A fresh reader over tables as they were made, and nothing beyond them."""
        base, end = self.owner.region.base, 0
        for kept in self.kept[:-1]:
            begin = kept.address - base
            if begin > end:
                _libc.fallocate(self.owner.fd, PUNCH, end, begin - end)
            end = -(-(begin + len(kept.bytes)) // 4096) * 4096
        _libc.fallocate(self.owner.fd, PUNCH, end, _layout.DIRECTORY_SIZE - end)
        self.put_back()
        self.handle = self.new_handle()                     # the old one's mappings go
        self.pusher.link = self.pusher.new_link()
        guards.offer_holes(2 * len(self.sources), self.sources[0].region.nbytes)       # for the reader and for the pusher

    def has_good_headers(self) -> bool:
        """Magic, version, fingerprint and lengths of all three kinds of file: those of the segments as they stand."""
        return (all(header.is_unchanged(32) for header in self.headers)
                and not _members.header_fault(self.owner.members, "members")
                and not _members.header_fault(self.owner.region, "directory", self.owner.incarnation))

    def new_handle(self, by_pread: bool = False) -> LinkHandle:
        """A reader that has mapped nothing yet, or one that opens segments and maps none."""
        return LinkHandle(self.owner.region, self.owner.members, memory.NO_LIFE_FILE, self.record,
                          f"{segment.SHM_DIR}/{self.prefix}".encode(), by_pread)

