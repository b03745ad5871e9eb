"""Rows of a peer's cache, lent: read where they are, for as long as a lease is held."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._attached cimport Mapped
from shmkv._core cimport Request
from shmkv._layout cimport TensorRecord
from shmkv._link cimport Link
from shmkv._link_handle cimport LinkHandle
from shmkv._mapping cimport Region


cdef enum:
    LEND_UNMAPPED = -1602           # the link reads by system calls and maps nothing


cdef struct Lent:
    Mapped* mapped
    int lease                       # its number, -1 = given back
    uint64_t generation             # of the cache
    uint64_t serial                 # of its segment
    uint32_t row
    uint32_t count                  # tensors
    TensorRecord* tensors           # private copies of those that were asked for, checked


cdef class LentRegion(Region):
    """A peer's segment as this process has it mapped for its pulls, read-only."""
    cdef Mapped* mapped


cdef class ForkedRegion(Region):
    cdef object loan                # gone with the region


cdef class Loan:
    """One row that is lent."""
    cdef Lent lent
    cdef LinkHandle handle
    cdef readonly Region region
    cdef object __weakref__
    cdef void end(self)


cdef void give_back(Link* link, int lease) noexcept nogil
cdef int lend_now(Link* link, Request* want, uint32_t limit, Lent* lent) noexcept nogil
cdef Loan loan_of(LinkHandle handle, Lent* lent)
