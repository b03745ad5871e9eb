# cython: language_level=3, freethreading_compatible=True
"""One sleep of one thread for several waits.

Each of them has looked in vain and is counted in at a word of its own (`_wait.TURN_ARM`); the thread sleeps on all these words at
once. Where that cannot be (a kernel before 5.16, a filter that keeps futex_waitv back, more words than it takes) the sleep ends
after a slice of 20 ms.
"""
from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    FUTEX_SLEPT_MOST,
    SLICE_NS,
    futex_slept,
    futex_slept_set,
    futex_wait_any,
    futex_wait_until,
    load64_seq,
    now_ns,
)
from shmkv._link cimport LINK_INTERRUPTED, LINK_TIMEOUT, Patience, patience_init, raise_pending
from shmkv._wait cimport Ending, run_due_signals, sleeper_seen, wake_time


cdef class Bell(Ending):
    """A word of this process alone. Among the waits of a sleep, `wake` ends that sleep: the thread is wanted for something else."""
    cdef uint32_t word

    def __cinit__(self):
        self.sleeper.event = <uint64_t><size_t>&self.word

    def see(self):
        """From now on a `wake` is not slept through."""
        self.sleeper.seen = sleeper_seen(&self.sleeper)


def sleep_any(list waits, int64_t deadline_ns, bint watched):
    """Until one of `waits` (Ending) may have something to look at: 0 or LINK_TIMEOUT. Raises what a signal handler raised, and
    MemoryError. `deadline_ns`: CLOCK_MONOTONIC; `watched`: somebody wakes all of them when a process dies that they wait for."""
    cdef uint32_t count = len(waits)
    cdef futex_slept* words = <futex_slept*>calloc(max(count, 1), sizeof(futex_slept))
    cdef Patience wait
    cdef int status
    if words == NULL:
        raise MemoryError(f"no memory to wait for {count} rows")
    try:
        count = gather(words, waits)
        patience_init(&wait, 0)
        wait.deadline_ns = deadline_ns
        with nogil:
            status = sleep_on_words(words, count, &wait, watched) if count else 0
    finally:
        free(words)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


cdef uint32_t gather(futex_slept* words, list waits):
    """The words of all waits, one that neighbours share only once: how many; 0 if one of them is not counted in any more."""
    cdef uint64_t event
    cdef uint32_t count = 0
    cdef Ending each
    for each in waits:
        event = load64_seq(&each.sleeper.event)
        if event == 0:
            return 0
        if count == 0 or words[count - 1].address != event or words[count - 1].value != each.sleeper.seen:
            futex_slept_set(&words[count], event, each.sleeper.seen)
            count += 1
    return count


cdef int sleep_on_words(futex_slept* words, uint32_t count, Patience* wait, bint watched) noexcept nogil:
    """0, LINK_TIMEOUT or LINK_INTERRUPTED."""
    cdef int64_t now = now_ns()
    cdef int64_t until = wake_time(wait, now, wait.deadline_ns, watched)
    cdef int slept = -1, status
    crash_point(b"sleeping")
    if count <= FUTEX_SLEPT_MOST:
        slept = futex_wait_any(words, count, until)
    if slept != 0 and slept != -EAGAIN and slept != -EINTR and slept != -ETIMEDOUT:
        slept = futex_wait_until(<uint32_t*><size_t>words.address, <uint32_t>words.value, min(until, now + SLICE_NS), True)
    now = now_ns()
    status = run_due_signals(wait, now, slept)
    return LINK_TIMEOUT if status == 0 and now >= wait.deadline_ns else status
