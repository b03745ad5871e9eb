# cython: language_level=3, freethreading_compatible=True
"""A link as the cluster holds it that was linked to: the record stands in its own directory, and the peer made it.

It touches the record only when it acts itself: to remove the link, or to push. Pulls out of its caches need nothing of it. A record
is used for one link after the other, so an object is for one serial, and there is one object a serial: its queue is what lets no
more than one thread of this side come to the word.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._attached cimport table_clear, table_init
from shmkv._futex cimport load32_relaxed, load32_seq, load64_acquire, load64_relaxed, queue_init, store32_release
from shmkv._kept_plans cimport plans_free
from shmkv._layout cimport (
    LINK_BROKEN,
    LINK_LIVE,
    LINK_REMOVED,
    MEMBERS_MAX,
    SIDE_ACCEPTOR,
    SIDE_INITIATOR,
    LinkSide,
    directory_header,
    link_at,
    make_word,
)
from shmkv._life cimport process_epoch
from shmkv._link cimport (
    LINK_BUSY,
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    Link,
    Patience,
    link_enter,
    link_leave,
    look_at_memory,
    patience_init,
    raise_pending,
)
from shmkv._link_record cimport end_link, side_lives
from shmkv._mapping cimport Region

cdef uint64_t NOBODY = <uint64_t>-1     # no cluster's incarnation


cdef class AcceptedLink(LinkEnd):
    """The link with this serial in a record of the own directory. What the record says of the peer counts only while it has that
    serial, which every call asks."""

    def __cinit__(self, Region own, Region members, int life_fd, uint32_t slot, uint64_t serial):
        cdef Link* link = &self.link
        cdef LinkSide* side = &link_at(own.address, slot).sides[SIDE_INITIATOR]
        self.own = own
        self.members = members
        self.slot = slot
        self.serial = link.serial = serial
        self.cluster_id = load64_relaxed(&side.cluster_id)
        link.members = members.address
        link.life_fd = life_fd
        link.record = link_at(own.address, slot)
        link.side = SIDE_ACCEPTOR
        link.mine = &link.record.sides[SIDE_ACCEPTOR]
        link.epoch = process_epoch()
        link.peer_slot = load32_relaxed(&side.slot)
        link.peer_incarnation = load64_relaxed(&side.incarnation)
        if link.peer_slot >= MEMBERS_MAX:       # no linker wrote that
            link.peer_slot, link.peer_incarnation = 0, NOBODY
        queue_init(&link.queue)

    def __dealloc__(self):
        # In a forked child a thread of the parent may have been in the middle of changing them: left alone there.
        if self.link.epoch == process_epoch():
            table_clear(&self.link.segments)
            plans_free(&self.link.plans)

    def attach(self, Region directory, bytes prefix, bint by_system_calls=False):
        """Have the peer's directory, mapped read-only, and the path of its segments up to the serial: now it can be pushed to, into
        mapped segments or by system calls."""
        cdef Link* link = &self.link
        if self.directory is not None:
            return
        if table_init(&link.segments, by_system_calls, True) != 0:
            raise MemoryError("no memory for a table of mappings")
        self.prefix = prefix
        link.prefix = prefix
        link.unlinked_seen = load64_acquire(&directory_header(directory.address).segments_unlinked)
        self.directory = directory
        link.directory = directory.address

    def let_go(self):
        """After the end of the link: unmap what is the peer's. False while a thread is inside, which ends at its next look."""
        cdef Link* link = &self.link
        # seq_cst: a thread that comes in counts itself first and looks at the link then.
        if load32_seq(&link.users):
            return False
        table_clear(&link.segments)
        plans_free(&link.plans)
        link.directory = NULL
        self.directory = None
        return True

    def state(self):
        """The same without a look at the peer's life byte: a few loads, no system call."""
        return look_at_memory(&self.link)

    def break_off(self):
        """LIVE -> BROKEN: running pushes end at their next look."""
        end_link(self.link.record, make_word(self.serial, LINK_LIVE), LINK_BROKEN)

    def end(self, int64_t timeout_ms, bint force):
        """LIVE -> REMOVED: after our turn at the word, or at once if `force` or the peer is dead. False if the word could not be
        had in time; new pushes are refused meanwhile. Raises what a signal handler raised."""
        cdef Link* link = &self.link
        cdef int status
        if force or not side_lives(&link.record.sides[SIDE_INITIATOR], link.life_fd, link.members):
            end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_REMOVED)
            return True
        store32_release(&link.is_closing, True)
        status = self.end_in_turn(timeout_ms)
        if status == LINK_TIMEOUT or status == LINK_BUSY or status == LINK_INTERRUPTED or status == LINK_FORKED:
            store32_release(&link.is_closing, False)
            if status == LINK_INTERRUPTED:
                raise_pending()
            return False
        end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_REMOVED)      # nobody to wait for, or who could be
        return True

    cdef int end_in_turn(self, int64_t timeout_ms) noexcept:
        """The status comes back, whatever exception of a signal handler is pending."""
        cdef Link* link = &self.link
        cdef Patience wait
        cdef int status
        patience_init(&wait, timeout_ms)
        wait.enters_closing = True
        with nogil:
            status = link_enter(link, &wait)
            if status == 0:
                end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_REMOVED)
                link_leave(link)
        return status
