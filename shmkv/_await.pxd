"""Rows that are waited for: in a peer's directory, from a key that nobody has bound yet to the last tensor."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._core cimport Request
from shmkv._link cimport Link
from shmkv._lookup cimport FoundRow
from shmkv._wait cimport Sleeper


cdef enum:
    # Answers of a look besides 0 and those of other rooms: there is nothing yet,
    AWAIT_KEY = -1711               # and the keys of the directory may change that
    AWAIT_ROW = -1712               # and the row may


cdef struct Beginning:
    # What there was when the wait began: a key that ended before may come again, one that ends meanwhile does not.
    bint noted
    uint64_t ended_count            # of the ring; entries before it were looked at
    uint64_t row                    # number and generation of a binding that had ended, but was in the index still
    uint64_t generation


cdef int find_awaited(Link* link, Request* want, FoundRow* found, Beginning* beginning) noexcept nogil
cdef int look_at_row(const FoundRow* found, bint by_key) noexcept nogil
cdef uint32_t progress_of(const FoundRow* found) noexcept nogil
cdef int sleep_for(Link* link, Request* want, const FoundRow* found, int awaited, Sleeper* sleeper, uint32_t seen,
                   int64_t turn_ns, bint watched) noexcept nogil
