"""The peer's end of a copy over a link, whatever kind of memory it is: attached, then carried from or to by the mover for it."""
from libc.stdint cimport uint64_t

from shmkv._attached cimport Attached
from shmkv._link cimport Link, Patience
from shmkv._lookup cimport FoundRow
from shmkv._plan cimport Plan


cdef enum:
    CARRY_PRIVATE = -1402           # the cache lies in private memory of its owner's process, where nothing can be mapped


cdef struct PeerEnd:
    Attached* segment               # NULL: private memory of the peer's process
    uint64_t base                   # then: the address there from which offsets count
    uint64_t nbytes                 # of segment or memory


cdef int attach(Link* link, const FoundRow* found, PeerEnd* end) noexcept nogil
cdef int bring_pages(Link* link, Patience* wait, PeerEnd* end) noexcept nogil
cdef int carry_in(Link* link, Patience* wait, const Plan* plan, uint64_t whole_nbytes, const PeerEnd* src, char* dst) noexcept nogil
cdef int carry_out(Link* link, Patience* wait, const Plan* plan, uint64_t whole_nbytes, char* src,
                   const PeerEnd* dst) noexcept nogil
