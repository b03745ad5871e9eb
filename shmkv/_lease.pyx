# cython: language_level=3, freethreading_compatible=True
"""Leases of one side of a link: each keeps a cache of the other side from being freed, until it is given back or its process dies.

A view, a fork and a pull that waits hold one. They are counted by nobody: the owner scans them as it scans hazards.
"""
from shmkv._crash cimport crash_point
from shmkv._futex cimport exchange64_seq, load64_relaxed, store64_release
from shmkv._layout cimport LEASES_MAX


cdef int lease_take(LinkSide* side, uint64_t generation, uint32_t limit) noexcept nogil:
    """Name a cache by a free lease: its number or LEASE_NONE_FREE. The caller has the link's lock, so nobody else of this side
    takes one, and its hazard names the cache: an owner that does not see the lease yet sees that."""
    cdef uint32_t number
    for number in range(min(limit, <uint32_t>LEASES_MAX)):
        if load64_relaxed(&side.leases[number]) == 0:
            crash_point(b"leasing")
            store64_release(&side.leases[number], generation)       # before the hazard goes
            crash_point(b"leased")
            return <int>number
    return LEASE_NONE_FREE


cdef void lease_give(LinkSide* side, int number) noexcept nogil:
    """Give one back, after the last load of the cache's bytes. Needs no lock."""
    crash_point(b"lease-ending")
    exchange64_seq(&side.leases[number], 0)         # before the look whether the owner waits for memory


cdef uint32_t leases_taken(const LinkSide* side) noexcept nogil:
    cdef uint32_t number, count = 0
    for number in range(LEASES_MAX):
        count += load64_relaxed(&side.leases[number]) != 0
    return count


NONE_FREE = LEASE_NONE_FREE
MOST = LEASES_MAX
