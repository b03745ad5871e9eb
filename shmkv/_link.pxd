"""One process's end of a link: queue, word, liveness, deadline; and the peer's segments it maps."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._attached cimport AttachedTable
from shmkv._futex cimport ThreadQueue
from shmkv._layout cimport LinkRecord, LinkSide
from shmkv._kept_plans cimport KeptPlans
from shmkv._mapping cimport Region


cdef enum:
    # Answers besides 0.
    LINK_ENDED = -1301              # unlinked, by either side
    LINK_BUSY = -1302               # being removed, or this call interrupted a pull on its own thread
    LINK_PEER_GONE = -1303          # the peer died or finalized, or the link broke
    LINK_TIMEOUT = -1304
    LINK_INTERRUPTED = -1305        # a Python signal handler raised; its exception is pending
    LINK_CANCELLED = -1307          # by another thread of this process, through Patience.asked
    LINK_FORKED = -1306             # the handle belongs to the parent process


cdef enum:
    # *Patience.asked
    ASKED_NOTHING = 0
    ASKED_FOR_TURN = 1              # somebody else wants the thread, if it sleeps
    ASKED_TO_END = 2


cdef enum:
    SIGNALS_NS = 50000000           # how long a copy or a wait runs before Python signal handlers get a chance


cdef struct Patience:
    # How long a call may take, and what it has to do meanwhile.
    int64_t begin_ns
    int64_t entered_ns              # when the lock was had; begin_ns if nothing had to be waited for
    int64_t deadline_ns
    int64_t signals_ns              # last time that Python signal handlers could run
    bint is_main                    # only the main thread runs them
    bint enters_closing             # may enter while the link is closed to new calls: it removes it, or began before
    const uint32_t* asked           # where another thread of this process asks for things, NULL = nobody does


cdef enum:
    # Link.format_remark
    REMARK_NONE = 0
    REMARK_DUE = 1
    REMARK_MADE = 2


cdef struct Link:
    char* directory                 # the peer's; NULL while an acceptor has not needed it
    char* members
    int life_fd
    LinkRecord* record
    LinkSide* mine
    uint64_t serial
    uint64_t epoch
    uint32_t side
    uint32_t peer_slot
    uint64_t peer_incarnation
    const char* prefix              # path of the peer's cache segments up to the serial
    uint32_t users                  # threads inside a call
    uint32_t is_closing
    ThreadQueue queue               # all below: only by the thread at the head of the queue
    int64_t looked_ns               # last look at the peer's life byte
    int64_t retake_ns
    AttachedTable segments
    uint64_t unlinked_seen
    KeptPlans plans
    uint64_t fault                  # address at which the last move of the peer's private memory found no memory
    int format_remark               # whether somebody has to be told that the two sides' formats differ


cdef class LinkEnd:
    """A link as an object of Python, of the side that made it or of the other one."""
    cdef Link link
    cdef readonly Region directory  # the peer's; None while an acceptor has not needed it


cdef void patience_init(Patience* wait, int64_t timeout_ms)
cdef int link_enter(Link* link, Patience* wait) noexcept nogil
cdef void link_leave(Link* link) noexcept nogil
cdef bint is_forked(Link* link) noexcept nogil
cdef int look(Link* link) noexcept nogil
cdef int look_at_memory(Link* link) noexcept nogil
cdef int look_between_chunks(Link* link, Patience* wait) noexcept nogil
cdef bint is_cancelled(const Patience* wait) noexcept nogil
cdef int run_signals(Patience* wait) noexcept nogil
cdef int raise_pending() except -1
cdef bint is_inside() noexcept nogil
