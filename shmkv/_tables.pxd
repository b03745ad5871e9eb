"""Which records of a directory's tables are in use, and which have pages behind them; the owner's private knowledge."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._mapping cimport Region


cdef enum:
    TABLES = 4                      # caches, tensors, rows, coverage lines


cdef class Tables:
    cdef Region region
    cdef char* base
    cdef object reserve             # reserve(offset, nbytes): pages behind a range, or OSError
    cdef list allocators
    cdef uint32_t[TABLES] reserved
    cdef int grow(self, int table, uint64_t wanted) except -1
