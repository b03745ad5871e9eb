"""The life file of a namespace as this process has it open, and the cold lock.

Opened once and never closed while this process holds a byte of it: any close would drop all its bytes. The cold lock is a mutex of
this process, then one byte of the file; joining, leaving, sweeping and linking happen one at a time under it.
"""
from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from shmkv import _life, segment
from shmkv._cold import ColdLock
from shmkv._mapping import close_all
from shmkv._mutex import Mutex
from shmkv.errors import LLMException, link_busy

_process_lock = Mutex(busy=link_busy)


def _new_process_lock() -> None:
    """A forked child must not wait for a thread that it does not have."""
    global _process_lock
    _process_lock = Mutex(busy=link_busy)


os.register_at_fork(after_in_child=_new_process_lock)


@dataclass
class LifeFile:
    """The life file of a namespace, open. Never closed while this process holds a byte of it: that would drop them all."""

    fd: int
    epoch: int
    held: set[int] = field(default_factory=set)


_life_files: dict[str, LifeFile] = {}


def life_name(namespace: str) -> str:
    """Name of the life file in /dev/shm."""
    return f"{namespace}.life"


def identity_of_name(name: str) -> tuple[int, int] | None:
    """Inode and device of what has a name in /dev/shm now, None if nothing has."""
    try:
        found = os.stat(f"{segment.SHM_DIR}/{name}", follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_dev


def same_file(fd: int, name: str) -> bool:
    own = os.fstat(fd)
    return identity_of_name(name) == (own.st_ino, own.st_dev)


def open_life(namespace: str) -> LifeFile:
    """The life file, made if there is none."""
    while True:
        life = find_life(namespace)
        if life is not None:
            return life
        opened: list[int] = []
        try:
            segment.create(life_name(namespace), 0, 0, opened)
        except FileExistsError:
            continue                        # somebody else made it meanwhile
        finally:
            close_all(opened)


def find_life(namespace: str) -> LifeFile | None:
    """The life file if there is one, opened once a process and namespace; a forked child, which holds no byte, starts with a
    clean record."""
    life = _life_files.get(namespace)
    if life is not None and life.epoch == _life.epoch():
        return life
    name = life_name(namespace)
    opened: list[int] = []                  # from the moment on that it is open
    try:
        if not _open_checked(name, opened):
            return None
        _life_files[namespace] = life = LifeFile(opened[0], _life.epoch())
    except BaseException:
        kept = _life_files.get(namespace)
        if kept is None or kept.fd not in opened:       # else it was kept already when the interrupt came
            close_all(opened)
        raise
    return life


def _open_checked(name: str, opened: list[int]) -> bool:
    """Open a life file and see that it is one of ours; False if there is none."""
    try:
        _life.open_into(f"{segment.SHM_DIR}/{name}", opened)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise LLMException(f"cannot open {segment.SHM_DIR}/{name}: {os.strerror(error.errno)}") from error
        raise LLMException(in_the_way(name, os.strerror(error.errno or errno.EIO))) from error
    found = os.fstat(opened[0])
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
        raise LLMException(in_the_way(name, f"uid {found.st_uid}, mode {found.st_mode:o}"))
    return True


def in_the_way(name: str, what: str) -> str:
    return (f"{segment.SHM_DIR}/{name} is in the way ({what}): it should be a regular file of this user with mode 0600; "
            "remove it or choose another SHMKV_NAMESPACE")


def forget(namespace: str) -> None:
    """Close a life file that lost its name. A cluster of this process that still holds a byte of it goes on as it is."""
    if _life_files[namespace].held:
        raise LLMException(f"namespace was removed: {segment.SHM_DIR}/{life_name(namespace)} has no name any more")
    _life.close_kept(_life_files, namespace)


def cold(namespace: str, life: LifeFile, deadline: float, check: Callable[[], None] | None = None) -> ColdLock:
    """The cold lock as a context manager; see `ColdLock`."""
    return ColdLock(_process_lock, life.fd, deadline, namespace, check)
