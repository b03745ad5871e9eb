"""Join, sweep and leave as a model: the life file, the members table and the segments of a namespace.

Names in /dev/shm are what is shared: a name can be unlinked while a process still has the old file open, so
the life file and the table carry a number (the inode) here. The kernel's record locks need no state of their
own: a living process holds the cold byte (`cold`) and its slot's byte (`slot`) on the inode that it opened.

Each layout version has a table of its own and, in the one life file, a range of bytes of its own: a process
that took byte n of another version's member would make that member's record pass for alive as long as it
runs.

Everything from `compare_inodes` up to the end of a join, leave or sweep is done under the cold byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put

NOBODY = -1
SLOTS = 2
VERSIONS = 2
SEGMENTS = 2  # of each member: its directory and one cache

ENDED = {"left", "refused", "swept"}
WHOLE = {"joined", "wait_to_leave"}
#: From here to its own unlinking, a member's record must stand.
RECORDED = WHOLE | {"create", "unlink_own"}


class Member(NamedTuple):
    """One process; its index is its incarnation."""

    cluster: int
    pc: str = "open_life_file"
    version: int = 0
    inode: int = 0  # of the life file that it has open
    cold: bool = False
    slot: int = NOBODY
    table: int = 0  # number of the table that it has mapped
    seen: tuple[int, ...] = ()  # the sweeper's: slots that seemed dead before it had the cold byte
    step: int = 0
    alive: bool = True


#: Does not join: `shmkv gc`.
SWEEPER = Member(NOBODY, "scan")


class Table(NamedTuple):
    number: int
    records: tuple[int, ...] = (NOBODY,) * SLOTS


class Space(NamedTuple):
    life: int = 0  # inode under the name of the life file, 0: no such name
    inodes: int = 0  # how many there were so far
    tables: tuple[Table | None, ...] = (None,) * VERSIONS
    made: int = 0  # how many tables there were so far
    segments: frozenset[tuple[int, int]] = frozenset()  # (incarnation, which)
    members: tuple[Member, ...] = ()


Moves = Iterator[tuple[str, Space]]


@dataclass(frozen=True)
class MembersModel:
    """These processes join, leave and sweep at any time. The switches are mistakes to be caught."""

    processes: tuple[Member, ...] = (Member(1), Member(1), Member(2))
    inodes_are_not_compared: bool = False
    life_file_goes_before_table: bool = False
    sweeper_does_not_look_again: bool = False
    record_is_overwritten_unswept: bool = False
    last_leaver_does_not_sweep: bool = False
    versions_share_bytes: bool = False
    cold_byte_is_dropped_before_join: bool = False

    def initial(self) -> Space:
        return Space(members=self.processes)

    @property
    def promises(self) -> tuple[Promise, ...]:
        return (_record_stands, _segments_stand, _one_slot_each, _one_life_file, _one_cluster_id_each,
                self._dead_do_not_pass_for_alive, _no_segment_without_record,
                _nothing_remains_without_life_file)  # fmt: skip

    def steps(self, space: Space) -> Moves:
        for index, member in enumerate(space.members):
            if member.alive and member.pc not in ENDED:
                for what, after in getattr(self, "_" + member.pc)(space, index):
                    yield f"{index}: {what}", after
                dead = Member(member.cluster, "dead", member.version, alive=False)
                yield f"{FAULT}{index} crashes", space._replace(members=put(space.members, index, dead))

    # the way in, the same for all

    def _open_life_file(self, space: Space, index: int) -> Moves:
        if not space.life:
            space = space._replace(life=space.inodes + 1, inodes=space.inodes + 1)
        yield "opens life file", _member(space, index, pc="take_cold_byte", inode=space.life)

    def _take_cold_byte(self, space: Space, index: int) -> Moves:
        if not _cold_is_held(space, space.members[index].inode):
            yield "takes cold byte", _member(space, index, pc="compare_inodes", cold=True)

    def _compare_inodes(self, space: Space, index: int) -> Moves:
        if space.members[index].inode == space.life or self.inodes_are_not_compared:
            yield "same inode", _member(space, index, pc="is_anybody_alive")
        else:
            yield "starts again", _member(space, index, pc="open_life_file", inode=0, cold=False)

    def _is_anybody_alive(self, space: Space, index: int) -> Moves:
        """A held byte, of whatever version, means that tables may be read. Otherwise all leftovers go."""
        me = space.members[index]
        if not _anybody_lives(space, index):
            yield "nobody lives", _member(space, index, pc="purge")
        elif me.cluster == NOBODY:
            yield "somebody lives", _member(space, index, pc="sweep_seen")
        elif table := space.tables[me.version]:
            yield "somebody lives", _member(space, index, pc="check_cluster_id", table=table.number)
        else:
            yield "first of its version", _member(space, index, pc="create_table")

    def _purge(self, space: Space, index: int) -> Moves:
        """Under the cold byte with no life byte held: all that has the namespace's prefix goes, by
        listing; the segments first, the tables that name them next."""
        me = space.members[index]
        joins = me.cluster != NOBODY and me.pc == "purge"
        if space.segments:
            yield "purges a segment", _unlink(space, min(space.segments))
        elif not joins and self.life_file_goes_before_table and space.life:
            yield "unlinks life file early", space._replace(life=0)
        elif any(space.tables):
            version = [bool(table) for table in space.tables].index(True)
            yield "purges a table", space._replace(tables=put(space.tables, version, None))
        else:
            yield "purged", _member(space, index, pc="create_table" if joins else "unlink_life_file")

    # join

    def _create_table(self, space: Space, index: int) -> Moves:
        number, version = space.made + 1, space.members[index].version
        space = space._replace(tables=put(space.tables, version, Table(number)), made=number)
        if self.cold_byte_is_dropped_before_join:
            yield "creates table", _member(space, index, pc="take_cold_byte_again", table=number, cold=False)
        else:
            yield "creates table", _member(space, index, pc="take_life_byte", table=number)

    def _take_cold_byte_again(self, space: Space, index: int) -> Moves:
        if not _cold_is_held(space, space.members[index].inode):
            yield "takes cold byte again", _member(space, index, pc="check_cluster_id", cold=True)

    def _check_cluster_id(self, space: Space, index: int) -> Moves:
        """Refuse only for a living namesake: a dead one's record is nobody's."""
        me = space.members[index]
        records = [_record(space, me.version, slot) for slot in self._living_slots(space, index)]
        if any(record != NOBODY and space.members[record].cluster == me.cluster for record in records):
            yield "cluster_id is taken", _end(space, index, "refused")
        else:
            yield "cluster_id is free", _member(space, index, pc="take_life_byte")

    def _take_life_byte(self, space: Space, index: int) -> Moves:
        free = set(range(SLOTS)).difference(self._living_slots(space, index))
        for slot in sorted(free):
            yield f"takes byte {slot}", _member(space, index, pc="sweep_slot", slot=slot)
        if not free:
            yield "namespace is full", _end(space, index, "refused")

    def _sweep_slot(self, space: Space, index: int) -> Moves:
        """The slot's old record stays until its last segment is gone, so a crash in between loses nothing."""
        me = space.members[index]
        former = _record(space, me.version, me.slot)
        left = [] if self.record_is_overwritten_unswept else _segments_of(space, former)
        if left:
            yield f"unlinks a segment of {former}", _unlink(space, left[0])
        else:
            yield "slot is swept", _member(space, index, pc="record")

    def _record(self, space: Space, index: int) -> Moves:
        space = _write(space, index, space.members[index].slot, index)
        yield "records", _member(space, index, pc="create")

    def _create(self, space: Space, index: int) -> Moves:
        step = space.members[index].step
        if step < SEGMENTS:
            space = space._replace(segments=space.segments | {(index, step)})
            yield "creates a segment", _member(space, index, step=step + 1)
        else:
            yield "joined", _member(space, index, pc="joined", cold=False, step=0)

    # leave

    def _joined(self, space: Space, index: int) -> Moves:
        yield "wants to leave", _member(space, index, pc="wait_to_leave")

    def _wait_to_leave(self, space: Space, index: int) -> Moves:
        if not _cold_is_held(space, space.members[index].inode):
            yield "takes cold byte", _member(space, index, pc="unlink_own", cold=True)

    def _unlink_own(self, space: Space, index: int) -> Moves:
        if left := _segments_of(space, index):
            yield "unlinks its segment", _unlink(space, left[0])
        else:
            yield "own segments are gone", _member(space, index, pc="clear_record")

    def _clear_record(self, space: Space, index: int) -> Moves:
        space = _write(space, index, space.members[index].slot, NOBODY)
        yield "clears record", _member(space, index, pc="drop_life_byte")

    def _drop_life_byte(self, space: Space, index: int) -> Moves:
        yield "drops life byte", _member(space, index, pc="is_it_the_last", slot=NOBODY)

    def _is_it_the_last(self, space: Space, index: int) -> Moves:
        if _anybody_lives(space, index):
            yield "others live", _end(space, index, "left")
        elif self.last_leaver_does_not_sweep:
            tables: tuple[Table | None, ...] = (None,) * VERSIONS
            yield "is the last", _member(space._replace(tables=tables), index, pc="unlink_life_file")
        else:
            yield "is the last", _member(space, index, pc="purge_and_end")

    def _purge_and_end(self, space: Space, index: int) -> Moves:
        """Killed members left segments behind; their records go with the table, so the segments go first."""
        return self._purge(space, index)

    def _unlink_life_file(self, space: Space, index: int) -> Moves:
        """The last name to go: as long as it stands, whoever comes waits for the cold byte."""
        life = space.life if self.life_file_goes_before_table else 0
        yield "unlinks life file", _end(space._replace(life=life), index, "left")

    # sweep

    def _scan(self, space: Space, index: int) -> Moves:
        """Without the cold byte, so only a hint: which slots seem dead."""
        dead = set(range(SLOTS)).difference(self._living_slots(space, index))
        seen = [slot for slot in sorted(dead) if _record(space, space.members[index].version, slot) != NOBODY]
        yield "scans", _member(space, index, pc="open_life_file", seen=tuple(seen))

    def _sweep_seen(self, space: Space, index: int) -> Moves:
        """Look at the life byte again, now under the cold byte: only then is the record a dead one's."""
        seen, version = space.members[index].seen, space.members[index].version
        if not seen:
            yield "swept", _end(space, index, "swept")
        elif seen[0] in self._living_slots(space, index) and not self.sweeper_does_not_look_again:
            yield "lives after all", _member(space, index, seen=seen[1:])
        elif left := _segments_of(space, _record(space, version, seen[0])):
            yield "sweeps a segment", _unlink(space, left[0])
        else:
            yield "clears a record", _member(_write(space, index, seen[0], NOBODY), index, seen=seen[1:])

    # life bytes

    def _is_byte_of(self, member: Member, version: int) -> bool:
        """Does this member's life byte stand for a slot of that version's table."""
        return member.slot != NOBODY and (member.version == version or self.versions_share_bytes)

    def _living_slots(self, space: Space, index: int) -> list[int]:
        """Slots of the own version's table whose byte somebody else holds, on the life file as opened."""
        me = space.members[index]
        inode = me.inode or space.life
        return [
            member.slot
            for who, member in enumerate(space.members)
            if who != index and self._is_byte_of(member, me.version) and member.inode == inode
        ]

    def _dead_do_not_pass_for_alive(self, space: Space) -> bool:
        """Once a join is over, no dead member passes for alive: nobody holds the byte of a slot that names
        it."""
        return all(
            _record(space, version, member.slot) in (who, NOBODY)
            for who, member in enumerate(space.members)
            for version in range(VERSIONS)
            if member.pc in WHOLE and self._is_byte_of(member, version)
        )


def _member(space: Space, index: int, **fields: Any) -> Space:
    return space._replace(members=put(space.members, index, space.members[index]._replace(**fields)))


def _end(space: Space, index: int, pc: str) -> Space:
    """Drops what it still holds and forgets the file."""
    me = space.members[index]
    return space._replace(members=put(space.members, index, Member(me.cluster, pc, me.version)))


def _cold_is_held(space: Space, inode: int) -> bool:
    return any(member.cold and member.inode == inode for member in space.members)


def _anybody_lives(space: Space, index: int) -> bool:
    """Does somebody else hold a life byte, of whatever version: one question for the whole range of bytes."""
    inode = space.members[index].inode
    return any(member.slot != NOBODY and member.inode == inode
               for who, member in enumerate(space.members) if who != index)  # fmt: skip


def _record(space: Space, version: int, slot: int) -> int:
    table = space.tables[version]
    return table.records[slot] if table else NOBODY


def _write(space: Space, index: int, slot: int, incarnation: int) -> Space:
    """Writes a record of the table that has the name now; that it is the mapped one is a promise."""
    version = space.members[index].version
    table = space.tables[version]
    if not table:
        return space
    table = table._replace(records=put(table.records, slot, incarnation))
    return space._replace(tables=put(space.tables, version, table))


def _segments_of(space: Space, incarnation: int) -> list[tuple[int, int]]:
    return sorted(segment for segment in space.segments if segment[0] == incarnation)


def _unlink(space: Space, segment: tuple[int, int]) -> Space:
    return space._replace(segments=space.segments - {segment})


def _record_stands(space: Space) -> bool:
    """A living member's record stands in the table that has the name, until the member itself clears it."""
    for index, member in enumerate(space.members):
        if member.pc in RECORDED:
            table = space.tables[member.version]
            if table is None or table.number != member.table or table.records[member.slot] != index:
                return False
    return True


def _segments_stand(space: Space) -> bool:
    """A living member's segments stand, until the member itself unlinks them."""
    return all((index, which) in space.segments for index, member in enumerate(space.members)
               if member.pc in WHOLE for which in range(SEGMENTS))  # fmt: skip


def _one_slot_each(space: Space) -> bool:
    """No life byte is held twice."""
    held = [(member.inode, member.version, member.slot) for member in space.members if member.slot != NOBODY]
    return len(held) == len(set(held))


def _one_life_file(space: Space) -> bool:
    """All living members use one life file, and it is the one that has the name."""
    return all(member.inode == space.life for member in space.members if member.slot != NOBODY)


def _one_cluster_id_each(space: Space) -> bool:
    """No two living members of one version have one cluster_id; those of two versions never meet."""
    clusters = [(member.version, member.cluster) for member in space.members if member.pc in RECORDED]
    return len(clusters) == len(set(clusters))


def _no_segment_without_record(space: Space) -> bool:
    """While anybody lives, every segment is of an incarnation that a table names, so that a sweep finds
    it: a join or a sweep that is over left nothing of the dead whose records it took."""
    if all(member.slot == NOBODY for member in space.members):
        return True
    named = {record for table in space.tables if table for record in table.records}
    return all(owner in named for owner, _ in space.segments)


def _nothing_remains_without_life_file(space: Space) -> bool:
    """Once the life file has no name, neither a table nor any segment has one: a last leave or a sweep with
    nobody alive leaves nothing behind."""
    return space.life != 0 or not (any(space.tables) or space.segments)


def all_have_ended(space: Space) -> bool:
    """Every process that was not killed has joined and left, was refused, or has swept."""
    return all(member.pc in ENDED or not member.alive for member in space.members)
