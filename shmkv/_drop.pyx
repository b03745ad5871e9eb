# cython: language_level=3, freethreading_compatible=True
"""What happens when the last reference to something goes: an object is put into a queue, and nothing else.

Done in `__dealloc__`, where no signal handler runs, no lock is taken, and no module global may be gone already.
"""
from collections import deque

cimport cython
from libc.stdint cimport uint64_t

from shmkv._life cimport process_epoch


@cython.no_gc_clear                # as OnDrop, by which it is used
cdef class DropQueue:
    """A queue for OnDrop that calls `told.memory_freed()`, a method written in C, after each item that was put in."""
    cdef object items
    cdef object told

    def __cinit__(self, told):
        if not callable(getattr(told, "memory_freed", None)):
            raise TypeError(f"memory_freed of {told!r} cannot be called")
        self.items = deque()
        self.told = told

    def append(self, item):
        """Put in at the end."""
        self.items.append(item)
        self.told.memory_freed()

    def popleft(self):
        """Take the oldest out; IndexError if there is none."""
        return self.items.popleft()

    def __len__(self):
        return len(self.items)


@cython.no_gc_clear                # used in __dealloc__, also when the garbage collector breaks a cycle
cdef class OnDrop:
    """Appends `item` to `queue` (a deque) when it goes, unless it was disarmed or this is a forked child."""
    cdef object queue
    cdef object item
    cdef uint64_t epoch

    def __cinit__(self, queue, item):
        if not isinstance(queue, (deque, DropQueue)):
            raise TypeError(f"the queue must be a deque or a DropQueue, not {queue!r}")
        self.queue = queue
        self.item = item
        self.epoch = process_epoch()

    def __dealloc__(self):
        if self.item is not None and self.epoch == process_epoch():
            self.queue.append(self.item)

    def disarm(self):
        """Nothing is to be dropped any more."""
        self.item = None
