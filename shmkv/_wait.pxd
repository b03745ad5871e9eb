"""One wait of one thread for what another process does: on which word it sleeps, and how others end it."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._link cimport Patience


cdef enum:
    # Answers besides 0 and LINK_*.
    WAIT_CANCELLED = -1701          # by another thread of this process
    WAIT_NOT_YET = -1702            # the turn is over, the deadline is not


cdef enum:
    # Sleeper.asked
    ASKED_NOTHING = 0
    ASKED_FOR_TURN = 1              # somebody else of this process wants the thread
    ASKED_TO_END = 2


cdef struct Sleeper:
    uint32_t asked
    uint64_t event                  # address of the word that is slept on, 0 = awake
    uint64_t waiters                # of the count beside it
    uint64_t epoch                  # of the process that is counted in


cdef void sleeper_leave(Sleeper* sleeper) noexcept nogil
cdef void sleeper_count_in(Sleeper* sleeper, uint32_t* event, uint32_t* waiters) noexcept nogil
cdef uint32_t sleeper_seen(const Sleeper* sleeper) noexcept nogil
cdef int sleeper_sleep(Sleeper* sleeper, uint32_t seen, Patience* wait, int64_t turn_ns, bint watched) noexcept nogil
cdef void sleeper_wake(Sleeper* sleeper) noexcept nogil
cdef bint is_cancelled(const Sleeper* sleeper) noexcept nogil


cdef class Ending:
    """What others may do to a wait."""
    cdef Sleeper sleeper
    cdef object __weakref__
