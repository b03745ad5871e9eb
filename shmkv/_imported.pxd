"""Memory of an object of the caller, held as long as the object that describes it."""
from shmkv._dlpack cimport dl_managed, dl_versioned


cdef class Imported:
    cdef readonly size_t address
    cdef readonly tuple shape
    cdef readonly tuple strides     # bytes
    cdef readonly Py_ssize_t itemsize
    cdef readonly str format
    cdef readonly bint readonly
    cdef readonly bint is_bytes
    cdef Py_buffer buffer           # what holds the memory: one of these four
    cdef object owner
    cdef dl_managed* managed
    cdef dl_versioned* versioned
    cdef bint is_exported           # is `buffer` one?

    cdef int take_buffer(self) except -1
    cdef int take_interface(self, object source, dict interface) except -1
    cdef int take_dlpack(self, object source) except -1
    cdef int take_tensor(self) except -1
