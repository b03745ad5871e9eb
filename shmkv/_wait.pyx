# cython: language_level=3, freethreading_compatible=True
"""Sleeping on an event word of `_layout` without a poll, and without holding anything but a count.

A waiter goes: `sleeper_count_in`, `sleeper_seen`, look, `sleeper_sleep`, and again from `sleeper_seen` on, until `sleeper_leave`.
Where somebody watches the peer's process (`waiting.py`) a sleep ends only when there is something to look at. Else it ends after a
slice of 20 ms, so that a dead peer is found out; and on the main thread after MAIN_SLICE_NS, because a signal that comes between
the last look and the sleep interrupts nothing.
"""
from libc.errno cimport EINTR

from shmkv._crash cimport crash_point
from shmkv._events cimport event_happens
from shmkv._futex cimport (
    SLICE_NS,
    add32_seq,
    exchange32_seq,
    exchange64_seq,
    futex_wait_until,
    load32_seq,
    load64_seq,
    now_ns,
    swap32_seq,
)
from shmkv._life cimport process_epoch
from shmkv._link cimport (
    ASKED_FOR_TURN,
    ASKED_NOTHING,
    ASKED_TO_END,
    LINK_CANCELLED,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    SIGNALS_NS,
    is_cancelled,
    patience_init,
    raise_pending,
    run_signals,
)
from shmkv._layout cimport DirectoryHeader, RowRecord, directory_header, row_at
from shmkv._mapping cimport Region

cdef enum:
    MAIN_SLICE_NS = 250000000


cdef void sleeper_count_in(Sleeper* sleeper, uint32_t* event, uint32_t* waiters) noexcept nogil:
    """From the next `sleeper_seen` on a change of what `event` stands for is not slept through."""
    sleeper_leave(sleeper)
    crash_point(b"counting-in")
    add32_seq(waiters, 1)
    crash_point(b"counted-in")
    sleeper.waiters = <uint64_t><size_t>waiters
    sleeper.epoch = process_epoch()
    exchange64_seq(&sleeper.event, <uint64_t><size_t>event)     # before the look at `asked`


cdef void sleeper_leave(Sleeper* sleeper) noexcept nogil:
    """Not in a child that a signal handler forked in the middle of a wait: the count is its parent's."""
    if exchange64_seq(&sleeper.event, 0) != 0 and sleeper.epoch == process_epoch():
        crash_point(b"counting-out")
        add32_seq(<uint32_t*><size_t>sleeper.waiters, <uint32_t>-1)
        crash_point(b"counted-out")


cdef void sleeper_end_turn(Sleeper* sleeper, int status, int64_t turn_ns) noexcept nogil:
    """At the end of each turn that ended in `status`."""
    if turn_ns != TURN_ARM or status != WAIT_NOT_YET:
        sleeper_leave(sleeper)


cdef uint32_t sleeper_seen(const Sleeper* sleeper) noexcept nogil:
    """The value to sleep on, loaded before the look. 0 if it is not counted in, and does not sleep then."""
    cdef uint64_t event = load64_seq(&sleeper.event)        # once: a wait that no thread is inside of is counted out by any
    return load32_seq(<const uint32_t*><size_t>event) if event != 0 else 0


cdef int sleeper_sleep(Sleeper* sleeper, uint32_t seen, Patience* wait, int64_t turn_ns, bint watched) noexcept nogil:
    """Sleep while the word is as it was seen: 0 (look again), WAIT_*, LINK_TIMEOUT or LINK_INTERRUPTED."""
    cdef int64_t now = now_ns()
    cdef int status = asked_of(sleeper, wait)
    if status != 0:
        return status
    crash_point(b"sleeping")
    status = futex_wait_until(<uint32_t*><size_t>sleeper.event, seen, wake_time(wait, now, turn_ns, watched), True)
    now = now_ns()
    status = run_due_signals(wait, now, status)
    if status != 0:
        return status
    status = asked_of(sleeper, wait)
    if status == 0 and now >= wait.deadline_ns:
        status = LINK_TIMEOUT
    elif status == 0 and now >= turn_ns:
        status = WAIT_NOT_YET
    return status


cdef int64_t wake_time(const Patience* wait, int64_t now, int64_t turn_ns, bint watched) noexcept nogil:
    """When a sleep ends that nobody ends."""
    cdef int64_t until = min(wait.deadline_ns, turn_ns)
    if not watched:
        return min(until, now + SLICE_NS)
    return min(until, now + MAIN_SLICE_NS) if wait.is_main else until


cdef int run_due_signals(Patience* wait, int64_t now, int slept) noexcept nogil:
    """After a sleep that ended in `slept`: 0 or LINK_INTERRUPTED."""
    return run_signals(wait) if slept == -EINTR or now - wait.signals_ns >= SIGNALS_NS else 0


cdef int asked_of(Sleeper* sleeper, const Patience* wait) noexcept nogil:
    if is_cancelled(wait):
        return LINK_CANCELLED
    return WAIT_NOT_YET if swap32_seq(&sleeper.asked, ASKED_FOR_TURN, ASKED_NOTHING) else 0


cdef void sleeper_wake(Sleeper* sleeper) noexcept nogil:
    """On another thread of the process: let it look again. What it is to see was stored before. The word belongs to others as
    well, who look for nothing: but for the add, a wake that comes between the look and the sleep would be lost."""
    cdef uint64_t event = load64_seq(&sleeper.event)
    if event != 0:
        event_happens(<uint32_t*><size_t>event)


cdef class Ending:
    def wake(self):
        """Let the waiting thread look again, if there is one."""
        with nogil:
            sleeper_wake(&self.sleeper)

    def cancel(self):
        """The wait ends, now or when it begins."""
        exchange32_seq(&self.sleeper.asked, ASKED_TO_END)
        self.wake()

    def ask_for_turn(self):
        """The thread is wanted: the wait is answered "not yet", and goes on later."""
        swap32_seq(&self.sleeper.asked, ASKED_NOTHING, ASKED_FOR_TURN)
        self.wake()

    def count_out(self):
        """Nobody needs to tell it anything any more; twice is no error. Only on the thread that is inside, or
        when none is."""
        sleeper_leave(&self.sleeper)

    @property
    def has_news(self):
        """Of a wait that is counted in and does not sleep itself: is there something to look at?"""
        return self.sleeper.event == 0 or sleeper_seen(&self.sleeper) != self.sleeper.seen

    @property
    def is_cancelled(self):
        """Was it cancelled?"""
        return load32_seq(&self.sleeper.asked) == ASKED_TO_END

    cdef void begin_turn(self, Patience* wait):
        """The calling thread goes on with a wait that another one may have begun: the deadline is still the first one."""
        cdef int64_t deadline = wait.deadline_ns
        patience_init(wait, 0)
        wait.deadline_ns = deadline
        wait.asked = &self.sleeper.asked


cdef class EventWait(Ending):
    """A wait on a word of the own directory: count in, `see`, look, `sleep` if that was in vain, and again; then `count_out`."""
    cdef Region directory

    def __init__(self, Region directory):
        self.directory = directory

    def count_in_for_memory(self):
        """Those who may have freed something say so from now on."""
        cdef DirectoryHeader* header = directory_header(self.directory.address)
        sleeper_count_in(&self.sleeper, &header.memory_event, &header.memory_waiters)

    def count_in_for_keys(self):
        """Keys and caches that are bound or made."""
        cdef DirectoryHeader* header = directory_header(self.directory.address)
        sleeper_count_in(&self.sleeper, &header.key_event, &header.key_waiters)

    def count_in_for_row(self, uint32_t number):
        """What becomes of a row; `number`: of its record."""
        cdef RowRecord* row = row_at(self.directory.address, number)
        sleeper_count_in(&self.sleeper, &row.event, &row.progress_waiters)

    def see(self):
        """Before each look."""
        self.sleeper.seen = sleeper_seen(&self.sleeper)

    def sleep(self, int64_t deadline_ns, int64_t turn_ns, bint watched):
        """0: look again. Else WAIT_* or LINK_TIMEOUT; raises what a signal handler raised. Times are CLOCK_MONOTONIC; `watched`:
        somebody wakes this wait when another process dies for which it may have to look."""
        cdef Patience wait
        cdef int status
        wait.deadline_ns = deadline_ns
        self.begin_turn(&wait)
        with nogil:
            status = sleeper_sleep(&self.sleeper, self.sleeper.seen, &wait, turn_ns, watched)
        if status == LINK_INTERRUPTED:
            raise_pending()
        return status


NOT_YET = WAIT_NOT_YET
LOOK_NS, ARM_NS = TURN_LOOK, TURN_ARM
