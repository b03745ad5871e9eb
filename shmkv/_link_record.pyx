# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The record of one link in the directory of the cluster that was linked to (the acceptor).

State: FREE -> LIVE (a linker, under the cold lock) -> REMOVED (unlink) or BROKEN (a holder died) -> FREE, under a new serial. A
record is used again only when both sides are closed, or closed for a dead side by whoever holds the cold lock, and no hazard or
lease of a living side is left in it. The acceptor's side is open while it moves bytes itself or waits to: it opens the side, then
looks whether the link still is the one that it means (`_link.open_side`). A cluster that is only pulled from never touches the
record.
"""
from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    add64_relaxed,
    clear_words,
    fence_acquire,
    fence_release,
    load32_acquire,
    load32_relaxed,
    load32_seq,
    load64_acquire,
    load64_relaxed,
    load64_seq,
    store32_relaxed,
    store32_release,
    store64_relaxed,
    store64_release,
    swap64_seq,
)
from shmkv._layout cimport (
    COUNTERS_MAX,
    LEASES_MAX,
    LINK_BROKEN,
    LINK_FREE,
    LINK_LIVE,
    LINK_REMOVED,
    LINKS_MAX,
    LINKS_OFFSET,
    MEMBERS_MAX,
    SIDE_ACCEPTOR,
    SIDE_CLOSED,
    SIDE_INITIATOR,
    SIDE_OPEN,
    directory_header,
    link_at,
    make_word,
    member_at,
    word_generation,
    word_state,
)
from shmkv._life cimport life_look, process_epoch
from shmkv._mapping cimport Region


cdef uint64_t own_incarnation = 0
cdef uint64_t own_epoch = 0


def set_own(uint64_t incarnation):
    """The cluster of this process, 0 for none: its sides live."""
    global own_incarnation, own_epoch
    own_incarnation = incarnation
    own_epoch = process_epoch()


cdef bint side_lives(const LinkSide* side, int life_fd, char* members) noexcept nogil:
    """The life byte of the side's slot is held and the slot's incarnation is the recorded one; "cannot tell" lives."""
    cdef uint64_t incarnation = load64_relaxed(&side.incarnation)
    cdef uint32_t slot = load32_relaxed(&side.slot)
    if incarnation == own_incarnation and own_epoch == process_epoch():
        return True                 # no look shows the locks of the process that looks
    if slot >= MEMBERS_MAX:
        return False
    if load64_acquire(&member_at(members, slot).incarnation) != incarnation:
        return False
    return life_look(life_fd, slot) != 0


cdef bint names(const LinkSide* side, uint64_t generation) noexcept nogil:
    """Does a hazard or a lease of this side name the cache?"""
    cdef uint32_t i
    if load64_seq(&side.hazard) == generation:
        return True
    for i in range(LEASES_MAX):
        if load64_seq(&side.leases[i]) == generation:
            return True
    return False


cdef bint is_named(Region directory, uint64_t generation, int life_fd, Region members, initiated) except -1:
    """Does a living cluster's side name this cache: in any record of its owner's directory, or in one of the `initiated`
    (directory, slot) records that the owner made in other directories?"""
    cdef uint32_t slot
    cdef LinkSide* side
    for slot in range(links_reserved(directory)):
        side = &link_at(directory.address, slot).sides[SIDE_INITIATOR]
        if names(side, generation) and side_lives(side, life_fd, members.address):
            return True
    for other, slot in initiated:
        side = &link_at((<Region?>other).address, slot).sides[SIDE_ACCEPTOR]
        if names(side, generation) and side_lives(side, life_fd, members.address):
            return True
    return False


cdef bint is_idle(const LinkSide* side) noexcept nogil:
    """No hazard and no lease at all."""
    cdef uint32_t i
    if load64_seq(&side.hazard) != 0:
        return False
    for i in range(LEASES_MAX):
        if load64_seq(&side.leases[i]) != 0:
            return False
    return True


cdef bint end_link(LinkRecord* link, uint64_t seen, uint32_t state) noexcept nogil:
    """LIVE -> BROKEN or REMOVED, from exactly the state that was seen."""
    if word_state(seen) != LINK_LIVE:
        return False
    crash_point(b"link-ending")
    return swap64_seq(&link.state, seen, make_word(word_generation(seen), state))


cdef bint close_dead_side(LinkSide* side, int life_fd, char* members) noexcept nogil:
    """Under the cold lock: is the side closed and idle, or its cluster dead (then it is closed and cleared for it)?"""
    if side_lives(side, life_fd, members):
        # seq_cst: the link was ended before, and an acceptor looks at the link after it has opened its side.
        return load32_seq(&side.open) == SIDE_CLOSED and is_idle(side)
    clear_words(side.leases, sizeof(side.leases))
    crash_point(b"side-clearing")
    store64_release(&side.hazard, 0)
    crash_point(b"side-closing")
    store32_release(&side.open, SIDE_CLOSED)
    return True


def links_reserved(Region directory):
    """Records that have pages behind them."""
    return min(load32_acquire(&directory_header(directory.address).links_reserved), LINKS_MAX)


def reserve_more(Region directory, reserve):
    """Double the table of links in a directory. Under the cold lock; `reserve(offset, nbytes)` brings the pages."""
    cdef uint32_t have = links_reserved(directory)
    cdef uint32_t target = min(have * 2, LINKS_MAX)
    reserve(LINKS_OFFSET + <uint64_t>have * sizeof(LinkRecord), (target - have) * sizeof(LinkRecord))
    crash_point(b"links-growing")
    store32_release(&directory_header(directory.address).links_reserved, target)


def claim(Region directory, int life_fd, Region members, sides, list claimed=None, set looked_at=None):
    """Take a free record, or one that both sides have closed: its slot, or None if there is none. Under the cold lock. `claimed`
    gets the slot, too, with no moment in between for a signal handler; `looked_at` gets (directory, slot) before the link is LIVE,
    so that its maker sees the hazard of an acceptor who pushes at once.

    `sides`: (member slot, incarnation, cluster id) of the acceptor, then of the initiator.
    """
    cdef uint32_t slot
    cdef LinkRecord* link
    for slot in range(links_reserved(directory)):
        link = link_at(directory.address, slot)
        if load32_acquire(&link.sides[SIDE_INITIATOR].open) and side_lives(&link.sides[SIDE_INITIATOR], life_fd, members.address):
            continue
        # Nobody may start to use a dead cluster's link while its record is looked at.
        end_link(link, load64_seq(&link.state), LINK_BROKEN)
        if close_dead_side(&link.sides[SIDE_INITIATOR], life_fd, members.address) \
                and close_dead_side(&link.sides[SIDE_ACCEPTOR], life_fd, members.address):
            if looked_at is not None:
                looked_at.add((directory, slot))
            start(link, sides)
            if claimed is not None:
                claimed.append(slot)
            # Its last user may have died between its last mark and its swap: the owner looks at all rows again.
            crash_point(b"linked")
            add64_relaxed(&directory_header(directory.address).reaped_count, 1)
            return slot
    return None


cdef start(LinkRecord* link, sides):
    """Fill the record under a new serial and publish it."""
    cdef uint64_t serial = word_generation(load64_seq(&link.state)) + 1
    cdef LinkSide* side
    cdef int i
    crash_point(b"link-starting")
    store64_release(&link.state, make_word(serial, LINK_FREE))
    crash_point(b"link-filling")
    fence_release()                 # over before the first field changes: who is copying looks again
    store32_relaxed(&link.word, 0)
    for i in range(2):
        side = &link.sides[i]
        clear_words(side.counters, sizeof(side.counters))
        slot, incarnation, cluster_id = sides[i]
        store32_relaxed(&side.slot, slot)
        store64_relaxed(&side.incarnation, incarnation)
        store64_relaxed(&side.cluster_id, cluster_id)
        # After the incarnation: a crash in between leaves a closed side, never an open one of nobody.
        crash_point(b"side-opening")
        if i == SIDE_INITIATOR:     # the acceptor's is closed, and its threads count themselves in it
            store32_release(&side.open, SIDE_OPEN)
    crash_point(b"link-live")
    store64_release(&link.state, make_word(serial, LINK_LIVE))


def abandon(Region directory, uint32_t slot):
    """Undo a claim whose link could not be used."""
    cdef LinkRecord* link = link_at(directory.address, slot)
    end_link(link, load64_seq(&link.state), LINK_REMOVED)
    crash_point(b"link-abandoning")
    store32_release(&link.sides[SIDE_INITIATOR].open, SIDE_CLOSED)


def find(Region directory, uint64_t cluster_id):
    """(slot, serial) of the living links that the cluster with this id made to this directory."""
    cdef uint32_t slot
    cdef LinkRecord* link
    cdef uint64_t state, maker
    found = []
    for slot in range(links_reserved(directory)):
        link = link_at(directory.address, slot)
        state = load64_seq(&link.state)
        maker = load64_relaxed(&link.sides[SIDE_INITIATOR].cluster_id)
        fence_acquire()
        # The same state after the look: both are of one link.
        if word_state(state) == LINK_LIVE and maker == cluster_id and load64_seq(&link.state) == state:
            found.append((slot, word_generation(state)))
    return found


def read(Region directory, uint32_t slot):
    """What stands in a record, as a dict: for `ls`, statistics and tests."""
    cdef LinkRecord* link = link_at(directory.address, slot)
    cdef uint64_t state = load64_seq(&link.state)
    cdef LinkSide* side
    sides = []
    for i in range(2):
        side = &link.sides[i]
        sides.append({
            "open": load32_acquire(&side.open), "slot": load32_relaxed(&side.slot),
            "incarnation": load64_relaxed(&side.incarnation), "cluster_id": load64_relaxed(&side.cluster_id),
            "hazard": load64_seq(&side.hazard), "leases": sum(1 for n in range(LEASES_MAX) if load64_acquire(&side.leases[n])),
            "counters": [load64_relaxed(&side.counters[n]) for n in range(COUNTERS_MAX)],
        })
    return {"serial": word_generation(state), "state": word_state(state), "word": load32_acquire(&link.word), "sides": sides}


def initiator_lives(Region directory, uint32_t slot, int life_fd, Region members):
    """Is the cluster that made this link still there?"""
    return side_lives(&link_at(directory.address, slot).sides[SIDE_INITIATOR], life_fd, members.address)


def dead_initiators(Region directory, int life_fd, Region members):
    """(slot, serial) of the records whose initiator has gone without closing its side."""
    cdef uint32_t slot
    cdef LinkRecord* link
    found = []
    for slot in range(links_reserved(directory)):
        link = link_at(directory.address, slot)
        if load32_acquire(&link.sides[SIDE_INITIATOR].open) \
                and not side_lives(&link.sides[SIDE_INITIATOR], life_fd, members.address):
            found.append((slot, word_generation(load64_seq(&link.state))))
    return found


def living(Region directory):
    """(slot, serial, cluster id, member slot, incarnation) of the links that others made to this directory and nobody has ended."""
    cdef uint32_t slot
    cdef uint64_t state
    cdef LinkSide* side
    found = []
    for slot in range(links_reserved(directory)):
        state = load64_seq(&link_at(directory.address, slot).state)
        if word_state(state) == LINK_LIVE:
            side = &link_at(directory.address, slot).sides[SIDE_INITIATOR]
            made = (slot, word_generation(state), load64_relaxed(&side.cluster_id), load32_relaxed(&side.slot),
                    load64_relaxed(&side.incarnation))
            fence_acquire()
            # The same state after the look: all of it is of one link.
            if load64_seq(&link_at(directory.address, slot).state) == state:
                found.append(made)
    return found


def busy(Region directory):
    """Slots of the records, in whatever state, whose initiator names a cache by its hazard: a pull runs, or died in it."""
    cdef uint32_t slot
    return [slot for slot in range(links_reserved(directory))
            if load64_seq(&link_at(directory.address, slot).sides[SIDE_INITIATOR].hazard) != 0]


def address(Region directory, uint32_t slot):
    """Address of a record in this process."""
    return <size_t>link_at(directory.address, slot)


LIVE = LINK_LIVE
REMOVED = LINK_REMOVED
