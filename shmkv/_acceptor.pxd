"""A link as the cluster holds it that was linked to."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._link cimport LinkEnd
from shmkv._mapping cimport Region


cdef class AcceptedLink(LinkEnd):
    cdef Region own                 # the directory that the record stands in
    cdef Region members
    cdef bytes prefix
    cdef readonly uint32_t slot     # of the record
    cdef readonly uint64_t serial
    cdef readonly uint64_t cluster_id       # the peer's
    cdef int end_in_turn(self, int64_t timeout_ms) noexcept
