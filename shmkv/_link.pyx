# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Getting a link's lock and giving it back, whatever happens to either side meanwhile.

`link_enter` is the only way in: first the queue of this process's threads, then the word in shared memory, one deadline for
both. Every wait comes back after a slice and looks at signals, link, peer and deadline (`after_slice`). Nobody takes a dead
holder's lock over: the link becomes BROKEN, and linking again makes a new record.
"""
import os
import threading

from cpython.pythread cimport PyThread_get_thread_ident
from libc.errno cimport EBADMSG, EBUSY, EINTR

from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    Waiter,
    add32_seq,
    load32_acquire,
    load32_seq,
    load64_acquire,
    load64_seq,
    now_ns,
    queue_enter,
    queue_give_up,
    queue_leave,
    queue_wait_slice,
    word_give_up,
    word_release,
    word_try,
    word_wait_slice,
)
from shmkv._layout cimport (
    DIRECTORY_OPEN,
    LINK_BROKEN,
    LINK_LIVE,
    LINK_REMOVED,
    SIDE_INITIATOR,
    directory_header,
    make_word,
    member_at,
    word_generation,
    word_state,
)
from shmkv._life cimport life_look, process_epoch
from shmkv._link_record cimport end_link

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept

cdef extern from *:
    """
    /* Is this thread inside a link? A signal handler that interrupted it must not wait for itself. */
    static __thread int thread_inside_link;
    static inline int thread_is_inside(void) { return thread_inside_link; }
    static inline void thread_set_inside(int inside) { thread_inside_link = inside; }
    """
    bint thread_is_inside() noexcept nogil
    void thread_set_inside(bint inside) noexcept nogil

cdef enum:
    LOOK_NS = 1000000               # how old the last look at the peer's life byte may be

cdef unsigned long main_thread = threading.main_thread().ident


def _find_main_thread():
    """In a forked child the thread that forked is the main thread. A pull that it was inside of, when a signal handler forked, is
    its parent's."""
    global main_thread
    main_thread = threading.main_thread().ident
    thread_set_inside(False)


os.register_at_fork(after_in_child=_find_main_thread)


cdef void patience_init(Patience* wait, int64_t timeout_ms):
    wait.begin_ns = wait.entered_ns = wait.signals_ns = now_ns()
    wait.deadline_ns = wait.begin_ns + timeout_ms * 1000000
    wait.is_main = PyThread_get_thread_ident() == main_thread
    wait.enters_closing = False
    wait.asked = NULL


cdef bint is_inside() noexcept nogil:
    """Is the calling thread inside a pull, so that this is a signal handler that interrupted it?"""
    return thread_is_inside()


cdef int raise_pending() except -1:
    """Let the exception out that a signal handler raised."""
    return -1


# -- looking ---------------------------------------------------------------------------------------------------------

cdef int state_of_record(Link* link) noexcept nogil:
    cdef uint64_t state
    if link.epoch != process_epoch():
        return LINK_FORKED
    # seq_cst: the count of users went up before, and whoever closes the record looks at it after ending the link.
    state = load64_seq(&link.record.state)
    if word_generation(state) != link.serial or word_state(state) == LINK_REMOVED:
        return LINK_ENDED
    return 0 if word_state(state) == LINK_LIVE else LINK_PEER_GONE


cdef int look_at_memory(Link* link) noexcept nogil:
    """What shared memory says of the link and of the peer: a few loads, no system call."""
    cdef int status = state_of_record(link)
    if status != 0:
        return status
    if link.directory != NULL and load32_acquire(&directory_header(link.directory).state) != DIRECTORY_OPEN:
        return LINK_PEER_GONE
    if load64_acquire(&member_at(link.members, link.peer_slot).incarnation) != link.peer_incarnation:
        return LINK_PEER_GONE
    return 0


cdef int look(Link* link) noexcept nogil:
    """A fresh look at the link, at the peer and at its life byte: 0 or LINK_*. Changes nothing, waits for nothing."""
    cdef int status = look_at_memory(link)
    if status != 0:
        return status
    return 0 if life_look(link.life_fd, link.peer_slot) != 0 else LINK_PEER_GONE


cdef int look_sometimes(Link* link, int64_t now) noexcept nogil:
    """As `look`, but the life byte (a system call) only if the last look that found it held is over LOOK_NS old. A peer that is
    gone breaks the link, so that nothing brings it back."""
    cdef int status
    if now - link.looked_ns < LOOK_NS:
        status = look_at_memory(link)
    else:
        status = look(link)
        if status == 0:
            link.looked_ns = now
    if status == LINK_PEER_GONE:
        end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_BROKEN)
    return status


cdef bint is_cancelled(const Patience* wait) noexcept nogil:
    """Has another thread of this process ended the call?"""
    return wait.asked != NULL and load32_seq(wait.asked) == ASKED_TO_END


cdef int run_signals(Patience* wait) noexcept nogil:
    """Let Python signal handlers run: 0, or LINK_INTERRUPTED with the exception pending. Only the main thread runs any, and
    taking the GIL back can cost a switch interval, so nobody else asks."""
    cdef int raised = 0
    if wait.is_main:
        with gil:
            raised = PyErr_CheckSignals()
        wait.signals_ns = now_ns()
    return LINK_INTERRUPTED if raised else 0


cdef int after_slice(Link* link, Patience* wait, int waited) noexcept nogil:
    """What every wait does when it comes back without its turn."""
    cdef int64_t now = now_ns()
    cdef int status = 0
    # A signal that came between two waits, or to another thread, interrupts nothing here.
    if waited == -EINTR or now - wait.signals_ns >= SIGNALS_NS:
        status = run_signals(wait)
    if status == 0 and is_cancelled(wait):
        status = LINK_CANCELLED
    if status == 0:
        status = look(link)
    if status == 0 and now >= wait.deadline_ns:
        status = LINK_TIMEOUT
    return status


cdef int look_between_chunks(Link* link, Patience* wait) noexcept nogil:
    """What a long copy does every few MiB."""
    cdef int64_t now = now_ns()
    cdef int status = look_sometimes(link, now)
    if status == 0 and is_cancelled(wait):
        status = LINK_CANCELLED
    if status == 0 and now >= wait.deadline_ns:
        status = LINK_TIMEOUT
    if status == 0 and wait.is_main and now - wait.signals_ns >= SIGNALS_NS:
        status = run_signals(wait)
    return status


# -- in and out ------------------------------------------------------------------------------------------------------

cdef bint is_forked(Link* link) noexcept nogil:
    """Is this a child that a signal handler forked in the middle of a call, whatever it raised there? Its parent's record and queue
    are not its own."""
    return link.epoch != process_epoch()


cdef int link_enter(Link* link, Patience* wait) noexcept nogil:
    """Our turn in this process, then the word. 0 (then call link_leave) or LINK_*."""
    cdef Waiter me
    cdef int status
    if thread_is_inside():
        return LINK_BUSY
    thread_set_inside(True)
    add32_seq(&link.users, 1)
    status = state_of_record(link)
    if status == 0 and load32_acquire(&link.is_closing) and not wait.enters_closing:
        status = LINK_BUSY
    if status == 0 and not queue_enter(&link.queue, &me):
        status = wait_in_queue(link, wait, &me)
    if status == 0:
        status = look_sometimes(link, wait.entered_ns)
        if status == 0:
            status = open_side(link)
        if status == 0:
            status = take_word(link, wait)
            if status == 0:
                crash_point(b"word-taken")
                return 0
            shut_side(link)
        if not is_forked(link):
            queue_leave(&link.queue)
    if not is_forked(link):
        add32_seq(&link.users, <uint32_t>-1)
    thread_set_inside(False)
    return status


cdef void link_leave(Link* link) noexcept nogil:
    if is_forked(link):
        thread_set_inside(False)
        return
    crash_point(b"word-releasing")
    link.retake_ns = word_release(&link.record.word, link.side)
    crash_point(b"word-released")
    shut_side(link)
    queue_leave(&link.queue)
    add32_seq(&link.users, <uint32_t>-1)
    thread_set_inside(False)


cdef int open_side(Link* link) noexcept nogil:
    """An acceptor's side is open only while a thread of it may touch the record: nobody uses that again meanwhile, and its peer
    goes on to look at it. Open first, then look: 0, or LINK_* if the link was over by then. A count and no flag, so that who comes
    late with a link that is over does not shut the side of those who use the next one. An initiator's side is open as long as its
    handle.
    """
    cdef int status
    if link.side == SIDE_INITIATOR:
        return 0
    crash_point(b"acceptor-opening")
    add32_seq(&link.mine.open, 1)
    crash_point(b"acceptor-opened")
    status = state_of_record(link)
    if status != 0:
        shut_side(link)
    return status


cdef void shut_side(Link* link) noexcept nogil:
    """The end of `open_side`, after the last access to the record."""
    if link.side == SIDE_INITIATOR or is_forked(link):
        return
    crash_point(b"acceptor-shutting")
    add32_seq(&link.mine.open, <uint32_t>-1)


cdef int wait_in_queue(Link* link, Patience* wait, Waiter* me) noexcept nogil:
    cdef int waited, status
    while True:
        waited = queue_wait_slice(me, wait.deadline_ns)
        if waited == 0:
            wait.entered_ns = now_ns()
            return 0
        status = after_slice(link, wait, waited)
        if status != 0:
            if not is_forked(link) and queue_give_up(&link.queue, me):
                queue_leave(&link.queue)
            return status


cdef int take_word(Link* link, Patience* wait) noexcept nogil:
    """The head of the queue takes the link's word."""
    cdef int waited = word_try(&link.record.word, link.side, link.retake_ns)
    cdef int status
    while waited != 0:
        if waited == -EBADMSG:
            end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_BROKEN)
            return LINK_PEER_GONE
        if waited != -EBUSY:
            status = after_slice(link, wait, waited)
            if status != 0:
                return stop_waiting(link, status)
        waited = word_wait_slice(&link.record.word, link.side, wait.deadline_ns, link.retake_ns)
        wait.entered_ns = now_ns()
    status = state_of_record(link)
    if status != 0:
        link.retake_ns = word_release(&link.record.word, link.side)
    return status


cdef int stop_waiting(Link* link, int status) noexcept nogil:
    """The wait is over without the word; a dead holder breaks the link."""
    if is_forked(link):
        return status
    if status == LINK_PEER_GONE:
        end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_BROKEN)
    link.retake_ns = word_give_up(&link.record.word, link.side, link.retake_ns)
    return status


cdef class LinkEnd:
    """`_link_handle` and `_acceptor` fill it in."""

    def look(self):
        """0 if the link can be used, else LINK_ENDED, LINK_PEER_GONE or LINK_FORKED; changes and waits for nothing."""
        return look(&self.link)

    @property
    def peer_slot(self):
        """Member slot of the cluster at the other end."""
        return self.link.peer_slot

    @property
    def peer_incarnation(self):
        """Of the cluster at the other end, when the link was made."""
        return self.link.peer_incarnation

    @property
    def users(self):
        """Threads of this process inside a call on the link."""
        return load32_seq(&self.link.users)

    @property
    def fault(self):
        """For messages: the address, the peer's or one of this process, at which the last move of the peer's private memory found
        no memory."""
        return self.link.fault


ENDED, BUSY, PEER_GONE = LINK_ENDED, LINK_BUSY, LINK_PEER_GONE
TIMEOUT, INTERRUPTED, CANCELLED, FORKED = LINK_TIMEOUT, LINK_INTERRUPTED, LINK_CANCELLED, LINK_FORKED


def inside_call() -> bool:
    """Did the calling code interrupt a pull on its own thread (a signal handler)?"""
    return is_inside()
