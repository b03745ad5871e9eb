"""The life of a link's slot as a model: use, unlink, force-unlink, and re-use by a new pair of sides.

The slot lies in the directory of process A, which is side 0 of every link in it. B has linked (serial 1) and
runs two threads. C and D come later and want the same slot; whoever links holds the cold byte. The word is
reduced to FREE or a side here: `model_lock` has the rest of it.

The flags bear no serial. The initiator's is set as long as it has the link; so under a mutex of the process a
call counts itself in, and counts itself out, and the one that leaves nobody behind looks at the link and
closes if it is over and the acceptor's side is closed. A closed handle lets no call in. The acceptor's is a
count of the threads that may use the record: each opens, looks whether the link is the one that it means, and
shuts at once if not, else after its call. So a thread that comes late with an old serial does no harm to those
who use the new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put

A, B, C, D = range(4)
NAMES = "ABCD"
NOBODY = -1
HOLDING = {"look_at_link", "set_hazard", "copy", "lease", "clear_hazard", "remove", "release"}
HAZARDOUS = {"copy", "lease", "clear_hazard"}
LOCKED = {"last_look", "look_at_peer", "close"}
CALLS = {
    A: ("push", "push force_unlink"),
    B: ("pull view", "unlink force_unlink"),
    C: ("pull",),
    D: ("pull",),
}


class Slot(NamedTuple):
    """The shared record."""

    serial: int = 1
    link: str = "LIVE"
    opened: tuple[int, ...] = (0, 1)  # of side 0: how many threads of the acceptor may use it
    initiator: int = B
    hazards: tuple[bool, ...] = (False, False)
    lease: bool = False  # of side 1: a hazard that lasts, here a view
    word: int = NOBODY  # or the side that holds it


class Thread(NamedTuple):
    pc: str = "idle"
    call: str = ""
    serial: int = 0  # of the acceptor: the link that the call means


class Process(NamedTuple):
    """What a process remembers about the link; `users` and `closed` are under its own mutex."""

    threads: tuple[Thread, ...] = (Thread(),)
    alive: bool = True
    mine: int = 0  # of an initiator: serial of the link it has open; 0: none
    users: int = 0
    closed: bool = False
    view: bool = False


class World(NamedTuple):
    slot: Slot = Slot()
    processes: tuple[Process, ...] = ()
    cold: int = NOBODY


Moves = Iterator[tuple[str, World]]


@dataclass(frozen=True)
class LinkModel:
    """Who may run, and mistakes that the model must catch.

    `own_byte_looks_free`: C is B's own process that links again while a call on the removed link still runs.
    The kernel does not show a process its own record locks, so whoever asks must know its own incarnation.
    """

    present: tuple[int, ...] = (A, B, C, D)
    acceptor_acts: bool = True
    reuse_ignores_hazards: bool = False
    reads_hazards_before_flags: bool = False
    acceptor_does_not_look_again: bool = False
    acceptor_opens_by_flag: bool = False
    initiator_closes_under_push: bool = False
    closes_outside_mutex: bool = False
    opens_before_naming: bool = False
    dead_link_stays_live: bool = False
    own_byte_looks_free: bool = False

    def initial(self) -> World:
        out = Thread("out")
        two = (Thread(), Thread())
        processes = (Process(two), Process(two, mine=1), Process((out,)), Process((out,)))
        absent = [process._replace(alive=who in self.present) for who, process in enumerate(processes)]
        return World(processes=tuple(absent))

    @property
    def promises(self) -> tuple[Promise, ...]:
        return (_open_side_keeps_its_record, _hazard_is_not_wiped, _acceptor_uses_its_own_link,
                _word_is_not_reset, _live_link_has_its_initiator, _initiator_sees_hazards)  # fmt: skip

    def steps(self, world: World) -> Moves:
        for who, process in enumerate(world.processes):
            if not process.alive:
                continue
            for index, thread in enumerate(process.threads):
                for what, after in getattr(self, "_" + thread.pc)(world, who, index):
                    yield f"{NAMES[who]}{index}: {what}", after
            if process.view:
                yield f"{NAMES[who]}: view is dropped", _slot(_process(world, who, view=False), lease=False)
            yield f"{FAULT}{NAMES[who]} crashes", self._crash(world, who)

    def _crash(self, world: World, who: int) -> World:
        world = world._replace(cold=NOBODY if world.cold == who else world.cold)
        gone = Process(tuple(Thread("dead") for _ in world.processes[who].threads), alive=False)
        return world._replace(processes=put(world.processes, who, gone))

    # a call on the link

    def _idle(self, world: World, who: int, index: int) -> Moves:
        process, slot = world.processes[who], world.slot
        if who == A:
            for call in CALLS[A][index].split() if self.acceptor_acts and slot.link == "LIVE" else ():
                pc = "force" if call == "force_unlink" else "open_side"
                yield call, _pc(world, A, index, pc, call, slot.serial)
        elif not self._mutex_is_taken(process) and not process.closed:
            counted = _process(world, who, users=process.users + 1)
            for call in CALLS[who][index].split():
                yield call, _pc(counted, who, index, "force" if call == "force_unlink" else "take", call)

    def _open_side(self, world: World, who: int, index: int) -> Moves:
        count = 1 if self.acceptor_opens_by_flag else world.slot.opened[0] + 1
        pc = "take" if self.acceptor_does_not_look_again else "look_again"
        yield "opens its side", _pc(_slot(world, opened=(count, world.slot.opened[1])), who, index, pc)

    def _look_again(self, world: World, who: int, index: int) -> Moves:
        yield "looks again", _pc(world, who, index, "take" if _is_live(world, who, index) else "shut_side")

    def _shut_side(self, world: World, who: int, index: int) -> Moves:
        count = 0 if self.acceptor_opens_by_flag else world.slot.opened[0] - 1
        yield "shuts its side", _pc(_slot(world, opened=(count, world.slot.opened[1])), who, index, "idle")

    def _take(self, world: World, who: int, index: int) -> Moves:
        slot, side = world.slot, _side(who)
        holder = slot.initiator if slot.word == 1 else A
        if slot.word == NOBODY:
            yield "takes", _pc(_slot(world, word=side), who, index, "look_at_link")
        elif not _is_live(world, who, index):
            yield "link is gone", _pc(world, who, index, _after_call(who))
        elif slot.word != side and not world.processes[holder].alive:
            yield "declares BROKEN", _pc(_slot(world, link="BROKEN"), who, index, _after_call(who))

    def _look_at_link(self, world: World, who: int, index: int) -> Moves:
        inside = "remove" if world.processes[who].threads[index].call == "unlink" else "set_hazard"
        yield "looks at the link", _pc(world, who, index, inside if _is_live(world, who, index) else "release")

    def _set_hazard(self, world: World, who: int, index: int) -> Moves:
        yield "sets hazard", _pc(_hazard(world, _side(who), True), who, index, "copy")

    def _copy(self, world: World, who: int, index: int) -> Moves:
        keeps = world.processes[who].threads[index].call == "view" and not world.processes[who].view
        yield "copies", _pc(world, who, index, "lease" if keeps else "clear_hazard")

    def _lease(self, world: World, who: int, index: int) -> Moves:
        yield (
            "sets lease",
            _pc(_slot(_process(world, who, view=True), lease=True), who, index, "clear_hazard"),
        )

    def _clear_hazard(self, world: World, who: int, index: int) -> Moves:
        yield "clears hazard", _pc(_hazard(world, _side(who), False), who, index, "release")

    def _remove(self, world: World, who: int, index: int) -> Moves:
        yield "unlink", _pc(_remove_link(world, who, index), who, index, "release")

    def _force(self, world: World, who: int, index: int) -> Moves:
        yield "force_unlink", _pc(_remove_link(world, who, index), who, index, "idle" if who == A else "leave")

    def _release(self, world: World, who: int, index: int) -> Moves:
        yield "releases", _pc(_slot(world, word=NOBODY), who, index, _after_call(who))

    def _leave(self, world: World, who: int, index: int) -> Moves:
        process = world.processes[who]
        if not self._mutex_is_taken(process):
            pc = "last_look" if process.users == 1 else "idle"
            yield "counts out", _pc(_process(world, who, users=process.users - 1), who, index, pc)

    def _last_look(self, world: World, who: int, index: int) -> Moves:
        over = "close" if self.initiator_closes_under_push else "look_at_peer"
        yield "last look", _pc(world, who, index, "idle" if _is_live(world, who, index) else over)

    def _look_at_peer(self, world: World, who: int, index: int) -> Moves:
        """While the acceptor may name a cache of ours, the record stays among those that we look at."""
        busy = world.processes[A].alive and (world.slot.opened[0] or world.slot.hazards[0])
        yield "looks at the peer's side", _pc(world, who, index, "idle" if busy else "close")

    def _close(self, world: World, who: int, index: int) -> Moves:
        world = _process(_slot(world, opened=(world.slot.opened[0], 0)), who, closed=True)
        yield "closes its side", _pc(world, who, index, "idle")

    def _mutex_is_taken(self, process: Process) -> bool:
        locked = LOCKED - {"last_look", "close"} if self.closes_outside_mutex else LOCKED
        return any(thread.pc in locked for thread in process.threads)

    # linking: everything below is done under the cold byte

    def _out(self, world: World, who: int, index: int) -> Moves:
        if world.cold == NOBODY and world.processes[A].alive:
            yield "takes the cold byte", _pc(world._replace(cold=who), who, index, "read_state")

    def _read_state(self, world: World, who: int, index: int) -> Moves:
        checks = "read_hazards" if self.reads_hazards_before_flags else "read_flags"
        if world.slot.link != "LIVE":
            yield "slot is over", _pc(world, who, index, checks)
        elif self._initiator_lives(world):
            yield "slot is in use", _give_way(world, who)
        elif self.dead_link_stays_live:
            yield "slot is over", _pc(world, who, index, checks)
        else:
            yield "declares BROKEN", _pc(_slot(world, link="BROKEN"), who, index, checks)

    def _read_flags(self, world: World, who: int, index: int) -> Moves:
        """A dead side counts as closed and is closed here; side 0 is the owner of the directory itself."""
        slot = world.slot
        if slot.opened[1] and not self._initiator_lives(world):
            yield "closes for the dead side", _slot(world, opened=(slot.opened[0], 0))
        elif any(slot.opened):
            yield "a side is open", _give_way(world, who)
        else:
            pc = "claim" if self.reads_hazards_before_flags else "read_hazards"
            yield "both sides are closed", _pc(world, who, index, pc)

    def _read_hazards(self, world: World, who: int, index: int) -> Moves:
        slot = world.slot
        owners = slot.hazards[0] and world.processes[A].alive
        initiators = (slot.hazards[1] or slot.lease) and self._initiator_lives(world)
        if (owners or initiators) and not self.reuse_ignores_hazards:
            yield "a hazard is set", _give_way(world, who)
        else:
            pc = "read_flags" if self.reads_hazards_before_flags else "claim"
            yield "no hazard is set", _pc(world, who, index, pc)

    def _initiator_lives(self, world: World) -> bool:
        who = world.slot.initiator
        return world.processes[who].alive and not (self.own_byte_looks_free and who == B)

    def _claim(self, world: World, who: int, index: int) -> Moves:
        yield (
            "claims",
            _pc(_slot(world, link="FREE", serial=world.slot.serial + 1), who, index, "wipe_hazards"),
        )

    def _wipe_hazards(self, world: World, who: int, index: int) -> Moves:
        yield "wipes hazards", _pc(_slot(world, hazards=(False, False), lease=False), who, index, "wipe_word")

    def _wipe_word(self, world: World, who: int, index: int) -> Moves:
        pc = "open_initiator" if self.opens_before_naming else "name_initiator"
        yield "wipes word", _pc(_slot(world, word=NOBODY), who, index, pc)

    def _name_initiator(self, world: World, who: int, index: int) -> Moves:
        pc = "go_live" if self.opens_before_naming else "open_initiator"
        yield "names itself", _pc(_slot(world, initiator=who), who, index, pc)

    def _open_initiator(self, world: World, who: int, index: int) -> Moves:
        pc = "name_initiator" if self.opens_before_naming else "go_live"
        yield "opens its side", _pc(_slot(world, opened=(world.slot.opened[0], 1)), who, index, pc)

    def _go_live(self, world: World, who: int, index: int) -> Moves:
        world = _process(_slot(world, link="LIVE"), who, mine=world.slot.serial)
        yield "goes LIVE", _pc(world._replace(cold=NOBODY), who, index, "idle")


def _side(who: int) -> int:
    return 0 if who == A else 1


def _after_call(who: int) -> str:
    return "shut_side" if who == A else "leave"


def _serial(world: World, who: int, index: int) -> int:
    """Of the link that a thread means."""
    process = world.processes[who]
    return process.threads[index].serial if who == A else process.mine


def _is_live(world: World, who: int, index: int) -> bool:
    return (world.slot.serial, world.slot.link) == (_serial(world, who, index), "LIVE")


def _slot(world: World, **fields: Any) -> World:
    return world._replace(slot=world.slot._replace(**fields))


def _process(world: World, who: int, **fields: Any) -> World:
    return world._replace(processes=put(world.processes, who, world.processes[who]._replace(**fields)))


def _pc(world: World, who: int, index: int, pc: str, call: str = "", serial: int = 0) -> World:
    threads = world.processes[who].threads
    call = "" if pc in ("idle", "leave", "shut_side") else call or threads[index].call
    serial = 0 if pc in ("idle", "shut_side") else serial or threads[index].serial
    return _process(world, who, threads=put(threads, index, Thread(pc, call, serial)))


def _hazard(world: World, side: int, value: bool) -> World:
    return _slot(world, hazards=put(world.slot.hazards, side, value))


def _remove_link(world: World, who: int, index: int) -> World:
    return _slot(world, link="REMOVED") if _is_live(world, who, index) else world


def _give_way(world: World, who: int) -> World:
    return _pc(world._replace(cold=NOBODY), who, 0, "out")


def _open_side_keeps_its_record(world: World) -> bool:
    """While an initiator lives and has not closed its side, the slot is the link that it made."""
    return all(
        world.slot.serial == process.mine and world.slot.opened[1] and world.slot.initiator == who
        for who, process in enumerate(world.processes)
        if who != A and process.alive and process.mine and not process.closed
    )


def _hazard_is_not_wiped(world: World) -> bool:
    """A hazard or lease that a living side set stands until that side clears it, whatever becomes of the
    link."""
    for who, process in enumerate(world.processes):
        if process.view and not (world.slot.lease and world.slot.initiator == who):
            return False
        if any(thread.pc in HAZARDOUS for thread in process.threads) and not world.slot.hazards[_side(who)]:
            return False
    return True


def _acceptor_uses_its_own_link(world: World) -> bool:
    """While a call of the acceptor holds the word, its side is open and the slot is the link that it
    looked up."""
    slot = world.slot
    return all(slot.opened[0] and slot.serial == thread.serial
               for thread in world.processes[A].threads if thread.pc in HOLDING)  # fmt: skip


def _word_is_not_reset(world: World) -> bool:
    """The word names a living holder from its take to its release: nobody else resets it."""
    return all(world.slot.word == _side(who) for who, process in enumerate(world.processes)
               if any(thread.pc in HOLDING for thread in process.threads))  # fmt: skip


def _live_link_has_its_initiator(world: World) -> bool:
    """A LIVE link has its initiator's side open, dead or not."""
    return world.slot.link != "LIVE" or world.slot.opened[1]


def _initiator_sees_hazards(world: World) -> bool:
    """While a call of the acceptor may write into a cache of the initiator that it linked with, this one, if it
    lives, still looks at the record before it frees any."""
    for thread in world.processes[A].threads:
        if thread.pc in HAZARDOUS:
            for process in world.processes[B:]:
                if process.alive and process.mine == thread.serial and process.closed:
                    return False
    return True


def slot_serves(world: World) -> bool:
    """The slot is a link between the living, or nobody is left who wants one."""
    linked = world.slot.link == "LIVE" and world.processes[world.slot.initiator].alive
    wanted = any(process.alive and not process.mine for process in world.processes[C:])
    return linked or not wanted or not world.processes[A].alive
