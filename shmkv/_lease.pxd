"""Leases: hazards that last."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._layout cimport LinkSide


cdef enum:
    LEASE_NONE_FREE = -1601         # as many as are allowed are taken


cdef int lease_take(LinkSide* side, uint64_t generation, uint32_t limit) noexcept nogil
cdef void lease_give(LinkSide* side, int number) noexcept nogil
cdef uint32_t leases_taken(const LinkSide* side) noexcept nogil
