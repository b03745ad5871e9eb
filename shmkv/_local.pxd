"""Caches of this process as the core knows them: where their tensors are, and who uses them now."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._plan cimport Shape, ShapeList


cdef struct Local:
    char* base                      # offsets of the shapes count from here
    Shape* shapes
    uint32_t num_tensors
    uint32_t uses                   # calls that read or write it now; freed when it is 0
    uint32_t is_open                # 0 after deallocate: no new call may use it
    uint64_t number                 # of this object in the process, never used again
    uint64_t format                 # a hash of kv_tensor_format, 0 = none was given
    uint64_t begin                  # its first byte and the one behind its last, from `base`
    uint64_t end


cdef class LocalCache:
    """Tensors of one cache in this process, and how many calls use it now."""
    cdef Local local
    cdef readonly object memory
    cdef ShapeList shapes


cdef bint local_enter(Local* cache) noexcept nogil
cdef void local_leave(Local* cache) noexcept nogil
cdef bint may_share(const Local* one, const Local* other) noexcept nogil
