"""The two-sided lock word of a link as a model: acquire, offer, release, give up, and the dead holder.

The word names a side, never a process. FREE, HELD_x, OFFERED_x, and the WAITERS bit, which always belongs to
the side that the word does *not* name: HELD_0|WAITERS means that side 1 waits, OFFERED_0|WAITERS that the
word is kept for side 0 and side 1 waits behind it. FREE never carries the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put

FREE, HELD_0, HELD_1, OFFERED_0, OFFERED_1 = range(5)
WAITERS = 8
NOTHING = -1

ACQUIRING = {"look", "look_twice", "take", "mark", "wait", "asleep", "after_slice", "look_at_life",
             "declare_broken", "give_up", "resolve"}  # fmt: skip
HOLDING = {"look_at_link", "inside", "release", "release_to_other"}


def held(side: int) -> int:
    return HELD_0 + side


def offered(side: int) -> int:
    return OFFERED_0 + side


class Side(NamedTuple):
    """The thread at the head of one side's queue (the queue makes it the only one that touches the word)."""

    pc: str = "idle"
    calls: int = 2
    unlinks: bool = False  # this call is an ordered unlink, else a pull
    seen: int = FREE  # the word as this side last read it
    waited: int = NOTHING  # the value on which it slept a whole slice in this call
    answer: str = ""  # why it gives up: "timeout" or "gone"
    marked: bool = False  # for the promises: its WAITERS bit was set in this call
    overtaken: int = 0  # for the promises: how often the other side took the word since the mark
    mode: str = "runs"  # or "stopped" (never scheduled again) or "dead"
    life: bool = True  # is the life byte held


class Lock(NamedTuple):
    word: int
    link: str
    sides: tuple[Side, ...]
    unlinked: bool = False  # for the promises: an ordered unlink was done under the word


Moves = Iterator[tuple[str, Lock]]


@dataclass(frozen=True)
class LockModel:
    """Two sides take and release one word. The switches from `releaser_ignores_offer` on are mistakes to be
    caught.

    `prompt`: steps take no time, so a slice only passes when nobody who is awake has anything else to do.
    That is the world in which an awake waiter must never be overtaken and every call must end. Without it any
    process may be arbitrarily slow, which covers being stopped and continued.
    """

    calls: int = 2
    prompt: bool = False
    deadlines: bool = True
    faults: frozenset[str] = frozenset({"crashes", "loses its life byte"})
    releaser_ignores_offer: bool = False
    reads_word_twice: bool = False
    release_by_exchange: bool = False
    takes_dead_holders_lock: bool = False
    leaves_mark_behind: bool = False
    forgets_link_after_take: bool = False

    def initial(self) -> Lock:
        return Lock(FREE, "LIVE", (Side(calls=self.calls), Side(calls=self.calls)))

    @property
    def promises(self) -> tuple[Promise, ...]:
        always = (_one_holder, _word_names_holder, _word_is_known, _broken_needs_a_death, _gone_is_true,
                  _offer_finds_a_taker, _mark_has_a_waiter, _nobody_sleeps_on_its_own_word,
                  _nobody_inside_after_unlink, _word_is_free_at_rest)  # fmt: skip
        return (*always, _awake_is_not_overtaken) if self.prompt else always

    def steps(self, lock: Lock) -> Moves:
        for side, me in enumerate(lock.sides):
            if me.mode == "runs" and not _finished(me):
                for what, after in getattr(self, "_" + me.pc)(lock, side):
                    yield f"side {side}: {what}", after
                yield from self._faults(lock, side)

    def _faults(self, lock: Lock, side: int) -> Moves:
        if "crashes" in self.faults:
            yield f"{FAULT}side {side} crashes", _set(lock, side, mode="dead", life=False)
        if "stops" in self.faults:
            yield f"{FAULT}side {side} stops", _set(lock, side, mode="stopped")
        if "loses its life byte" in self.faults and lock.sides[side].life:
            yield f"{FAULT}side {side} loses its life byte", _set(lock, side, life=False)

    # acquire

    def _idle(self, lock: Lock, side: int) -> Moves:
        if lock.link != "LIVE":
            yield "call answers gone", _finish(lock, side)
            return
        yield "call", _set(lock, side, pc="look")
        yield "call unlink", _set(lock, side, pc="look", unlinks=True)
        yield "call force_unlink", _finish(lock._replace(link="REMOVED"), side)

    def _look(self, lock: Lock, side: int) -> Moves:
        me, other, value = lock.sides[side], 1 - side, lock.word & ~WAITERS
        slice_passed = me.waited == lock.word or self.releaser_ignores_offer
        if value in (FREE, offered(side)) or (value == offered(other) and slice_passed):
            pc = "take"
        elif value == held(side):
            pc = "lost"
        elif self.reads_word_twice:
            pc = "look_twice"
        else:
            pc = "wait" if lock.word & WAITERS else "mark"
        yield pc, _set(lock, side, pc=pc, seen=lock.word)

    def _look_twice(self, lock: Lock, side: int) -> Moves:
        pc = "look" if lock.word == FREE else "wait" if lock.word & WAITERS else "mark"
        yield pc, _set(lock, side, pc=pc, seen=lock.word)

    def _take(self, lock: Lock, side: int) -> Moves:
        """CAS FREE, OFFERED_me or, after a slice, OFFERED_other to HELD_me. Only with OFFERED_me the bit
        is the other side's and stays; with OFFERED_other it is this side's own and goes."""
        me = lock.sides[side]
        if lock.word != me.seen:
            yield "take fails", _set(lock, side, pc="give_up" if me.answer else "look")
            return
        bit = me.seen & WAITERS if me.seen & ~WAITERS == offered(side) else 0
        lock = _count_overtaking(lock, 1 - side)._replace(word=held(side) | bit)
        yield (
            "takes",
            _set(
                lock, side, pc="look_at_link", seen=FREE, waited=NOTHING, answer="", marked=False, overtaken=0
            ),
        )

    def _mark(self, lock: Lock, side: int) -> Moves:
        seen = lock.sides[side].seen
        if lock.word == seen:
            marked = lock._replace(word=seen | WAITERS)
            ahead = -1 if seen == offered(1 - side) else 0  # an offer made before the mark goes first
            yield (
                "marks",
                _set(
                    marked,
                    side,
                    pc="wait",
                    seen=seen | WAITERS,
                    marked=self.prompt,
                    overtaken=ahead * self.prompt,
                ),
            )
        else:
            yield "mark fails", _set(lock, side, pc="look")

    def _wait(self, lock: Lock, side: int) -> Moves:
        """FUTEX_WAIT on exactly the value that was judged; the kernel compares and puts to sleep in one
        step."""
        asleep = lock.word == lock.sides[side].seen
        yield "waits", _set(lock, side, pc="asleep" if asleep else "look")

    def _asleep(self, lock: Lock, side: int) -> Moves:
        other = lock.sides[1 - side]
        busy = other.mode == "runs" and not _finished(other) and other.pc != "asleep"
        if not (self.prompt and busy):
            yield "slice passes", _set(lock, side, pc="after_slice", waited=lock.sides[side].seen)

    def _after_slice(self, lock: Lock, side: int) -> Moves:
        if lock.link == "LIVE":
            yield "link is LIVE", _set(lock, side, pc="look_at_life")
        else:
            yield "link is gone", _set(lock, side, pc="give_up", answer="gone")

    def _look_at_life(self, lock: Lock, side: int) -> Moves:
        if not lock.sides[1 - side].life:
            yield "sees a death", _set(lock, side, pc="declare_broken")
            return
        yield "goes on", _set(lock, side, pc="look")
        if self.deadlines:
            yield "deadline", _set(lock, side, pc="give_up", answer="timeout")

    def _declare_broken(self, lock: Lock, side: int) -> Moves:
        if self.takes_dead_holders_lock:
            yield "takes it over", _set(lock._replace(word=held(side)), side, pc="inside")
            return
        link = "BROKEN" if lock.link == "LIVE" else lock.link
        yield "declares BROKEN", _set(lock._replace(link=link), side, pc="give_up", answer="gone")

    def _give_up(self, lock: Lock, side: int) -> Moves:
        """What of this side still stands in the word: a mark, an offer, or nothing. An offer that came in
        time is taken; one on a link that is gone is handed on."""
        me, value = lock.sides[side], lock.word & ~WAITERS
        if value == offered(side):
            pc = "take" if me.answer == "timeout" else "resolve"
            yield "was offered it", _set(lock, side, pc=pc, seen=lock.word)
        elif lock.word & WAITERS and not self.leaves_mark_behind:
            yield "finds its mark", _set(lock, side, pc="resolve", seen=lock.word)
        else:
            yield f"answers {me.answer}", _finish(lock, side)

    def _resolve(self, lock: Lock, side: int) -> Moves:
        seen = lock.sides[side].seen
        if lock.word != seen:
            yield "resolve fails", _set(lock, side, pc="give_up")
        elif seen & ~WAITERS != offered(side):
            yield "unmarks", _finish(lock._replace(word=seen & ~WAITERS), side)
        elif seen & WAITERS:
            yield "hands the offer on", _set(lock._replace(word=offered(1 - side)), side, pc="wake")
        else:
            yield "gives the offer back", _finish(lock._replace(word=FREE), side)

    # hold and release

    def _look_at_link(self, lock: Lock, side: int) -> Moves:
        live = lock.link == "LIVE" or self.forgets_link_after_take
        yield "link is " + lock.link, _set(lock, side, pc="inside" if live else "release")

    def _inside(self, lock: Lock, side: int) -> Moves:
        if lock.sides[side].unlinks and lock.link == "LIVE":
            lock = lock._replace(link="REMOVED", unlinked=True)
        yield "done", _set(lock, side, pc="exchange" if self.release_by_exchange else "release")

    def _release(self, lock: Lock, side: int) -> Moves:
        if lock.word == held(side):
            yield "releases", _finish(lock._replace(word=FREE), side)
        else:
            yield "sees WAITERS", _set(lock, side, pc="release_to_other")

    def _release_to_other(self, lock: Lock, side: int) -> Moves:
        if lock.word == held(side) | WAITERS:
            yield "offers", _set(lock._replace(word=offered(1 - side)), side, pc="wake")
        else:
            yield "offer fails", _set(lock, side, pc="release")

    def _exchange(self, lock: Lock, side: int) -> Moves:
        pc = "offer_late" if lock.word & WAITERS else "wake"
        yield "exchanges", _set(lock._replace(word=FREE), side, pc=pc)

    def _offer_late(self, lock: Lock, side: int) -> Moves:
        word = offered(1 - side) if lock.word == FREE else lock.word
        yield "offers late", _set(lock._replace(word=word), side, pc="wake")

    def _wake(self, lock: Lock, side: int) -> Moves:
        if lock.sides[1 - side].pc == "asleep" and lock.sides[1 - side].mode != "dead":
            lock = _set(lock, 1 - side, pc="look")
        yield "wakes", _finish(lock, side)


def _set(lock: Lock, side: int, **fields: Any) -> Lock:
    return lock._replace(sides=put(lock.sides, side, lock.sides[side]._replace(**fields)))


def _finish(lock: Lock, side: int) -> Lock:
    me = lock.sides[side]
    return lock._replace(sides=put(lock.sides, side, Side(calls=me.calls - 1, mode=me.mode, life=me.life)))


def _finished(side: Side) -> bool:
    return side.mode == "dead" or (side.pc == "idle" and side.calls == 0)


def _count_overtaking(lock: Lock, waiter: int) -> Lock:
    me = lock.sides[waiter]
    waits = me.marked and me.mode == "runs" and not me.answer
    return _set(lock, waiter, overtaken=min(me.overtaken + 1, 2)) if waits else lock


def _one_holder(lock: Lock) -> bool:
    """At most one side is between take and release, a dead holder included: nobody takes its lock over."""
    return not all(me.pc in HOLDING for me in lock.sides)


def _word_names_holder(lock: Lock) -> bool:
    """While a side is between take and release, the word says HELD by that side."""
    return all(lock.word & ~WAITERS == held(side) for side, me in enumerate(lock.sides) if me.pc in HOLDING)


def _word_is_known(lock: Lock) -> bool:
    """The word is one of its nine values, and no acquirer ever finds its own side as holder."""
    return lock.word != FREE | WAITERS and all(me.pc != "lost" for me in lock.sides)


def _broken_needs_a_death(lock: Lock) -> bool:
    """A link is BROKEN only if a life byte was dropped: slow or stopped is never taken for dead."""
    return lock.link != "BROKEN" or not all(me.life for me in lock.sides)


def _gone_is_true(lock: Lock) -> bool:
    """A call answers 'gone' only if the link is not LIVE; since no link becomes LIVE again, all later ones
    do."""
    return lock.link != "LIVE" or all(me.answer != "gone" for me in lock.sides)


def _offer_finds_a_taker(lock: Lock) -> bool:
    """The word is offered only to a side that is still acquiring, or dead: an offer to nobody costs a
    slice."""
    return all(me.pc in ACQUIRING or me.mode == "dead"
               for side, me in enumerate(lock.sides) if lock.word & ~WAITERS == offered(side))  # fmt: skip


def _mark_has_a_waiter(lock: Lock) -> bool:
    """The WAITERS bit belongs to the side that the word does not name; that side is acquiring, or dead."""
    if not lock.word & WAITERS:
        return True
    named = (lock.word & ~WAITERS) - (HELD_0 if lock.word & ~WAITERS in (HELD_0, HELD_1) else OFFERED_0)
    return lock.sides[1 - named].pc in ACQUIRING or lock.sides[1 - named].mode == "dead"


def _awake_is_not_overtaken(lock: Lock) -> bool:
    """An awake side that set its mark gets the word next, or right after an offer that was made before the
    mark."""
    return all(me.overtaken <= 0 for me in lock.sides if me.mode == "runs")


def _nobody_sleeps_on_its_own_word(lock: Lock) -> bool:
    """Nobody sleeps on a word that is free or offered to it: the value that was judged is the one slept
    on."""
    return all(me.seen & ~WAITERS not in (FREE, offered(side))
               for side, me in enumerate(lock.sides) if me.pc == "asleep")  # fmt: skip


def _nobody_inside_after_unlink(lock: Lock) -> bool:
    """After an ordered unlink (done under the word) no call is inside that did not do it."""
    return not lock.unlinked or all(me.pc != "inside" or me.unlinks for me in lock.sides)


def _word_is_free_at_rest(lock: Lock) -> bool:
    """When both sides live and no call runs, the word is FREE: nothing was left behind."""
    return lock.word == FREE or any(me.mode != "runs" or me.pc != "idle" for me in lock.sides)


def holder_is_stopped(lock: Lock) -> bool:
    """The one case in which a waiter without a deadline waits for ever."""
    return any(
        me.mode == "stopped" and lock.word & ~WAITERS == held(side) for side, me in enumerate(lock.sides)
    )


def calls_are_over(lock: Lock) -> bool:
    """Every side that is neither dead nor stopped has ended all its calls."""
    return all(me.mode != "runs" or _finished(me) for me in lock.sides)
