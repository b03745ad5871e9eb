"""The hot path: one pull, from checked arguments to the released lock, in one call without the GIL."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._blocks cimport Blocks
from shmkv._layout cimport CacheRecord
from shmkv._link cimport Link, Patience
from shmkv._local cimport Local
from shmkv._lookup cimport FoundRow, Key
from shmkv._plan cimport Plan, Selection


cdef enum:
    # Request.by
    BY_ID = 0
    BY_KEY = 1
    BY_BLOCKS_KEY = 2


cdef struct Request:
    Key key
    int by                          # how the source is named
    int64_t cache_id                # when by id
    Blocks* blocks                  # the lists of a pull of blocks, else NULL
    bint consumes                   # no offset keyword was given
    Selection select
    Patience wait
    uint64_t nbytes                 # what was copied


cdef int find(Link* link, Request* want, FoundRow* found) noexcept nogil
cdef int make_plan(Link* link, Request* want, const CacheRecord* cache, uint64_t nbytes, Local* dst, Plan** plan) noexcept nogil
cdef void note_format(Link* link, const CacheRecord* cache, const Local* dst) noexcept nogil
cdef int finish(Link* link, Request* want, FoundRow* found) noexcept nogil
cdef void drop_unlinked(Link* link) noexcept nogil
cdef int enter_counted(Link* link, Patience* wait) noexcept nogil
cdef int pull_now(Link* link, Local* dst, Request* want) noexcept nogil
cdef int pull_locked(Link* link, Local* dst, Request* want) noexcept nogil
cdef void count(Link* link, const Patience* wait, uint64_t nbytes, int status) noexcept nogil
