"""The record of one link: its state, its two sides, who of them lives."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._layout cimport LinkRecord, LinkSide
from shmkv._mapping cimport Region


cdef bint side_lives(const LinkSide* side, int life_fd, char* members) noexcept nogil
cdef bint names(const LinkSide* side, uint64_t generation) noexcept nogil
cdef bint is_named(Region directory, uint64_t generation, int life_fd, Region members, initiated) except -1
cdef bint is_idle(const LinkSide* side) noexcept nogil
cdef bint end_link(LinkRecord* link, uint64_t seen, uint32_t state) noexcept nogil
