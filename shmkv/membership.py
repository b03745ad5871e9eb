"""Who is in a namespace, and who of them lives: life file, members table, cold lock, sweep.

A cluster is a slot of the members table plus the life byte of that slot, held by its process for as long as it lives. Joining,
leaving, sweeping and linking happen one at a time under the *cold lock*: a mutex of this process, then one more byte of the life
file. "Cannot tell" counts as alive. Orphans go in `sweep` and nowhere else: called by a join or by a person, never by another
process's destructor.
"""
from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shmkv import _life, _members, segment
from shmkv._layout import MEMBERS_LIMIT, MEMBERS_SIZE, VERSION
from shmkv._mapping import Region
from shmkv.errors import LLMException

JOIN_TIMEOUT_MS = 5000
POLL_S = 0.001

log = logging.getLogger("shmkv")
_process_lock = threading.Lock()


def _new_process_lock() -> None:
    """A forked child must not wait for a thread that it does not have."""
    global _process_lock
    _process_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_process_lock)


@dataclass(frozen=True)
class Member:
    """One record of the table, as read."""

    slot: int
    incarnation: int
    cluster_id: int
    pid: int
    role: int
    start_time: int
    directory: str


@dataclass
class _LifeFile:
    """The life file of a namespace, open. Never closed while this process holds a byte of it: that would drop them all."""

    fd: int
    epoch: int
    held: set[int] = field(default_factory=set)


_life_files: dict[str, _LifeFile] = {}


def life_name(namespace: str) -> str:
    """Name of the life file in /dev/shm."""
    return f"{namespace}.life"


def table_name(namespace: str, version: int = VERSION) -> str:
    """Name of the members table of one layout version."""
    return f"{namespace}.members.v{version}"


def directory_name(incarnation: int) -> str:
    """Name of a cluster's directory without its namespace."""
    return f"d.{incarnation:016x}"


def segment_prefix(namespace: str, incarnation: int) -> str:
    """Name of a cluster's cache segments up to the serial number."""
    return f"{namespace}.c.{incarnation:016x}."


class Namespace:
    """The life file and members table of one namespace, open in this process."""

    def __init__(self, name: str, life: _LifeFile, table: Region) -> None:
        self.name = name
        self.life = life
        self.table = table

    @property
    def life_fd(self) -> int:
        """Descriptor of the life file."""
        return self.life.fd

    # -- entering ---------------------------------------------------------------------------------------------------

    @classmethod
    def join(cls, name: str, cluster_id: int, role: int, timeout_ms: int = JOIN_TIMEOUT_MS) -> tuple[Namespace, Member]:
        """Open a namespace and take a place in it, all under one hold of the cold lock: between two, another joiner would find
        no life byte and start the namespace afresh. Its files are made if nobody lives there, and then what the dead left is
        removed first, whatever its version."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            life = _open_life(name)
            with _cold(name, life, deadline):
                if _same_file(life.fd, life_name(name)):
                    if not life.held and not _life.anybody(life.fd):
                        _remove_all(name)
                    namespace = cls(name, life, _open_table(name))
                    return namespace, namespace._take_slot(cluster_id, role)
            _forget(name)                   # the last member left between our open and our lock

    @classmethod
    def peek(cls, name: str) -> Namespace | None:
        """Open a namespace if it exists, creating and removing nothing; None if it does not."""
        if not os.path.exists(f"{segment.SHM_DIR}/{life_name(name)}"):
            return None
        try:
            return cls(name, _open_life(name), Region.attach(f"{segment.SHM_DIR}/{table_name(name)}", writable=True))
        except FileNotFoundError:
            return None

    @contextmanager
    def cold(self, timeout_ms: int) -> Iterator[None]:
        """The cold lock; LLMException when it cannot be had in time, or when the namespace's files were removed."""
        with self.cold_even_unnamed(timeout_ms):
            self.check_named()
            yield

    @contextmanager
    def cold_even_unnamed(self, timeout_ms: int) -> Iterator[None]:
        """The cold lock, for leaving: whether or not the files still have their names."""
        with _cold(self.name, self.life, time.monotonic() + timeout_ms / 1000):
            yield

    def set_role(self, member: Member, role: int) -> None:
        """The role that `ls` shows for a member."""
        _members.set_role(self.table, member.slot, role)

    def check_named(self) -> None:
        """LLMException if somebody removed the life file or the table behind our back."""
        if os.fstat(self.life.fd).st_nlink == 0 or not _exists(table_name(self.name)):
            raise LLMException(f"namespace was removed: the files of {self.name!r} in {segment.SHM_DIR} have no name any more")

    # -- who is there -----------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """All records, of the living and of the dead."""
        records = ((slot, _members.read(self.table, slot)) for slot in range(MEMBERS_LIMIT))
        return [Member(slot, *record) for slot, record in records if record is not None]

    def lives(self, member: Member) -> bool:
        """Does the member's process live? Its own slots are held by this process itself, which no look can show."""
        return member.slot in self.life.held or _life.held_by_other(self.life.fd, member.slot)

    def find(self, cluster_id: int) -> Member | None:
        """The living member with this cluster id."""
        return next((m for m in self.members() if m.cluster_id == cluster_id and self.lives(m)), None)

    def versions_of(self, cluster_id: int) -> list[str]:
        """Names of tables of other layout versions in which a cluster with this id is recorded."""
        found = []
        for name in segment.names(f"{self.name}.members.v"):
            if name != table_name(self.name):
                try:
                    table = Region.attach(f"{segment.SHM_DIR}/{name}")
                except OSError as error:
                    log.debug("cannot read %s: %s", name, error)
                    continue
                if cluster_id in _members.foreign_clusters(table):
                    found.append(name)
        return found

    # -- joining, leaving, sweeping: under the cold lock ----------------------------------------------------------------

    def _take_slot(self, cluster_id: int, role: int) -> Member:
        """Take a slot: sweep the dead, refuse a living cluster's id, hold the byte, write the record."""
        twin = self.find(cluster_id)
        if twin is not None:
            raise LLMException(f"cluster id {cluster_id} is used by the living process {twin.pid} in namespace {self.name!r}")
        self.sweep()
        for slot in range(MEMBERS_LIMIT):
            if _members.read(self.table, slot) is None and slot not in self.life.held and _life.hold(self.life.fd, slot):
                self.life.held.add(slot)
                return self._write(slot, cluster_id, role)
        raise LLMException(f"namespace {self.name!r} is full: {MEMBERS_LIMIT} living members")

    def _write(self, slot: int, cluster_id: int, role: int) -> Member:
        incarnation = secrets.randbits(64) | 1
        member = Member(slot, incarnation, cluster_id, os.getpid(), role, _start_time(), directory_name(incarnation))
        _members.write(self.table, slot, incarnation=incarnation, cluster_id=cluster_id, pid=member.pid, role=role,
                       start_time=member.start_time, directory=member.directory.encode())
        _members.count_join(self.table)
        return member

    def leave(self, member: Member) -> None:
        """Remove what the member named, its record and its life byte; the last one removes the namespace's files."""
        self._remove_named(member.incarnation)
        _members.clear(self.table, member.slot)
        _life.drop(self.life.fd, member.slot)
        self.life.held.discard(member.slot)
        if not self.life.held and not _life.anybody(self.life.fd):
            _remove_all(self.name)
            segment.unlink(life_name(self.name))

    def sweep(self, *, dry: bool = False) -> list[tuple[str, int]]:
        """Remove what dead members left: (name, bytes) of each file. `dry` only looks. Nothing is touched whose incarnation was
        not in the table and found dead."""
        removed: list[tuple[str, int]] = []
        for member in self.members():
            if not self.lives(member):
                removed += self._remove_named(member.incarnation, dry=dry)
                if not dry:
                    _members.clear(self.table, member.slot)
        if removed and not dry:
            nbytes = sum(size for _, size in removed)
            log.info("removed %d files (%d bytes) that dead processes left in namespace %r", len(removed), nbytes, self.name)
        return removed

    def _remove_named(self, incarnation: int, *, dry: bool = False) -> list[tuple[str, int]]:
        found = list(segment.starting_with(segment_prefix(self.name, incarnation)))
        found += segment.starting_with(f"{self.name}.{directory_name(incarnation)}")
        if not dry:
            for name, _ in found:
                segment.unlink(name)
        return found

    def check_own_life(self, member: Member) -> None:
        """Is our life byte still ours? An open and close of the life file anywhere in this process drops it: take it again, or
        say so if others already called us dead."""
        if _life.own(self.life.fd, member.slot):
            return
        record = _members.read(self.table, member.slot)
        if record is None or record[0] != member.incarnation or not _life.hold(self.life.fd, member.slot):
            raise LLMException(f"this process lost its life byte {member.slot} of {life_name(self.name)} (something in it opened "
                               "and closed that file) and was taken for dead: finalize and init again")
        log.warning("took life byte %d of %s again: something in this process had closed that file", member.slot,
                    life_name(self.name))


# -- files -------------------------------------------------------------------------------------------------------------

def _exists(name: str) -> bool:
    return os.path.lexists(f"{segment.SHM_DIR}/{name}")


def _open_life(namespace: str) -> _LifeFile:
    """The life file, opened once a process and namespace; a forked child, which holds no byte, starts with a clean record."""
    life = _life_files.get(namespace)
    if life is not None and life.epoch == _life.epoch():
        return life
    name = life_name(namespace)
    while True:
        try:
            fd = os.open(f"{segment.SHM_DIR}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            try:
                fd = segment.create(name, 0, 0)
            except FileExistsError:
                continue
        except OSError as error:
            raise LLMException(_in_the_way(name, os.strerror(error.errno or errno.EIO))) from error
        break
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
        os.close(fd)
        raise LLMException(_in_the_way(name, f"uid {found.st_uid}, mode {found.st_mode:o}"))
    _life_files[namespace] = life = _LifeFile(fd, _life.epoch())
    return life


def _in_the_way(name: str, what: str) -> str:
    return (f"{segment.SHM_DIR}/{name} is in the way ({what}): it should be a regular file of this user with mode 0600; "
            "remove it or choose another SHMKV_NAMESPACE")


def _forget(namespace: str) -> None:
    """Close a life file that lost its name. A cluster of this process that still holds a byte of it goes on as it is."""
    if _life_files[namespace].held:
        raise LLMException(f"namespace was removed: {segment.SHM_DIR}/{life_name(namespace)} has no name any more")
    os.close(_life_files.pop(namespace).fd)


def _open_table(namespace: str) -> Region:
    """The members table, made if there is none. Under the cold lock."""
    name = table_name(namespace)
    try:
        table = Region.attach(f"{segment.SHM_DIR}/{name}", writable=True)
    except FileNotFoundError:
        fd = segment.create(name, MEMBERS_SIZE, MEMBERS_SIZE)
        try:
            table = Region.map(fd, MEMBERS_SIZE, populate=False)
        finally:
            os.close(fd)
        _members.create(table)
        return table
    except OSError as error:
        raise LLMException(_in_the_way(name, str(error))) from error
    fault = _members.header_fault(table, "members")
    if fault:
        raise LLMException(f"{segment.SHM_DIR}/{name}: {fault}; processes of another build live in namespace {namespace!r}")
    return table


def _remove_all(namespace: str) -> None:
    """Nobody lives: table and leftovers of every version go, the life file stays."""
    for name in segment.names(f"{namespace}."):
        if name != life_name(namespace):
            segment.unlink(name)


def _same_file(fd: int, name: str) -> bool:
    try:
        found = os.stat(f"{segment.SHM_DIR}/{name}", follow_symlinks=False)
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (found.st_ino, found.st_dev) == (own.st_ino, own.st_dev)


def _start_time() -> int:
    """Clock ticks after boot at which this process started."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@contextmanager
def _cold(namespace: str, life: _LifeFile, deadline: float) -> Iterator[None]:
    """The process mutex, then the cold byte, polled to the deadline: a record lock that is waited for cannot time out."""
    mutex = _process_lock
    if not mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise LLMException(f"another thread of this process is joining or linking in namespace {namespace!r}")
    try:
        while not _life.hold_cold(life.fd):
            if time.monotonic() >= deadline:
                pid = _life.cold_holder_pid(life.fd)
                raise LLMException(f"process {pid or 'of another pid namespace'} holds the cold lock of namespace {namespace!r}")
            time.sleep(POLL_S)
        try:
            yield
        finally:
            _life.drop_cold(life.fd)
    finally:
        mutex.release()
