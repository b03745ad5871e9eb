# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""A link as its initiator holds it: made after the record was claimed, given back when no call is inside.

The calls themselves are in `_link`; this object keeps alive what their addresses point to.
"""
import weakref

from shmkv._crash cimport crash_point
from shmkv._attached cimport table_clear, table_init
from shmkv._futex cimport (
    load32_acquire,
    load32_relaxed,
    load32_seq,
    load64_acquire,
    load64_relaxed,
    load64_seq,
    queue_init,
    store32_release,
    store64_release,
)
from shmkv._kept_plans cimport plans_free
from shmkv._layout cimport (
    LINK_LIVE,
    LINK_REMOVED,
    MEMBERS_MAX,
    SIDE_ACCEPTOR,
    SIDE_CLOSED,
    SIDE_INITIATOR,
    LinkSide,
    directory_header,
    link_at,
    make_word,
    word_generation,
)
from shmkv._lease cimport leases_taken
from shmkv._life cimport process_epoch
from shmkv._link cimport (
    LINK_INTERRUPTED,
    REMARK_DUE,
    REMARK_MADE,
    Link,
    Patience,
    link_enter,
    link_leave,
    patience_init,
    raise_pending,
)
from shmkv._link_record cimport end_link, is_idle, side_lives


cdef class LinkHandle(LinkEnd):
    """Made under the cold lock, right after the record was claimed.

    `directory` is the peer's, mapped writable; `prefix` the path of its segments up to the serial; `by_pread` and `writable`: as in
    `_attached`; writable for those who push over it as well.
    """

    def __cinit__(self, Region directory, Region members, int life_fd, uint32_t slot, bytes prefix, bint by_pread=False,
                  bint writable=False):
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
        self.followers = weakref.WeakSet()
        self.slot = slot
        self.cluster_id = load64_relaxed(&link.record.sides[SIDE_ACCEPTOR].cluster_id)
        if link.peer_slot >= MEMBERS_MAX:
            raise ValueError(f"the link record names member slot {link.peer_slot} of {MEMBERS_MAX}")
        if table_init(&link.segments, by_pread, writable) != 0:
            raise MemoryError("no memory for a table of mappings")

    def __dealloc__(self):
        # In a forked child a thread of the parent may have been in the middle of changing them: left alone there.
        if self.link.epoch == process_epoch():
            table_clear(&self.link.segments)
            plans_free(&self.link.plans)

    def segment_path(self, uint64_t serial):
        """Path of one of the peer's cache segments."""
        return self.prefix.decode() + f"{serial:x}"

    @property
    def address(self):
        """Address of the record in this process."""
        return <size_t>self.link.record

    @property
    def peer_is_idle(self):
        """Asked after the link was ended: will the peer's side of the record name no cache of ours any more? It is closed and says
        none, or dead."""
        cdef LinkSide* side = &self.link.record.sides[SIDE_ACCEPTOR]
        # seq_cst: the link was ended before, and an acceptor looks at the link after it has opened its side.
        if load32_seq(&side.open) == SIDE_CLOSED and is_idle(side):
            return True
        return not side_lives(side, self.link.life_fd, self.link.members)

    @property
    def leases(self):
        """How many caches of the peer this side keeps by a lease."""
        return leases_taken(self.link.mine)

    def take_remark(self):
        """True once, after a pull between caches of different kv_tensor_formats."""
        if self.link.format_remark != REMARK_DUE:
            return False
        self.link.format_remark = REMARK_MADE
        return True

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
        wait.enters_closing = True
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
        """Give our side of the record back, when no thread is inside and nobody else used the record since; let go of the peer's
        segments. Who still keeps this handle for the next call is told that there will be none."""
        cdef Link* link = &self.link
        if link.epoch == process_epoch():
            table_clear(&link.segments)
            plans_free(&link.plans)
        for follower in list(self.followers):
            follower.forget(self)
        if link.epoch == process_epoch() and word_generation(load64_seq(&link.record.state)) == link.serial:
            store64_release(&link.mine.hazard, 0)
            crash_point(b"own-side-closing")
            store32_release(&link.mine.open, SIDE_CLOSED)
