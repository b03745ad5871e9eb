"""Keys that nobody fetched: how long each has been there, and which have to go.

What stands here is the owner's own; shared memory has nothing of it. Times are CLOCK_MONOTONIC, so that a clock that is set makes
no key older. There is no thread: `expire_due` is called by every call of the owner. Runs under the owner's lock.
"""
from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shmkv import _lookup
from shmkv._directory import Directory
from shmkv.keys import KeyWords

FEWEST_DEADLINES = 64


@dataclass
class _Age:
    """Of one bound row: when its key was bound or last published, and when it goes (None: never)."""

    since_ns: int
    deadline_ns: int | None


class KeyExpiry:
    """The ages of all keys of a directory. `on_end(slot)` is told of each cache before one of its keys goes.

    A row is noted before its key is bound, so that an interrupt in between leaves no key without an age. What is noted of a key
    that was consumed meanwhile is found out when somebody looks for it.
    """

    def __init__(self, directory: Directory, on_end: Callable[[int], None]) -> None:
        self._directory = directory
        self._on_end = on_end
        self._slots: dict[int, dict[int, _Age]] = {}        # cache slot -> row -> age
        self._deadlines: list[tuple[int, int, int]] = []    # a heap of (deadline, slot, row), with old ones that count no more
        self._most_deadlines = FEWEST_DEADLINES
        self.by_ttl = 0
        self.by_call = 0

    # -- noting -----------------------------------------------------------------------------------------------------

    def bound(self, slot: int, row: int, ttl_ms: int | None) -> None:
        """A row gets a key."""
        now = time.monotonic_ns()
        age = _Age(now, None if ttl_ms is None else now + ttl_ms * 1_000_000)
        self._slots.setdefault(slot, {})[row] = age
        self._push(slot, row, age)

    def published(self, slot: int, rows: Iterable[int], ttl_ms: int | None) -> None:
        """Rows were published: their keys are new from now on. A time to live counts anew; without one the old deadline stays."""
        ages = self._slots.get(slot)
        if not ages:
            return
        now = time.monotonic_ns()
        for row in rows:
            age = ages.get(row)
            if age is None:
                continue
            age.since_ns = now
            if ttl_ms is not None:
                age.deadline_ns = now + ttl_ms * 1_000_000
                self._push(slot, row, age)

    def unbound(self, slot: int, row: int) -> None:
        """A row lost its key."""
        self._slots.get(slot, {}).pop(row, None)

    def freed(self, slot: int) -> None:
        """A cache is gone."""
        self._slots.pop(slot, None)

    def _push(self, slot: int, row: int, age: _Age) -> None:
        """Deadlines of keys that went in time stay in the heap; when they are the most of it, it is made anew."""
        if age.deadline_ns is None:
            return
        if len(self._deadlines) >= self._most_deadlines:
            self._deadlines = [(each.deadline_ns, slot, row) for slot, rows in self._slots.items() for row, each in rows.items()
                               if each.deadline_ns is not None]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + FEWEST_DEADLINES
        heapq.heappush(self._deadlines, (age.deadline_ns, slot, row))

    # -- ending -----------------------------------------------------------------------------------------------------

    def expire_due(self) -> None:
        """End the keys whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic_ns():
            deadline, slot, row = self._deadlines[0]
            age = self._slots.get(slot, {}).get(row)
            if age is not None and age.deadline_ns == deadline:
                self.by_ttl += self._end(slot, row)
            heapq.heappop(self._deadlines)      # last: an interrupt costs a second look, and no key its end

    def next_deadline_ns(self) -> int | None:
        """When the next key goes that still lives. Deadlines before it that count no more are dropped."""
        while self._deadlines:
            deadline, slot, row = self._deadlines[0]
            age = self._slots.get(slot, {}).get(row)
            if age is not None and age.deadline_ns == deadline and self._directory.row_key(slot, row) is not None:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def expire_older(self, than_ms: int) -> int:
        """End the keys that were bound and last published at least so long ago: how many."""
        limit = time.monotonic_ns() - than_ms * 1_000_000
        ended = 0
        for slot, row, _ in list(self.living()):
            if self._slots[slot][row].since_ns <= limit:
                ended += self._end(slot, row)
        self.by_call += ended
        return ended

    def _end(self, slot: int, row: int) -> bool:
        """End a row's key, if it still lives and no reader consumes it first."""
        words = self._directory.row_key(slot, row)
        if words is not None:
            self._on_end(slot)
            self._directory.remove(slot, row)
        self.unbound(slot, row)
        return words is not None and self._directory.why_ended(words) == _lookup.REMOVED

    def rows(self, slot: int) -> list[int]:
        """Rows of a cache that were given a key."""
        return list(self._slots.get(slot, ()))

    def since_ns(self, slot: int, row: int) -> int:
        """When the row's key was bound or last published, CLOCK_MONOTONIC."""
        age = self._slots.get(slot, {}).get(row)
        return 0 if age is None else age.since_ns

    def living(self) -> Iterator[tuple[int, int, KeyWords]]:
        """(slot, row, key) of each key that still lives; those that do not are forgotten by the way."""
        for slot, rows in list(self._slots.items()):
            for row in list(rows):
                words = self._directory.row_key(slot, row)
                if words is None:
                    rows.pop(row, None)
                else:
                    yield slot, row, words
