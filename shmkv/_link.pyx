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

from shmkv._futex cimport (
    Waiter,
    add32_seq,
    load32_acquire,
    load32_relaxed,
    load32_seq,
    load64_acquire,
    load64_relaxed,
    load64_seq,
    now_ns,
    queue_enter,
    queue_give_up,
    queue_init,
    queue_leave,
    queue_wait_slice,
    store32_release,
    store64_release,
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
    MEMBERS_MAX,
    SIDE_ACCEPTOR,
    SIDE_CLOSED,
    SIDE_INITIATOR,
    directory_header,
    link_at,
    make_word,
    member_at,
    word_generation,
    word_state,
)
from shmkv._life cimport life_look, process_epoch
from shmkv._link_record cimport end_link, is_idle
from shmkv._mapping cimport table_clear, table_init
from shmkv._plan cimport plans_free

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
    """In a forked child the thread that forked is the main thread."""
    global main_thread
    main_thread = threading.main_thread().ident


os.register_at_fork(after_in_child=_find_main_thread)


cdef void patience_init(Patience* wait, int64_t timeout_ms):
    wait.begin_ns = wait.entered_ns = wait.signals_ns = now_ns()
    wait.deadline_ns = wait.begin_ns + timeout_ms * 1000000
    wait.is_main = PyThread_get_thread_ident() == main_thread
    wait.removes = False


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
    if load32_acquire(&directory_header(link.directory).state) != DIRECTORY_OPEN:
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
    if status == 0:
        status = look(link)
    if status == 0 and now >= wait.deadline_ns:
        status = LINK_TIMEOUT
    return status


cdef int look_between_chunks(Link* link, Patience* wait) noexcept nogil:
    """What a long copy does every few MiB."""
    cdef int64_t now = now_ns()
    cdef int status = look_sometimes(link, now)
    if status == 0 and now >= wait.deadline_ns:
        status = LINK_TIMEOUT
    if status == 0 and wait.is_main and now - wait.signals_ns >= SIGNALS_NS:
        status = run_signals(wait)
    return status


# -- in and out ------------------------------------------------------------------------------------------------------

cdef bint is_forked(Link* link) noexcept nogil:
    """Is this a child that a signal handler forked in the middle of a call? Its parent's record and queue are not its own."""
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
    if status == 0 and load32_acquire(&link.is_closing) and not wait.removes:
        status = LINK_BUSY
    if status == 0 and not queue_enter(&link.queue, &me):
        status = wait_in_queue(link, wait, &me)
    if status == 0:
        status = look_sometimes(link, wait.entered_ns)
        if status == 0:
            status = take_word(link, wait)
        if status == 0:
            return 0
        if status != LINK_FORKED:
            queue_leave(&link.queue)
    if status != LINK_FORKED:
        add32_seq(&link.users, <uint32_t>-1)
    thread_set_inside(False)
    return status


cdef void link_leave(Link* link) noexcept nogil:
    if is_forked(link):
        thread_set_inside(False)
        return
    link.retake_ns = word_release(&link.record.word, link.side)
    queue_leave(&link.queue)
    add32_seq(&link.users, <uint32_t>-1)
    thread_set_inside(False)


cdef int wait_in_queue(Link* link, Patience* wait, Waiter* me) noexcept nogil:
    cdef int waited, status
    while True:
        waited = queue_wait_slice(me, wait.deadline_ns)
        if waited == 0:
            wait.entered_ns = now_ns()
            return 0
        status = after_slice(link, wait, waited)
        if status != 0:
            if status != LINK_FORKED and queue_give_up(&link.queue, me):
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
    if status == LINK_FORKED:
        return status
    if status == LINK_PEER_GONE:
        end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_BROKEN)
    link.retake_ns = word_give_up(&link.record.word, link.side, link.retake_ns)
    return status


# -- the handle ------------------------------------------------------------------------------------------------------

cdef class LinkHandle:
    """Made under the cold lock, right after the record was claimed.

    `directory` is the peer's, mapped writable; `prefix` the path of the peer's segments up to the serial number.
    """

    def __cinit__(self, Region directory, Region members, int life_fd, uint32_t slot, bytes prefix):
        cdef Link* link = &self.link
        self.directory = directory
        self.members = members
        self.prefix = prefix
        link.directory = directory.address
        link.members = members.address
        link.life_fd = life_fd
        link.record = link_at(directory.address, slot)
        link.side = SIDE_INITIATOR
        link.mine = &link.record.sides[SIDE_INITIATOR]
        link.serial = word_generation(load64_seq(&link.record.state))
        link.peer_slot = load32_relaxed(&link.record.sides[SIDE_ACCEPTOR].slot)
        link.peer_incarnation = load64_relaxed(&link.record.sides[SIDE_ACCEPTOR].incarnation)
        link.prefix = prefix
        link.epoch = process_epoch()
        link.unlinked_seen = load64_acquire(&directory_header(directory.address).segments_unlinked)
        queue_init(&link.queue)
        self.slot = slot
        self.cluster_id = load64_relaxed(&link.record.sides[SIDE_ACCEPTOR].cluster_id)
        if link.peer_slot >= MEMBERS_MAX:
            raise ValueError(f"the link record names member slot {link.peer_slot} of {MEMBERS_MAX}")
        if table_init(&link.segments) != 0:
            raise MemoryError("no memory for a table of mappings")

    def __dealloc__(self):
        # In a forked child a thread of the parent may have been in the middle of changing them: left alone there.
        if self.link.epoch == process_epoch():
            table_clear(&self.link.segments)
            plans_free(&self.link.plans)

    def look(self):
        """0 if the link can be used, else LINK_ENDED, LINK_PEER_GONE or LINK_FORKED; changes and waits for nothing."""
        return look(&self.link)

    def segment_path(self, uint64_t serial):
        """Path of one of the peer's cache segments."""
        return self.prefix.decode() + f"{serial:x}"

    @property
    def address(self):
        """Address of the record in this process."""
        return <size_t>self.link.record

    @property
    def peer_slot(self):
        """Member slot of the cluster at the other end."""
        return self.link.peer_slot

    @property
    def peer_is_idle(self):
        """Does the peer's side of the record name no cache of ours?"""
        return is_idle(&self.link.record.sides[SIDE_ACCEPTOR])

    @property
    def users(self):
        """Threads of this process inside a call on the link."""
        return load32_seq(&self.link.users)

    @property
    def word(self):
        """The lock word without its waiters bit: 0 free, 1 / 2 held by the peer / by us, 3 / 4 offered to them."""
        return load32_acquire(&self.link.record.word) & 0x7FFFFFFF

    @property
    def counters(self):
        """(pulls, bytes, ns waited, ns copied, failed, timed out) of this side."""
        return tuple(load64_relaxed(&self.link.mine.counters[i]) for i in range(6))

    @property
    def is_closing(self):
        """Is the link being removed?"""
        return load32_acquire(&self.link.is_closing) != 0

    def mark_closing(self, bint closing):
        """While set, new calls answer LINK_BUSY."""
        store32_release(&self.link.is_closing, closing)

    def remove(self, int64_t timeout_ms):
        """Take the lock, then LIVE -> REMOVED: 0 or LINK_*. Calls that already wait go first."""
        cdef Patience wait
        cdef int status
        patience_init(&wait, timeout_ms)
        wait.removes = True
        with nogil:
            status = link_enter(&self.link, &wait)
            if status == 0:
                end_link(self.link.record, make_word(self.link.serial, LINK_LIVE), LINK_REMOVED)
                link_leave(&self.link)
        if status == LINK_INTERRUPTED:
            raise_pending()
        return status

    def force_remove(self):
        """LIVE -> REMOVED without waiting for anything; running calls end at their next look."""
        end_link(self.link.record, make_word(self.link.serial, LINK_LIVE), LINK_REMOVED)

    def close_side(self):
        """Give our side of the record back, when no thread is inside and nobody else used the record since."""
        cdef Link* link = &self.link
        if link.epoch == process_epoch() and word_generation(load64_seq(&link.record.state)) == link.serial:
            store64_release(&link.mine.hazard, 0)
            store32_release(&link.mine.open, SIDE_CLOSED)


ENDED = LINK_ENDED
BUSY = LINK_BUSY
PEER_GONE = LINK_PEER_GONE
TIMEOUT = LINK_TIMEOUT
INTERRUPTED = LINK_INTERRUPTED
FORKED = LINK_FORKED


def inside_call() -> bool:
    """Did the calling code interrupt a pull on its own thread (a signal handler)?"""
    return is_inside()
