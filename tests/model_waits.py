"""A pull that waits, as a model: a lease instead of the lock, layers copied as they are published, an event word to sleep on.

The owner publishes two layers, may remove the key at any moment, then retires the cache, scans hazard and lease and gives the
memory on. After each change it looks whether anybody is counted in, and only then adds to the event word and wakes. The reader
finds and pins the row, takes the lease, clears the hazard, and from then on: counts in, sees the event word, looks, copies what is
new or sleeps on what it saw. Who watches the owner's process wakes the reader when it dies.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from model import FAULT, Promise

LAYERS = 2


class Wait(NamedTuple):
    owner: str = "write"
    then: str = ""                      # what the owner does after its look at the waiters
    owner_alive: bool = True
    written: int = 0
    progress: int = 0
    key: str = "LIVE"
    cache: str = "LIVE"
    tenant: int = 1                     # whose bytes are in the memory
    event: int = 0
    waiters: int = 0
    hazard: bool = False
    lease: bool = False
    scanned: tuple[bool, ...] = ()      # what the scan has found so far
    reader: str = "find"
    reader_alive: bool = True
    counted: bool = False
    seen: int = 0
    done: int = 0
    bad: bool = False                   # a layer was called good that was not the row's, or not written: never
    told: str = ""                      # how the pull ended


Moves = Iterator[tuple[str, Wait]]
HOLDS = ("look", "count_in", "see", "copy", "recheck", "sleep", "asleep")
ABOUT_TO_WAKE = ("look_at_waiters", "add", "wake")


@dataclass(frozen=True)
class WaitModel:
    """`by_id`: the row has no key, and the cache is deallocated. The other switches are mistakes to be caught."""

    by_id: bool = False

    looks_at_waiters_first: bool = False
    wakes_without_adding: bool = False
    sees_after_looking: bool = False
    takes_no_lease: bool = False
    clears_hazard_before_lease: bool = False
    scans_leases_first: bool = False
    retires_silently: bool = False
    no_last_look: bool = False
    dead_leases_count: bool = False

    def initial(self) -> Wait:
        return Wait()

    @property
    def promises(self) -> tuple[Promise, ...]:
        return _layers_are_the_rows_own, _nobody_sleeps_through, _lease_keeps_memory

    def steps(self, wait: Wait) -> Moves:
        if wait.owner_alive and wait.owner != "done":
            for what, after in getattr(self, "_owner_" + wait.owner)(wait):
                yield f"owner: {what}", after
            yield f"{FAULT}owner crashes", wait._replace(owner_alive=False)
        if wait.reader_alive:
            for what, after in getattr(self, "_" + wait.reader)(wait) if not wait.told else ():
                yield f"reader: {what}", after
            yield f"{FAULT}reader crashes", wait._replace(reader_alive=False)

    # the owner

    def _change(self, wait: Wait, then: str) -> Wait:
        """After a change: look for waiters, then go on."""
        if self.looks_at_waiters_first:
            return wait._replace(owner=then)
        return wait._replace(owner="look_at_waiters", then=then)

    def _owner_write(self, wait: Wait) -> Moves:
        if wait.written < LAYERS:
            yield "writes a layer", wait._replace(written=wait.written + 1, owner="publish")
        if self.by_id:
            yield "deallocates the cache", wait._replace(owner="retire")
        else:
            yield "removes the key", self._change(wait._replace(key="REMOVED"), "overwrite")

    def _owner_publish(self, wait: Wait) -> Moves:
        if self.looks_at_waiters_first and not wait.then:
            yield "looks for waiters", wait._replace(then="wake" if wait.waiters else "write")
            return
        after = self._change(wait._replace(progress=wait.progress + 1), "write")
        yield "publishes a layer", after._replace(owner=wait.then, then="") if self.looks_at_waiters_first else after

    def _owner_look_at_waiters(self, wait: Wait) -> Moves:
        if wait.waiters:
            yield "sees a waiter", wait._replace(owner="wake" if self.wakes_without_adding else "add")
        else:
            yield "sees no waiter", wait._replace(owner=wait.then, then="")

    def _owner_add(self, wait: Wait) -> Moves:
        yield "adds to the event", wait._replace(event=wait.event + 1, owner="wake")

    def _owner_wake(self, wait: Wait) -> Moves:
        woken = wait._replace(reader="see") if wait.reader == "asleep" else wait
        yield "wakes", woken._replace(owner=wait.then or "write", then="")

    def _owner_overwrite(self, wait: Wait) -> Moves:
        """The row is the owner's again, whoever is in it: a reader's last look at the row has to find that out."""
        yield "writes other bytes into the row", wait._replace(tenant=0, owner="retire")

    def _owner_retire(self, wait: Wait) -> Moves:
        retired = wait._replace(cache="RETIRED")
        yield "retires the cache", retired._replace(owner="scan") if self.retires_silently else self._change(retired, "scan")

    def _owner_scan(self, wait: Wait) -> Moves:
        """Hazard, then lease, each with a load of its own; one that stands ends the scan, unless its side is dead."""
        marks = (wait.lease, wait.hazard) if self.scans_leases_first else (wait.hazard, wait.lease)
        stands = marks[len(wait.scanned)] and (wait.reader_alive or self.dead_leases_count)
        if stands:
            yield "finds the cache named", wait._replace(scanned=())
        elif len(wait.scanned) == 1:
            yield "finds nobody in it", wait._replace(scanned=(), owner="free")
        else:
            yield "looks at the first mark", wait._replace(scanned=(False,))

    def _owner_free(self, wait: Wait) -> Moves:
        yield "gives the memory on", wait._replace(cache="FREE", tenant=2, owner="done")

    # the reader

    def _find(self, wait: Wait) -> Moves:
        if wait.key == "LIVE" and wait.cache == "LIVE":
            yield "finds the row", wait._replace(reader="set_hazard")
        else:
            yield "finds no row", wait._replace(told="not_there")

    def _set_hazard(self, wait: Wait) -> Moves:
        yield "sets hazard", wait._replace(hazard=True, reader="pin")

    def _pin(self, wait: Wait) -> Moves:
        if wait.key != "LIVE" or wait.cache != "LIVE":
            yield "has to look again", wait._replace(hazard=False, reader="find")
        else:
            yield "looks again", wait._replace(reader="clear_hazard" if self.clears_hazard_before_lease else "take_lease")

    def _take_lease(self, wait: Wait) -> Moves:
        after = "look" if self.clears_hazard_before_lease else "clear_hazard"
        yield "takes a lease", wait._replace(lease=not self.takes_no_lease, reader=after)

    def _clear_hazard(self, wait: Wait) -> Moves:
        after = "take_lease" if self.clears_hazard_before_lease else "look"
        yield "clears hazard", wait._replace(hazard=False, reader=after)

    def _look(self, wait: Wait) -> Moves:
        if wait.progress > wait.done:
            yield "sees a new layer", wait._replace(reader="copy")
        elif not wait.owner_alive or wait.key != "LIVE" or wait.cache != "LIVE":
            yield "sees that no more will come", self._end(wait, "gone" if not wait.owner_alive else "not_there")
        elif not wait.counted:
            yield "sees nothing new", wait._replace(reader="count_in")
        elif self.sees_after_looking:
            yield "sees nothing new, then the event", wait._replace(reader="see")
        else:
            yield "sees nothing new", wait._replace(reader="sleep")

    def _count_in(self, wait: Wait) -> Moves:
        yield "counts itself in", wait._replace(waiters=wait.waiters + 1, counted=True,
                                                reader="look" if self.sees_after_looking else "see")

    def _see(self, wait: Wait) -> Moves:
        """The event word is loaded before the look."""
        yield "loads the event word", wait._replace(seen=wait.event, reader="sleep" if self.sees_after_looking else "look")

    def _sleep(self, wait: Wait) -> Moves:
        yield "goes to sleep", wait._replace(reader="asleep" if wait.event == wait.seen else "see")

    def _asleep(self, wait: Wait) -> Moves:
        if not wait.owner_alive:
            yield "is woken by the watch", wait._replace(reader="look")

    def _copy(self, wait: Wait) -> Moves:
        bad = wait.bad or wait.tenant != 1 or wait.done >= wait.written
        yield "copies a layer", wait._replace(reader="recheck", bad=bad)

    def _recheck(self, wait: Wait) -> Moves:
        if wait.key != "LIVE" and not self.no_last_look:
            yield "finds the key gone after all", self._end(wait._replace(bad=False), "not_there")
        elif wait.done + 1 == LAYERS:
            yield "has all layers", self._end(wait._replace(done=LAYERS), "success")
        else:
            yield "has a layer", wait._replace(done=wait.done + 1, reader="see" if wait.counted else "look")

    def _end(self, wait: Wait, told: str) -> Wait:
        return wait._replace(reader=f"count_out_{told}" if wait.counted else f"give_{told}")

    def __getattr__(self, name: str) -> object:
        """Counting out and giving the lease back are the same steps whatever is told afterwards."""
        for step in ("_count_out_", "_give_"):
            if name.startswith(step):
                told = name.removeprefix(step)
                return self._count_out(told) if step == "_count_out_" else self._give(told)
        raise AttributeError(name)

    def _count_out(self, told: str) -> object:
        return lambda wait: [("counts itself out", wait._replace(waiters=wait.waiters - 1, counted=False, reader=f"give_{told}"))]

    def _give(self, told: str) -> object:
        return lambda wait: [("gives the lease back", wait._replace(lease=False, told=told))]


def _layers_are_the_rows_own(wait: Wait) -> bool:
    """A layer that is called good was written, and the row's all the time."""
    return not wait.bad or wait.reader == "recheck" or not wait.reader_alive


def _nobody_sleeps_through(wait: Wait) -> bool:
    """Nobody sleeps although there is something to see, unless the owner is about to wake it or dead."""
    news = wait.progress > wait.done or wait.key != "LIVE" or wait.cache != "LIVE"
    asleep = wait.reader == "asleep" and wait.reader_alive and wait.seen == wait.event
    return not (asleep and news and wait.owner_alive) or wait.owner in ABOUT_TO_WAKE


def _lease_keeps_memory(wait: Wait) -> bool:
    """While a living reader waits or copies, the memory is not given to another cache."""
    return wait.cache != "FREE" or wait.reader not in HOLDS or not wait.reader_alive


def wait_has_ended(wait: Wait) -> bool:
    """The reader was told something, or is dead."""
    return bool(wait.told) or not wait.reader_alive


def memory_is_given_on(wait: Wait) -> bool:
    """The owner got its memory back, or is dead."""
    return wait.owner == "done" or not wait.owner_alive
