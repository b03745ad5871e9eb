# cython: language_level=3, freethreading_compatible=True
"""Free ranges of a table: which record numbers are in use, and where a table has to grow.

Private to the owner of the table; knows numbers, not what they stand for. Compiled, so that no signal handler runs half-way.
"""
from bisect import bisect_left


cdef class RangeAllocator:
    """Hands out contiguous ranges of [0, limit), lowest first, and joins what comes back."""
    cdef readonly object limit
    cdef readonly object end        # how far the table must reach: one more than the highest number in use
    cdef list free                  # [(first, count)], in order, none touching another or the end

    def __init__(self, long long limit):
        self.limit = limit
        self.end = 0
        self.free = []

    def take(self, count):
        """First number of `count` free ones in a row; MemoryError when the table is at its maximum."""
        for position, (first, free) in enumerate(self.free):
            if free >= count:
                if free == count:
                    del self.free[position]
                else:
                    self.free[position] = (first + count, free - count)
                return first
        if self.end + count > self.limit:
            raise MemoryError(f"{count} more records wanted, {self.limit - self.end} of {self.limit} left at the end")
        first = self.end
        self.end += count
        return first

    def give(self, first, count):
        """Take back a range that `take` gave out."""
        if not count:
            return
        position = bisect_left(self.free, (first, 0))
        if position < len(self.free) and self.free[position][0] == first + count:
            count += self.free.pop(position)[1]
        if position and sum(self.free[position - 1]) == first:
            before, length = self.free.pop(position - 1)
            first, count = before, count + length
            position -= 1
        if first + count == self.end:
            self.end = first
        else:
            self.free.insert(position, (first, count))
