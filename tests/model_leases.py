"""Views and forks as a model: a lease that outlives the call, its link and perhaps its holder, in a record that others want.

The owner deallocates its one cache, scans the record's hazard and lease, and gives the memory on, by its name (the segment is used
again) or without (it is unlinked). A has a link, looks at a row or forks it, may remove the link meanwhile and closes what it holds
whenever it likes. B wants the record; under the cold lock it takes one that is closed and idle, or clears the side of a dead A, and
then lends the same cache by the same lease. Who sweeps removes the name of a dead owner's segment.

What is lent is read by whoever holds it, at any moment: there is no step for that, the promises look at the memory instead. A fork
is a private mapping of the same pages, which are the owner's until they are written, and is made through the segment's name.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put

A, B = range(2)
NAMES = "AB"
NOBODY = -1


class Record(NamedTuple):
    """The link's record, as far as its initiator's side goes."""

    serial: int = 1
    link: str = "LIVE"
    initiator: int = A
    open: bool = True
    hazard: bool = False
    lease: int = NOBODY                 # whose it is, which nobody can see there; for the promises


class Holder(NamedTuple):
    pc: str
    serial: int = 0                     # of its link
    runs: bool = True
    life: bool = True
    unlinked: bool = False
    lent: bool = False                  # it may read the memory, by what it has opened
    told: str = ""


class Loans(NamedTuple):
    owner: str = "keep"
    owner_alive: bool = True
    cache: str = "LIVE"
    tenant: int = 1                     # whose bytes are in the memory
    named: bool = True                  # the segment has its name
    scanned: tuple[bool, ...] = ()
    record: Record = Record()
    holders: tuple[Holder, ...] = (Holder("find", serial=1), Holder("claim"))


Moves = Iterator[tuple[str, Loans]]


@dataclass(frozen=True)
class LeaseModel:
    """`forks`: what is lent is forked. `lost_life_bytes`: A may be taken for dead while it holds something, and run on; what it
    looks at may change then, but nobody else's lease may go by it. The other switches are mistakes to be caught.

    `ends_in_two_steps`: between the look whether the link is still its own and the store that ends the lease, others come in. It is
    off where a life byte may be lost, for a store that is on its way then cannot be taken back:
    `test_a_store_on_its_way_when_a_life_byte_is_lost_can_end_anothers_lease`.
    """

    forks: bool = False
    lost_life_bytes: bool = False
    ends_in_two_steps: bool = True

    clears_hazard_before_lease: bool = False
    scans_leases_first: bool = False
    scans_before_retiring: bool = False
    owner_ignores_leases: bool = False
    word_is_not_read_again: bool = False
    claims_over_a_lease: bool = False
    late_end_does_not_look: bool = False
    ends_before_the_last_look: bool = False
    dead_leases_count: bool = False

    def initial(self) -> Loans:
        return Loans()

    @property
    def promises(self) -> tuple[Promise, ...]:
        return _what_is_lent_stays, _leases_are_their_holders, _name_stands_under_a_lease

    def steps(self, loans: Loans) -> Moves:
        if loans.owner_alive and loans.owner != "done":
            for what, after in getattr(self, "_owner_" + loans.owner)(loans):
                yield f"owner: {what}", after
        if loans.owner_alive:
            yield f"{FAULT}owner crashes", loans._replace(owner_alive=False)
        elif loans.named:
            yield "sweeper: removes the dead owner's segment", loans._replace(named=False)
        for who, holder in enumerate(loans.holders):
            if not holder.runs:
                continue
            for what, after in getattr(self, "_" + holder.pc)(loans, who) if not holder.told else ():
                yield f"{NAMES[who]}: {what}", after
            if who == A and holder.lent and not holder.unlinked:
                yield "A: removes its link", self._unlink(loans)
            yield f"{FAULT}{NAMES[who]} crashes", _holder(loans, who, runs=False, life=False, lent=False)
            if self.lost_life_bytes and who == A and holder.life and holder.pc in ("hold", "give"):
                yield f"{FAULT}A loses its life byte", _holder(loans, A, life=False)

    # the owner

    def _owner_keep(self, loans: Loans) -> Moves:
        """The id reference goes; no key is left."""
        yield "retires", loans._replace(cache=loans.cache if self.scans_before_retiring else "RETIRED", owner="scan")

    def _owner_scan(self, loans: Loans) -> Moves:
        """Hazard, then lease, each with a load of its own; then, if one stands, whether its side lives."""
        marks = [loans.record.hazard, loans.record.lease != NOBODY and not self.owner_ignores_leases]
        if self.scans_leases_first:
            marks.reverse()
        if len(loans.scanned) == len(marks):
            yield "nobody names it", loans._replace(scanned=(), owner="free")
        elif marks[len(loans.scanned)]:
            yield "a mark names it", loans._replace(scanned=(), owner="look_at_life")
        else:
            yield "a mark is clear", loans._replace(scanned=(*loans.scanned, False))

    def _owner_look_at_life(self, loans: Loans) -> Moves:
        if loans.holders[loans.record.initiator].life or self.dead_leases_count:
            yield "the side lives", loans._replace(owner="keep" if self.scans_before_retiring else "scan")
        else:
            yield "the side is dead", loans._replace(owner="free")

    def _owner_free(self, loans: Loans) -> Moves:
        freed = loans._replace(cache="FREE")
        yield "recycles", freed._replace(owner="fill")
        yield "unlinks", freed._replace(named=False, owner="done")

    def _owner_fill(self, loans: Loans) -> Moves:
        yield "writes the memory", loans._replace(tenant=2, owner="done")

    # who looks at a row

    def _find(self, loans: Loans, who: int) -> Moves:
        if _link_is(loans, who, "LIVE") and loans.cache == "LIVE":
            yield "finds the cache", _holder(loans, who, pc="set_hazard")
        else:
            yield "finds no cache", _holder(loans, who, told="not_there")

    def _set_hazard(self, loans: Loans, who: int) -> Moves:
        after = "attach" if self.word_is_not_read_again else "look_again"
        yield "sets hazard", _record(_holder(loans, who, pc=after), hazard=True)

    def _look_again(self, loans: Loans, who: int) -> Moves:
        if loans.cache == "LIVE":
            yield "looks again", _holder(loans, who, pc="attach")
        else:
            yield "has to give up", _record(_holder(loans, who, told="not_there"), hazard=False)

    def _attach(self, loans: Loans, who: int) -> Moves:
        """Only the first time does this need the name; a mapping of before does not show that somebody removed it."""
        after = "unpin" if self.clears_hazard_before_lease else "lease"
        yield "attaches", _holder(loans, who, pc=after)
        if not loans.named:
            yield "finds no segment", _record(_holder(loans, who, told="gone"), hazard=False)

    def _lease(self, loans: Loans, who: int) -> Moves:
        taken = _record(loans, lease=who)
        yield "takes a lease", self._lend(taken, who) if self.clears_hazard_before_lease else _holder(taken, who, pc="unpin")

    def _unpin(self, loans: Loans, who: int) -> Moves:
        cleared = _record(loans, hazard=False)
        yield "clears hazard", _holder(cleared, who, pc="lease") if self.clears_hazard_before_lease else self._lend(cleared, who)

    def _lend(self, loans: Loans, who: int) -> Loans:
        """The call is over, or a fork has still to be mapped."""
        return _holder(loans, who, pc="map") if self.forks else _holder(loans, who, pc="hold", lent=True)

    def _map(self, loans: Loans, who: int) -> Moves:
        if loans.named:
            yield "forks the segment", _holder(loans, who, pc="hold", lent=True)
        else:
            yield "finds nothing to fork", _holder(loans, who, pc="look_at_link")

    def _hold(self, loans: Loans, who: int) -> Moves:
        """Closes whenever it likes."""
        lent = self.ends_before_the_last_look
        yield "closes", _holder(loans, who, pc="look_at_link", lent=lent)

    def _look_at_link(self, loans: Loans, who: int) -> Moves:
        """Its lease is in a record that it may not have any more, if it was taken for dead."""
        if loans.record.serial != loans.holders[who].serial and not self.late_end_does_not_look:
            yield "finds the record another's", _holder(loans, who, told="over", lent=False)
        elif self.ends_in_two_steps:
            yield "finds the record its own", _holder(loans, who, pc="give")
        else:
            yield "gives its lease back", self._given(loans, who)

    def _give(self, loans: Loans, who: int) -> Moves:
        given = self._given(loans, who)
        yield "gives its lease back", _holder(given, who, pc="stop_looking", told="") if self.ends_before_the_last_look else given

    def _stop_looking(self, loans: Loans, who: int) -> Moves:
        yield "looks for the last time", _holder(loans, who, told="over", lent=False)

    @staticmethod
    def _given(loans: Loans, who: int) -> Loans:
        return _holder(_record(loans, lease=NOBODY), who, told="over")

    @staticmethod
    def _unlink(loans: Loans) -> Loans:
        """Nobody is in the link: its side is closed at once. What is lent stays. A record that is another's is left alone."""
        after = _holder(loans, A, unlinked=True)
        return _record(after, link="REMOVED", open=False) if _link_is(loans, A, "LIVE", "BROKEN") else after

    # who wants the record, under the cold lock

    def _claim(self, loans: Loans, who: int) -> Moves:
        """Without an owner there is nobody to link to."""
        lives, record = loans.holders[A].life, loans.record
        is_idle = not record.hazard and record.lease == NOBODY
        if not loans.owner_alive:
            yield "finds nobody to link to", _holder(loans, who, told="not_there")
        elif lives and not record.open and (is_idle or self.claims_over_a_lease):
            yield "claims a closed record", _holder(loans, who, pc="name")
        elif not lives:
            yield "ends a dead one's link", _record(_holder(loans, who, pc="clear_leases"), link="BROKEN")

    def _clear_leases(self, loans: Loans, who: int) -> Moves:
        yield "clears the dead one's leases", _record(_holder(loans, who, pc="clear_hazard"), lease=NOBODY)

    def _clear_hazard(self, loans: Loans, who: int) -> Moves:
        yield "clears the dead one's hazard", _record(_holder(loans, who, pc="name"), hazard=False, open=False)

    def _name(self, loans: Loans, who: int) -> Moves:
        serial = loans.record.serial + 1
        yield "starts a new serial", _record(_holder(loans, who, pc="open_side", serial=serial), serial=serial, link="FREE")

    def _open_side(self, loans: Loans, who: int) -> Moves:
        yield "names itself and opens its side", _record(_holder(loans, who, pc="go_live"), initiator=who, open=True)

    def _go_live(self, loans: Loans, who: int) -> Moves:
        yield "goes LIVE", _record(_holder(loans, who, pc="find"), link="LIVE")


def _holder(loans: Loans, who: int, **fields: Any) -> Loans:
    return loans._replace(holders=put(loans.holders, who, loans.holders[who]._replace(**fields)))


def _record(loans: Loans, **fields: Any) -> Loans:
    return loans._replace(record=loans.record._replace(**fields))


def _link_is(loans: Loans, who: int, *states: str) -> bool:
    return loans.record.serial == loans.holders[who].serial and loans.record.link in states


def _what_is_lent_stays(loans: Loans) -> bool:
    """As long as a living holder can read what it was lent, the memory is not another cache's."""
    return loans.tenant == 1 or not any(holder.lent and holder.life for holder in loans.holders)


def _leases_are_their_holders(loans: Loans) -> bool:
    """A living holder's lease stands until it gives it back itself, whoever had the record before."""
    return all(loans.record.lease == who for who, holder in enumerate(loans.holders) if holder.lent and holder.life)


def _name_stands_under_a_lease(loans: Loans) -> bool:
    """A living owner's segment that a living holder has leased has its name, so that it can be forked."""
    return loans.named or not loans.owner_alive or not any(
        holder.life and (holder.lent or holder.pc == "map") for holder in loans.holders)


def memory_is_given_on(loans: Loans) -> bool:
    """The owner got its memory back, or is dead."""
    return loans.owner == "done" or not loans.owner_alive


def all_have_ended(loans: Loans) -> bool:
    """Whoever runs was told how it ended; who found no record in the table takes one elsewhere."""
    return all(holder.told or not holder.runs or holder.pc == "claim" for holder in loans.holders)
