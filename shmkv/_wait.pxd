"""One wait of one thread for what another process does: on which word it sleeps, and how others end it."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._link cimport Patience


cdef enum:
    WAIT_NOT_YET = -1702            # an answer besides 0 and LINK_*: the turn is over, the deadline is not
    # Turns that end at no time:
    TURN_LOOK = 0                   # only a look
    TURN_ARM = -1                   # a look, and what is not there yet stays counted in: the caller sleeps (`_wait_any`)


cdef struct Sleeper:
    uint32_t asked                  # what other threads want; Patience.asked leads here
    uint64_t event                  # address of the word that is slept on, 0 = awake
    uint64_t waiters                # of the count beside it
    uint64_t epoch                  # of the process that is counted in
    uint32_t seen                   # what the word was before the look that was in vain, for who sleeps for it


cdef void sleeper_leave(Sleeper* sleeper) noexcept nogil
cdef void sleeper_end_turn(Sleeper* sleeper, int status, int64_t turn_ns) noexcept nogil
cdef void sleeper_count_in(Sleeper* sleeper, uint32_t* event, uint32_t* waiters) noexcept nogil
cdef uint32_t sleeper_seen(const Sleeper* sleeper) noexcept nogil
cdef int sleeper_sleep(Sleeper* sleeper, uint32_t seen, Patience* wait, int64_t turn_ns, bint watched) noexcept nogil
cdef int64_t wake_time(const Patience* wait, int64_t now, int64_t turn_ns, bint watched) noexcept nogil
cdef int run_due_signals(Patience* wait, int64_t now, int slept) noexcept nogil
cdef void sleeper_wake(Sleeper* sleeper) noexcept nogil


cdef class Ending:
    """What others may do to a wait."""
    cdef Sleeper sleeper
    cdef object __weakref__
    cdef void begin_turn(self, Patience* wait)
