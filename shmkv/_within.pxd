"""Copies inside this process: no link, no lock, no hazard."""
from libc.stdint cimport int64_t

from shmkv._blocks cimport Blocks
from shmkv._link cimport Patience
from shmkv._local cimport Local
from shmkv._plan cimport Selection


cdef enum:
    COPY_DST_GONE = -1401           # the destination was deallocated


cdef int look_at_clock(void* context) noexcept nogil
cdef int check_target(const Local* dst, Selection* select, const Blocks* blocks) noexcept nogil
cdef int copy_now(Local* src, Local* dst, Selection* select, const Blocks* blocks, bint disjoint,
                  Patience* wait) noexcept nogil
