"""The key index of one directory, as its owner writes it."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._mapping cimport Region


cdef class KeyIndex:
    cdef Region region
    cdef char* base
    cdef object reserve             # reserve(offset, nbytes): pages behind a range, or OSError
    cdef uint64_t word              # as in the directory's header, which others can scribble over
    cdef uint32_t used              # entries that are not empty, tombstones included
    cdef uint32_t living
    cdef list old_parts             # (log2, part) that a reader may still be in
    cdef int insert(self, uint64_t hashed, uint32_t row) except -1
    cdef void remove(self, uint64_t hashed, uint32_t row)
    cdef int make_room(self, uint32_t more) except -1
    cdef void refill(self, uint64_t* old, uint32_t log2, uint64_t* entries, uint32_t next_log2)
    cdef uint64_t hash_of_entry(self, uint64_t entry)
    cdef bint reader_inside(self, int life_fd, Region members)
