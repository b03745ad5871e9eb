# cython: language_level=3, freethreading_compatible=True
"""Tables that grow in place: records are handed out by number, pages come behind them before readers are told of more.

Knows no meaning of a record. The counts in the directory's header are for readers; the owner goes by its own.
"""
from shmkv._crash cimport crash_point
from shmkv._futex cimport store32_release
from shmkv._layout cimport *
from shmkv._mapping cimport Region
from shmkv._ranges import RangeAllocator

cdef uint64_t[TABLES] offsets = [CACHES_OFFSET, TENSORS_OFFSET, ROWS_OFFSET, COVERAGE_OFFSET]
cdef uint64_t[TABLES] record_nbytes = [sizeof(CacheRecord), sizeof(TensorRecord), sizeof(RowRecord), LINE]
cdef uint64_t[TABLES] limits = [CACHES_MAX, TENSORS_MAX, ROWS_MAX, COVERAGE_LINES_MAX]
cdef uint64_t[TABLES] firsts = [CACHES_FIRST, TENSORS_FIRST, ROWS_FIRST, COVERAGE_LINES_FIRST]      # a page each


cdef uint32_t* shown_count(char* base, int table):
    cdef DirectoryHeader* header = directory_header(base)
    if table == 0:
        return &header.caches_reserved
    if table == 1:
        return &header.tensors_reserved
    return &header.rows_reserved if table == 2 else &header.coverage_reserved


cdef class Tables:
    """The four tables of one directory: caches, tensors, rows, coverage lines, in this order."""

    def __init__(self, Region region, reserve):
        self.region = region
        self.base = region.address
        self.reserve = reserve
        self.allocators = [RangeAllocator(limits[table]) for table in range(TABLES)]
        for table in range(TABLES):
            self.grow(table, firsts[table])

    cdef int grow(self, int table, uint64_t wanted) except -1:
        """Put pages behind at least `wanted` records and an eighth more than before: nothing is copied when a table grows, and
        what is ahead of its records is memory that nobody uses. Readers see the count when the pages are there."""
        cdef uint64_t have = self.reserved[table], page = firsts[table]
        cdef uint64_t target = max(have + have // 8, wanted)
        if have >= wanted:
            return 0
        target = min((target + page - 1) // page * page, limits[table])
        self.reserve(offsets[table] + have * record_nbytes[table], (target - have) * record_nbytes[table])
        self.reserved[table] = <uint32_t>target
        crash_point(b"table-growing")
        store32_release(shown_count(self.base, table), <uint32_t>target)
        return 0

    def take(self, tuple counts) -> tuple:
        """First numbers of so many records in each table, or MemoryError / OSError and nothing taken."""
        taken = []
        try:
            for table in range(TABLES):
                taken.append(self.allocators[table].take(counts[table]))
                self.grow(table, self.allocators[table].end)
        except BaseException:
            self.give(tuple(taken), counts)
            raise
        return tuple(taken)

    def give(self, tuple firsts_taken, tuple counts) -> None:
        """Take records back, as `take` gave them."""
        for table, first in enumerate(firsts_taken):
            self.allocators[table].give(first, counts[table])

    @property
    def cache_slots(self):
        """One more than the highest cache slot in use; there are pages behind all of them."""
        return min(self.allocators[0].end, self.reserved[0])
