"""The hot path: one pull, from checked arguments to the released lock, in one call without the GIL."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._link cimport Link, Patience
from shmkv._lookup cimport Key
from shmkv._mapping cimport Region
from shmkv._plan cimport Plan, Selection, Shape


cdef enum:
    PULL_DST_GONE = -1401           # the destination was deallocated
    PULL_SRC_GONE = -1402           # so was the source of a local copy


cdef struct Local:
    # A cache of this process.
    char* base
    Shape* shapes
    uint32_t num_tensors
    uint32_t uses                   # calls that read or write it now; freed when it is 0
    uint32_t is_open                # 0 after deallocate: no new call may use it


cdef struct Request:
    Key key
    bint by_key
    int64_t cache_id                # when not by_key
    bint consumes                   # no offset keyword was given
    Selection select
    Patience wait
    Plan plan


cdef class LocalCache:
    """A cache of this process: where its tensors are, and how many calls use it now."""
    cdef Local local
    cdef readonly Region region


cdef int pull_now(Link* link, Local* dst, Request* want) noexcept nogil
cdef int copy_now(Local* src, Local* dst, Request* want) noexcept nogil
