"""The hot path: one pull, from checked arguments to the released lock, in one call without the GIL."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._link cimport Link, Patience
from shmkv._lookup cimport Key
from shmkv._mapping cimport Region
from shmkv._plan cimport Selection, Shape, ShapeList


cdef enum:
    PULL_DST_GONE = -1401           # the destination was deallocated


cdef struct Local:
    # A cache of this process.
    char* base
    Shape* shapes
    uint32_t num_tensors
    uint32_t uses                   # calls that read or write it now; freed when it is 0
    uint32_t is_open                # 0 after deallocate: no new call may use it
    uint64_t number                 # of this object in the process, never used again


cdef struct Request:
    Key key
    bint by_key
    int64_t cache_id                # when not by_key
    bint consumes                   # no offset keyword was given
    Selection select
    Patience wait
    uint64_t nbytes                 # what was copied


cdef class LocalCache:
    """A cache of this process: where its tensors are, and how many calls use it now."""
    cdef Local local
    cdef readonly Region region
    cdef ShapeList shapes


cdef int pull_now(Link* link, Local* dst, Request* want) noexcept nogil
cdef int pull_locked(Link* link, Local* dst, Request* want) noexcept nogil
cdef int copy_now(Local* src, Local* dst, Request* want) noexcept nogil
cdef bint local_enter(Local* cache) noexcept nogil
cdef void local_leave(Local* cache) noexcept nogil
cdef void last_pull_read(uint64_t* nbytes, int64_t* wait_ns, int64_t* copy_ns) noexcept nogil
