"""From an address in the peer's process to a tensor of one of its caches."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._lookup cimport FoundRow
from shmkv._plan cimport Shape


cdef struct Place:
    # Where an address leads: what was read of cache and tensor counts only once the cache is pinned and it was read again.
    FoundRow found                  # the cache, without any row
    uint32_t slot                   # of its record
    uint32_t tensor                 # within the cache
    Shape shape                     # private copy of the tensor's record, checked
    uint64_t offset                 # of the address, from the tensor's first byte
    uint64_t room                   # bytes from there to the tensor's end


cdef int find_place(char* base, uint64_t address, uint32_t hint, Place* place) noexcept nogil
cdef bint is_in_cache(char* base, uint64_t address, uint32_t slot, Place* place) noexcept nogil
cdef bint read_place(char* base, uint64_t address, Place* place) noexcept nogil
