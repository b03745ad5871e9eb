"""Free ranges of a table: which record numbers are in use, and where a table has to grow.

Private to the owner of the table; knows numbers, not what they stand for.
"""
from __future__ import annotations

from bisect import bisect_left


class RangeAllocator:
    """Hands out contiguous ranges of [0, limit), lowest first, and joins what comes back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._end = 0
        self._free: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        """One more than the highest number ever in use: how far the table must reach."""
        return self._end

    def take(self, count: int) -> int:
        """First number of `count` free ones in a row; MemoryError when the table is at its maximum."""
        for position, (first, free) in enumerate(self._free):
            if free >= count:
                if free == count:
                    del self._free[position]
                else:
                    self._free[position] = (first + count, free - count)
                return first
        first = self._end
        if self._free and sum(self._free[-1]) == self._end:
            first = self._free[-1][0]       # the last free range goes on into what was never used
        if first + count > self._limit:
            raise MemoryError(f"{count} more records wanted, {self._limit - first} of {self._limit} left at the end")
        if first < self._end:
            self._free.pop()
        self._end = first + count
        return first

    def give(self, first: int, count: int) -> None:
        """Take back a range that `take` gave out."""
        if not count:
            return
        position = bisect_left(self._free, (first, 0))
        if position < len(self._free) and self._free[position][0] == first + count:
            count += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == first:
            before, length = self._free.pop(position - 1)
            first, count = before, count + length
            position -= 1
        self._free.insert(position, (first, count))
