# cython: language_level=3, freethreading_compatible=True
"""The cold lock of a namespace: a mutex of this process, then one byte of the life file.

Compiled for the same reason as `_mutex`: entering and leaving have no gap for a signal handler, only the wait has.
"""
import logging
import time

from cpython.exc cimport PyErr_CheckSignals

from shmkv._mutex cimport Mutex
from shmkv import _life
from shmkv.errors import LLMException
from shmkv.pauses import Pauses

log = logging.getLogger("shmkv")


cdef class ColdLock:
    """A context manager that has the cold lock, or raises LLMException when it is not free by `deadline` (time.monotonic).

    `check`, if given, is called once it was taken; what it raises gives the lock back.
    """
    cdef Mutex mutex
    cdef int life_fd
    cdef double deadline
    cdef str namespace
    cdef object check

    def __init__(self, Mutex mutex, int life_fd, double deadline, str namespace, check=None):
        self.mutex, self.life_fd, self.deadline, self.namespace, self.check = mutex, life_fd, deadline, namespace, check

    def __enter__(self):
        try:
            self.mutex.take(max(0.0, self.deadline - time.monotonic()))
        except TimeoutError as error:
            raise LLMException(f"another thread of this process is joining or linking in namespace {self.namespace!r}") from error
        try:
            # A record lock that is waited for cannot time out, so it is polled.
            pauses = Pauses()
            while not _life.hold_cold(self.life_fd):
                PyErr_CheckSignals()        # of a signal that came between two sleeps: nothing else here would see it
                if time.monotonic() >= self.deadline:
                    pid = _life.cold_holder_pid(self.life_fd)
                    raise LLMException(f"process {pid or 'of another pid namespace'} holds the cold lock of namespace "
                                       f"{self.namespace!r}")
                pauses.sleep()
            if self.check is not None:
                self.check()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        try:
            _life.drop_cold(self.life_fd)   # harmless if an interrupt came before it was ours
        except OSError as error:
            # What was done under the lock is done. This process takes the byte again without a wait, and gives it back then.
            log.warning("the cold lock of namespace %r stays with this process: %s", self.namespace, error)
        finally:
            self.mutex.give()
