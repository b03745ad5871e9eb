"""The library's files in /dev/shm as a hostile or curious neighbour sees them: fields by name, raw bytes."""
from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peer import SHM, Namespace

from shmkv import _layout

FIELDS = {(struct, field): (offset, nbytes) for struct, field, offset, nbytes in _layout.fields()}
TABLES = {record: (nbytes, offset) for record, nbytes, _, offset in _layout.tables()}
LINK_HELD_BY_OWNER = 1


class SharedFile:
    """A file of a namespace, mapped writable. Use as a context manager."""

    def __init__(self, name: str, directory: Path = SHM) -> None:
        fd = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.bytes = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes.close()

    @staticmethod
    def place(struct: str, field: str, number: int = 0) -> tuple[int, int]:
        """(offset, nbytes) of a field of the record `number` of its table; headers stand at the start."""
        size, start = TABLES.get(struct, (0, 0))
        offset, nbytes = FIELDS[struct, field]
        return start + number * size + offset, nbytes

    def get(self, struct: str, field: str, number: int = 0) -> int:
        offset, nbytes = self.place(struct, field, number)
        return int.from_bytes(self.bytes[offset:offset + nbytes], "little")

    def put(self, struct: str, field: str, value: int, number: int = 0) -> None:
        offset, nbytes = self.place(struct, field, number)
        self.bytes[offset:offset + nbytes] = (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")

    def reader(self, field: str, number: int) -> int:
        """A field of the side that made a link: the second one of the record."""
        (start, both), (offset, nbytes) = self.place("LinkRecord", "sides", number), FIELDS["LinkSide", field]
        start += both // 2 + offset
        return int.from_bytes(self.bytes[start:start + min(nbytes, 8)], "little")


def reader_slot(found: SharedFile, cluster_id: int) -> int:
    """Number of the link record that a cluster has in the directory of another one."""
    slots = range(found.get("DirectoryHeader", "links_reserved"))
    return next(slot for slot in slots if found.get("LinkRecord", "state", slot) & 0xFF == 1
                and found.reader("cluster_id", slot) == cluster_id)


@contextmanager
def held_by_owner(namespace: Namespace, cluster_id: int = 1) -> Iterator[None]:
    """The lock of the first link to a cluster is held by that cluster."""
    with SharedFile(directory_of(namespace, cluster_id)) as found:
        found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
        yield
        found.put("LinkRecord", "word", 0)


def directories(namespace: Namespace) -> list[str]:
    """Names of the directories of a namespace."""
    return sorted(name for name in namespace.names() if name.startswith(f"{namespace.name}.d."))


def directory_of(namespace: Namespace, cluster_id: int) -> str:
    """Name of the directory of one cluster."""
    for name in directories(namespace):
        with SharedFile(name) as found:
            if found.get("DirectoryHeader", "cluster_id") == cluster_id:
                return name
    raise AssertionError(f"cluster {cluster_id} has no directory in {namespace.names()}")


def segments_of(namespace: Namespace, cluster_id: int) -> list[str]:
    """Names of the cache segments of one cluster, by age."""
    incarnation = directory_of(namespace, cluster_id).rpartition(".")[2]
    prefix = f"{namespace.name}.c.{incarnation}."
    return sorted((name for name in namespace.names() if name.startswith(prefix)),
                  key=lambda name: int(name.rpartition(".")[2], 16))
