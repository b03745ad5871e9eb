"""Who is in a namespace, and who of them lives: life file, members table, cold lock, sweep.

A cluster is a slot of the members table plus the life byte of that slot, held by its process for as long as it lives. Joining,
leaving, sweeping and linking happen one at a time under the *cold lock*: a mutex of this process, then one more byte of the life
file. "Cannot tell" counts as alive. Orphans go in `sweep` and nowhere else: called by a join or by a person, never by another
process's destructor.
"""
from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from shmkv import _crash, _life, _members, segment
from shmkv._cold import ColdLock
from shmkv._layout import MEMBERS_LIMIT, MEMBERS_SIZE, VERSION
from shmkv._mapping import Region
from shmkv.errors import LLMException
from shmkv.life_file import (
    LifeFile,
    cold,
    find_life,
    forget,
    identity_of_name,
    in_the_way,
    life_name,
    open_life,
    same_file,
)

JOIN_TIMEOUT_MS = 5000

log = logging.getLogger("shmkv")
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

    def __init__(self, name: str, life: LifeFile, table: Region) -> None:
        self.name = name
        self.life = life
        self.table = table
        self._table_file = identity_of_name(table_name(name))

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
            life = open_life(name)
            with cold(name, life, deadline):
                if same_file(life.fd, life_name(name)):
                    alone = not life.held and not _life.anybody(life.fd)
                    try:
                        if alone:
                            _remove_all(name)
                        namespace = cls(name, life, _open_table(name))
                        return namespace, namespace._take_slot(cluster_id, role)
                    except OSError:
                        if alone:
                            segment.unlink(life_name(name))
                        raise
            forget(name)                   # the last member left between our open and our lock

    @classmethod
    def peek(cls, name: str) -> Namespace | None:
        """Open a namespace if it exists, creating and removing nothing; None if it does not. LLMException for files that are in
        the way or have another layout."""
        life = find_life(name)
        if life is not None and not life.held and not same_file(life.fd, life_name(name)):
            forget(name)                   # of a namespace that others have left and made again
            life = find_life(name)
        if life is None:
            return None
        try:
            return cls(name, life, _attach_table(name))
        except (FileNotFoundError, BlockingIOError):
            return None

    @staticmethod
    def anybody_lives(name: str) -> bool:
        """Does any process hold a life byte in that namespace, of whatever layout version?"""
        life = find_life(name)
        return life is not None and (bool(life.held) or _life.anybody(life.fd))

    def cold(self, timeout_ms: int) -> ColdLock:
        """The cold lock; LLMException when it cannot be had in time, or when the namespace's files were removed."""
        return cold(self.name, self.life, time.monotonic() + timeout_ms / 1000, self.check_named)

    def cold_even_unnamed(self, timeout_ms: int) -> ColdLock:
        """The cold lock, for leaving: whether or not the files still have their names."""
        return cold(self.name, self.life, time.monotonic() + timeout_ms / 1000)

    def set_role(self, member: Member, role: int) -> None:
        """The role that `ls` shows for a member."""
        if self._is_recorded(member):
            _members.set_role(self.table, member.slot, role)

    def check_named(self) -> None:
        """LLMException if somebody removed the life file or the table behind our back, or if that cannot be told."""
        try:
            named = self.is_named()
        except OSError as error:
            raise LLMException(f"cannot look at the files of {self.name!r} in {segment.SHM_DIR}: {error}") from error
        if not named:
            raise LLMException(f"namespace was removed: the files of {self.name!r} in {segment.SHM_DIR} have no name any more")

    def is_named(self) -> bool:
        """Do the life file and the table that this process uses still have their names? Others may stand there instead."""
        return same_file(self.life.fd, life_name(self.name)) and self._table_file == identity_of_name(table_name(self.name))

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
            if _members.read(self.table, slot) is None and slot not in self.life.held:
                member = self._try_slot(slot, cluster_id, role)
                if member is not None:
                    return member
        raise LLMException(f"namespace {self.name!r} is full: {MEMBERS_LIMIT} living members")

    def _try_slot(self, slot: int, cluster_id: int, role: int) -> Member | None:
        """Hold a slot's byte and write its record; None if another process holds it. Whatever interrupts it gives the byte back."""
        try:
            self.life.held.add(slot)
            if _life.hold(self.life.fd, slot):
                _crash.reach("life-held")
                return self._write(slot, cluster_id, role)
        except BaseException:
            _drop_life(self.life, slot)
            raise
        self.life.held.discard(slot)
        return None

    def _write(self, slot: int, cluster_id: int, role: int) -> Member:
        incarnation = secrets.randbits(64) | 1
        member = Member(slot, incarnation, cluster_id, os.getpid(), role, _start_time(), directory_name(incarnation))
        _members.write(self.table, slot, incarnation=incarnation, cluster_id=cluster_id, pid=member.pid, role=role,
                       start_time=member.start_time, directory=member.directory.encode())
        _members.count_join(self.table)
        return member

    def leave(self, member: Member) -> None:
        """Remove what the member named, its record and its life byte; the last one removes the namespace's files. A record that
        went to somebody else meanwhile, and files that others made where ours were removed, are left alone."""
        _crash.reach("leaving")
        self._remove_member(member)
        _crash.reach("life-dropping")
        _drop_life(self.life, member.slot)
        if self.life.held or _life.anybody(self.life.fd):
            return
        if same_file(self.life.fd, life_name(self.name)):
            _remove_all(self.name)
            _crash.reach("leaving-last")
            segment.unlink(life_name(self.name))
        elif self._table_file == identity_of_name(table_name(self.name)):
            segment.unlink(table_name(self.name))       # somebody removed the life file only

    @classmethod
    def abandon(cls, name: str, timeout_ms: int) -> None:
        """After a join that was interrupted: leave with whatever slot this process holds."""
        life = find_life(name)
        if life is None or not life.held:
            return
        try:
            with cold(name, life, time.monotonic() + timeout_ms / 1000):
                namespace = cls(name, life, _attach_table(name))
                for slot in list(life.held):
                    record = _members.read(namespace.table, slot)
                    if record is not None:
                        namespace.leave(Member(slot, *record))
        finally:
            for slot in list(life.held):
                _drop_life(life, slot)

    def give_up_life(self, member: Member) -> None:
        """Drop the life byte, if `leave` could not: to others the member is dead then, and the next sweep removes its files."""
        if member.slot in self.life.held:
            _drop_life(self.life, member.slot)

    def _is_recorded(self, member: Member) -> bool:
        record = _members.read(self.table, member.slot)
        return record is not None and record[0] == member.incarnation

    def sweep(self, *, dry: bool = False) -> list[tuple[str, int]]:
        """Remove what dead members left: (name, bytes) of each file. `dry` only looks. Nothing is touched whose incarnation was
        not in the table and found dead."""
        removed: list[tuple[str, int]] = []
        for member in self.members():
            if not self.lives(member):
                removed += self._remove_member(member, dry=dry)
        if removed and not dry:
            nbytes = sum(size for _, size in removed)
            log.info("removed %d files (%d bytes) that dead processes left in namespace %r: %s", len(removed), nbytes, self.name,
                     ", ".join(name for name, _ in removed))
        return removed

    def _remove_member(self, member: Member, *, dry: bool = False) -> list[tuple[str, int]]:
        """Remove what a member named, then its record: (name, bytes) of each file. A record stays as long as one of its names does,
        so that a later sweep finds it."""
        found = list(segment.starting_with(segment_prefix(self.name, member.incarnation)))
        found += segment.starting_with(f"{self.name}.{directory_name(member.incarnation)}")
        if dry:
            return found
        removed = [(name, nbytes) for name, nbytes in found if segment.unlink(name)]
        if len(removed) == len(found) and self._is_recorded(member):
            _crash.reach("sweeping")
            _members.clear(self.table, member.slot)
        return removed

    def check_own_life(self, member: Member) -> None:
        """Is our life byte still ours? An open and close of the life file anywhere in this process drops it: take it again, or
        say so if others already called us dead."""
        if _life.own(self.life.fd, member.slot):
            return
        if not self.is_named() or not self._is_recorded(member) or not _life.hold(self.life.fd, member.slot):
            raise LLMException(f"this process lost its life byte {member.slot} of {life_name(self.name)} (something in it opened "
                               "and closed that file) and was taken for dead: finalize and init again")
        log.warning("took life byte %d of %s again: something in this process had closed that file", member.slot,
                    life_name(self.name))


def _drop_life(life: LifeFile, slot: int) -> None:
    """Give a slot's byte back. If the kernel will not, it goes with this process."""
    try:
        _life.drop(life.fd, slot)
    except OSError as error:
        log.warning("life byte %d stays held until this process ends: %s", slot, error)
    finally:
        life.held.discard(slot)


# -- files -------------------------------------------------------------------------------------------------------------

def _open_table(namespace: str) -> Region:
    """The members table, made if there is none. Under the cold lock."""
    try:
        return _attach_table(namespace)
    except FileNotFoundError:
        table = segment.create_and_map(table_name(namespace), MEMBERS_SIZE, populate=False)
        _members.create(table)
        return table


def _attach_table(namespace: str) -> Region:
    """The members table as it is: FileNotFoundError, or LLMException if it is not one of ours."""
    name = table_name(namespace)
    try:
        table = Region.attach(f"{segment.SHM_DIR}/{name}", writable=True)
    except (FileNotFoundError, BlockingIOError):
        raise
    except OSError as error:
        raise LLMException(in_the_way(name, str(error))) from error
    fault = _members.header_fault(table, "members")
    if fault:
        raise LLMException(f"{segment.SHM_DIR}/{name}: {fault}; processes of another build live in namespace {namespace!r}")
    return table


def _remove_all(namespace: str) -> None:
    """Nobody lives: table and leftovers of every version go, the life file stays."""
    found = [name for name in segment.names(f"{namespace}.") if name != life_name(namespace)]
    for name in found:
        segment.unlink(name)
    left = [name for name in found if name != table_name(namespace)]
    if left:
        log.info("removed %d files that dead processes left in namespace %r: %s", len(left), namespace, ", ".join(left))


def _start_time() -> int:
    """Clock ticks after boot at which this process started."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
