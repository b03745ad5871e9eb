# cython: language_level=3, freethreading_compatible=True
"""A mutex for Python code, taken and given back inside one call of C each.

A context manager written in Python has gaps: a KeyboardInterrupt after the lock was taken and before `__enter__` has returned
leaves it taken for ever. Here the wait is interruptible and the rest is not. The thread that has it is refused instead of
waiting for itself: such a call comes from a signal handler.
"""
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident

from shmkv._futex cimport now_ns

cdef extern from "pythread.h":
    ctypedef long long PY_TIMEOUT_T
    PyThread_type_lock PyThread_allocate_lock()
    void PyThread_free_lock(PyThread_type_lock lock)
    void PyThread_release_lock(PyThread_type_lock lock) nogil
    int PyThread_acquire_lock_timed(PyThread_type_lock lock, PY_TIMEOUT_T microseconds, int intr_flag) nogil
    int PY_LOCK_ACQUIRED

cdef enum:
    SLICE_US = 20000


cdef class Mutex:
    """`with mutex:` waits as long as it takes; `with mutex.within(seconds):` raises TimeoutError. `busy(text)` makes the exception
    for the thread that has it already. `check`, if given, is called each time after it was taken."""

    def __cinit__(self, check=None, busy=RuntimeError):
        if not callable(busy) or check is not None and not callable(check):
            raise TypeError(f"check and busy must be callable, not {check!r}, {busy!r}")
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError("no memory for a lock")
        self.check = check
        self.busy = busy

    def __dealloc__(self):
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    cdef int take(self, double timeout_s) except -1:
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef long long until = now_ns() + <long long>(timeout_s * 1e9)
        cdef int status
        if self.holder == me:
            raise self.busy("this thread has the lock already: called from a signal handler that interrupted its own call")
        while True:
            with nogil:
                status = PyThread_acquire_lock_timed(self.lock, SLICE_US, 1)
            if status == PY_LOCK_ACQUIRED:
                break
            PyErr_CheckSignals()
            if now_ns() >= until:
                raise TimeoutError(f"the lock was not free within {timeout_s:.3f} s")
        self.holder = me
        if self.check is not None:
            try:
                self.check()
            except BaseException:
                self.give()
                raise
        return 0

    def give(self):
        """Give it back; only by the thread that has it."""
        self.holder = 0
        PyThread_release_lock(self.lock)

    @property
    def is_mine(self):
        """Does the calling thread have it?"""
        return self.holder == PyThread_get_thread_ident()

    def __enter__(self):
        self.take(1e9)

    def __exit__(self, *_):
        self.give()

    def within(self, double timeout_s):
        """A context manager that has the mutex, or raises TimeoutError when it is not free in time."""
        return Hold(self, timeout_s)


cdef class Hold:
    """One holding of a mutex with a deadline."""
    cdef Mutex mutex
    cdef double timeout_s

    def __init__(self, Mutex mutex, double timeout_s):
        self.mutex = mutex
        self.timeout_s = timeout_s

    def __enter__(self):
        self.mutex.take(self.timeout_s)

    def __exit__(self, *_):
        self.mutex.give()
