"""Threads that share the work of a big copy with the thread that asked for it."""
from libc.stdint cimport uint32_t, uint64_t

ctypedef int (*ShareFn)(void* job, uint64_t share) noexcept nogil


cdef int crew_run(ShareFn work, void* job, uint64_t shares, uint32_t threads, ShareFn mine) noexcept nogil
cdef uint32_t crew_limit() noexcept nogil
