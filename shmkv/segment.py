"""Life of our own files in /dev/shm: create, size, reserve, recycle, unlink. The only module that knows posix_ipc.

A name is created exclusively, by one process, with mode 0600, and sized once; its pages are reserved before anybody maps it, so
that a full /dev/shm is an answer here and not a bus error at a later write. Whoever created a name unlinks it.
"""
from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import posix_ipc

from shmkv import _crash
from shmkv._layout import SEGMENT_DATA
from shmkv._mapping import Region, close_all

SHM_DIR = "/dev/shm"
DEFAULT_RECYCLE_NBYTES = 1 << 30
# Interrupted by a signal, the kernel undoes a whole step: small ones end even under a fast timer.
RESERVE_STEP = 1 << 20
SMALL_NBYTES = 1 << 20
NO_FD = 0                               # what posix_ipc says before it has opened anything

log = logging.getLogger("shmkv")


def create(name: str, nbytes: int, reserved: int, opened: list[int] | None = None) -> int:
    """Make a file of `nbytes` bytes with pages behind the first `reserved`: its descriptor, which stands in `opened` from the
    moment on that it is the caller's to close.

    FileExistsError if the name is taken, by whomever; OSError (ENOSPC, ENOMEM, ...) when the pages cannot be had, and then no
    file is left.
    """
    # Made in two steps, so that the object has the descriptor also when a signal handler raises right after the call.
    memory = posix_ipc.SharedMemory.__new__(posix_ipc.SharedMemory)
    try:
        _open_new(memory, name)
        _crash.reach("created")
        os.fchmod(memory.fd, 0o600)     # whatever the umask took away
        os.ftruncate(memory.fd, nbytes)
        _crash.reach("sized")
        reserve(memory.fd, 0, reserved)
        if opened is not None:
            opened.append(memory.fd)
    except BaseException:
        if memory.fd > NO_FD and memory.fd not in (opened or ()):
            memory.close_fd()
            unlink(name)
        raise
    return int(memory.fd)


def _open_new(memory: posix_ipc.SharedMemory, name: str) -> None:
    """shm_open, exclusively, into an object that stands already."""
    try:
        memory.__init__("/" + name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError as error:
        # posix_ipc says the same of a name that is taken and of a folder that is not there.
        if not os.path.isdir(SHM_DIR):
            raise FileNotFoundError(errno.ENOENT, f"{SHM_DIR} is missing: shmkv needs a tmpfs there") from error
        raise FileExistsError(errno.EEXIST, f"{SHM_DIR}/{name} exists already") from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(errno.EACCES, f"cannot create {SHM_DIR}/{name}: {error}") from error


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Put pages behind a range of a file. OSError when there are none; nothing is taken back that was reserved before."""
    _check_room(nbytes)
    for begin in range(offset, offset + nbytes, RESERVE_STEP):
        step = min(RESERVE_STEP, offset + nbytes - begin)
        try:
            _crash.reach("reserving")
            os.posix_fallocate(fd, begin, step)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            _write_zeros(fd, begin, step)


def _write_zeros(fd: int, begin: int, nbytes: int) -> None:
    """Reserve by writing, where the kernel has no fallocate for this file system. Only ever a range without pages."""
    end = begin + nbytes
    while begin < end:
        begin += os.pwrite(fd, bytes(end - begin), begin)


def _check_room(nbytes: int) -> None:
    """Refuse what cannot end well. Beyond its size, /dev/shm answers by itself, but only after everything was taken; beyond the
    memory of the machine or of its cgroup, the kernel kills instead of answering. Small requests are not worth the look."""
    if nbytes < SMALL_NBYTES:
        return
    if nbytes > free_nbytes():
        raise OSError(errno.ENOSPC, f"{free_nbytes()} bytes are free in {SHM_DIR}, {nbytes} are needed")
    left = memory_limit_left()
    if left is not None and nbytes > left:
        raise OSError(errno.ENOMEM, f"the memory limit of this process's cgroup leaves {left} bytes, {nbytes} are needed")
    available = memory_available()
    if available is not None and nbytes > available:
        raise OSError(errno.ENOMEM, f"{available} bytes of memory are available on this machine, {nbytes} are needed")


def memory_available() -> int | None:
    """Bytes that the machine can give without swapping out (MemAvailable) plus free swap; None if it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None


def memory_limit_left() -> int | None:
    """Bytes below the limit of this process's memory cgroup, of version 2 or 1; None without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if "memory" in controllers.split(","):
            left = _limit_left(Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            left = _limit_left(Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max", "memory.current")
        else:
            continue
        if left is not None:
            return left
    return None


def _limit_left(folder: Path, limit: str, usage: str) -> int | None:
    try:
        text = (folder / limit).read_text().strip()
        # Version 1 writes "no limit" as a number near 2**63.
        return None if text == "max" or int(text) > 1 << 60 else int(text) - int((folder / usage).read_text())
    except (OSError, ValueError):
        return None


def unlink(name: str) -> bool:
    """Take a name away: is it gone? Already gone is no error; what cannot be removed is logged and stays."""
    _crash.reach("unlinking")
    try:
        posix_ipc.unlink_shared_memory("/" + name)
    except posix_ipc.ExistentialError:
        log.debug("%s/%s was gone already", SHM_DIR, name)
    except (posix_ipc.Error, OSError) as error:
        number = getattr(error, "errno", None) or errno.EACCES
        log.warning("cannot remove %s/%s: %s (errno %d)", SHM_DIR, name, error, number)
        return False
    return True


def names(prefix: str) -> list[str]:
    """Names in /dev/shm that start with `prefix`."""
    return [name for name in os.listdir(SHM_DIR) if name.startswith(prefix)]


def free_nbytes() -> int:
    """Bytes that /dev/shm has left."""
    found = os.statvfs(SHM_DIR)
    return found.f_bavail * found.f_frsize


def known_free_nbytes() -> int | None:
    """The same for a message, which must not fail: None if it cannot be told."""
    try:
        return free_nbytes()
    except OSError:
        return None


def total_nbytes() -> int:
    """Bytes that /dev/shm has in all."""
    found = os.statvfs(SHM_DIR)
    return found.f_blocks * found.f_frsize


class Segment:
    """One segment of this cluster, mapped writable. `nbytes` is the size of the file, header included."""

    def __init__(self, name: str, serial: int, region: Region) -> None:
        self.name = name
        self.serial = serial
        self.region = region

    @property
    def nbytes(self) -> int:
        return int(self.region.nbytes)


def create_and_map(name: str, nbytes: int, *, reserved: int | None = None, populate: bool = True) -> Region:
    """Make a file with pages behind all of it, or behind the first `reserved` bytes, and map it."""
    opened: list[int] = []
    try:
        return Region.map(create(name, nbytes, nbytes if reserved is None else reserved, opened), nbytes, populate=populate)
    finally:
        close_all(opened)


class SegmentPool:
    """Segments of one cluster: new ones, and freed ones kept for the next cache that fits.

    `prefix` is the name up to the serial number; `on_unlink(serial)` is told when a name is gone; `data_limit`: bytes of tensors in
    what is kept, headers not counted, as the pools of the options count. Called under the owner's lock.
    """

    def __init__(self, prefix: str, recycle_nbytes: int | None, on_unlink: Callable[[int], None],
                 data_limit: int | None = None) -> None:
        self._prefix = prefix
        self._limit = DEFAULT_RECYCLE_NBYTES if recycle_nbytes is None else recycle_nbytes
        self._data_limit = data_limit
        self._on_unlink = on_unlink
        self._kept: list[Segment] = []
        self._next_serial = 1
        self.made_nbytes = 0        # of all segments that have a name now

    @property
    def kept_nbytes(self) -> int:
        """Bytes of freed segments that wait for a next cache."""
        return sum(segment.nbytes for segment in self._kept)

    def take(self, nbytes: int, make_room: Callable[[int], None] = lambda _: None) -> tuple[Segment, bool]:
        """A segment with room for `nbytes` bytes of tensors, and whether its bytes are fresh (zero). Before a new one is made,
        `make_room` is told its size. OSError when there is no memory; what is kept is given up before that is said."""
        wanted = SEGMENT_DATA + nbytes
        fitting = [segment for segment in self._kept if wanted <= segment.nbytes <= 2 * wanted]
        if fitting:
            segment = min(fitting, key=lambda kept: kept.nbytes)
            self._kept.remove(segment)
            _crash.reach("reusing")
            return segment, False
        make_room(wanted)
        try:
            return self._make(wanted), True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM) or not self.drain():
                raise
            return self._make(wanted), True

    def _make(self, nbytes: int) -> Segment:
        # A name that somebody squats costs one serial number; incarnations cannot be guessed, so the next one is free.
        for _ in range(8):
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            name = f"{self._prefix}{serial:x}"
            try:
                # A test build may be told to do without the pages.
                sparse = _crash.sparse()
                region = create_and_map(name, nbytes, reserved=SEGMENT_DATA if sparse else nbytes, populate=not sparse)
            except FileExistsError:
                log.warning("%s/%s exists already; it is left alone", SHM_DIR, name)
                continue
            except BaseException:
                unlink(name)                # nobody else can have made it: the name has our incarnation
                raise
            self.made_nbytes += nbytes
            return Segment(name, serial, region)
        raise FileExistsError(errno.EEXIST, f"eight names after {SHM_DIR}/{name} are taken")

    def give(self, segment: Segment) -> int:
        """Take back the memory of a freed cache: kept, if nobody holds a view of it and it fits the limits, else unlinked.
        Returns the bytes that the system has back."""
        if segment.region.exports == 0 and self._may_keep(segment):
            self._kept.append(segment)
            _crash.reach("recycled")
            return 0
        return self._drop(segment)

    def _may_keep(self, segment: Segment) -> bool:
        nbytes = self.kept_nbytes + segment.nbytes
        data = nbytes - SEGMENT_DATA * (len(self._kept) + 1)
        return nbytes <= self._limit and (self._data_limit is None or data <= self._data_limit)

    def drain(self) -> int:
        """Unlink all that is kept: bytes given back."""
        return sum(self._drop(self._kept.pop()) for _ in range(len(self._kept)))

    def _drop(self, segment: Segment) -> int:
        unlink(segment.name)
        _crash.reach("unlinked")
        self.made_nbytes -= segment.nbytes
        self._on_unlink(segment.serial)
        return segment.nbytes


def starting_with(prefix: str) -> Iterator[tuple[str, int]]:
    """(name, bytes in use) of the files in /dev/shm that start with `prefix`."""
    for name in sorted(names(prefix)):
        try:
            yield name, os.stat(f"{SHM_DIR}/{name}", follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
