"""One process's end of a link as an object of Python."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._link cimport LinkEnd
from shmkv._mapping cimport Region


cdef class LinkHandle(LinkEnd):
    cdef readonly Region members
    cdef bytes prefix
    cdef readonly uint32_t slot     # of the record in the peer's directory
    cdef readonly uint64_t cluster_id       # the peer's
    cdef readonly object followers  # weak: those that keep this handle for their next call
