"""Marking what was pulled of a key, and consuming it."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._layout cimport CacheRecord
from shmkv._lookup cimport FoundRow


cdef bint cover(char* base, FoundRow* found, uint32_t first, uint32_t count) noexcept nogil
cdef bint is_full(char* base, const CacheRecord* cache, uint32_t batch_index, uint64_t row_generation) noexcept nogil
cdef bint consume(FoundRow* found) noexcept nogil
