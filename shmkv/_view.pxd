"""A typed window on shared memory: buffer protocol, numpy, DLPack."""
from libc.stdint cimport int64_t, uint64_t

from shmkv._mapping cimport Region


cdef class TensorView:
    cdef Region region
    cdef readonly uint64_t offset   # of the first byte in the region
    cdef readonly uint64_t nbytes
    cdef uint64_t extent            # from the first byte to the last, gaps between rows included
    cdef readonly tuple shape
    cdef readonly object dtype
    cdef readonly bint readonly
    cdef object storage             # numpy dtype
    cdef bytes format               # of the buffer protocol, empty where it has no letter for the dtype
    cdef int dlpack_code
    cdef int dlpack_bits
    cdef Py_ssize_t itemsize
    cdef Py_ssize_t[32] buffer_shape
    cdef Py_ssize_t[32] buffer_strides
    cdef object numpy_with_gaps(self)
