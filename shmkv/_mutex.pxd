"""A mutex whose taking and giving back no Python signal handler can interrupt half-way."""

cdef extern from "pythread.h":
    ctypedef void* PyThread_type_lock


cdef class Mutex:
    cdef PyThread_type_lock lock
    cdef unsigned long holder       # thread that has it, 0 = nobody
    cdef object check               # called after it was taken; what it raises gives it back
    cdef object busy                # makes the exception for the thread that has it
    cdef int take(self, double timeout_s) except -1
