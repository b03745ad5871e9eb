# cython: language_level=3, freethreading_compatible=True
"""What the cluster that was linked to does with a link: it has the record in its own directory, and no handle.

It touches the record only when it acts itself; pulls out of its caches need nothing of it.
"""
from libc.errno cimport EAGAIN, EBADMSG, EBUSY, EINTR
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._futex cimport load64_seq, now_ns, word_give_up, word_release, word_try, word_wait_slice
from shmkv._layout cimport LINK_LIVE, LINK_REMOVED, SIDE_ACCEPTOR, SIDE_INITIATOR, LinkRecord, link_at, make_word
from shmkv._link cimport (
    LINK_ENDED,
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_PEER_GONE,
    LINK_TIMEOUT,
    Patience,
    patience_init,
    raise_pending,
    run_signals,
)
from shmkv._life cimport process_epoch
from shmkv._link_record cimport end_link, side_lives
from shmkv._mapping cimport Region


def remove(Region directory, uint32_t slot, uint64_t serial, int life_fd, Region members, int64_t timeout_ms, bint force):
    """LIVE -> REMOVED by the cluster that was linked to: after its turn at the word, or at once if `force` or the other side is
    dead. False if the word could not be had in time. Raises what a signal handler raised.

    `serial`: of the link that is meant. When it is over, another cluster's link may stand in the record; that one is left alone."""
    cdef LinkRecord* link = link_at(directory.address, slot)
    cdef uint64_t seen = make_word(serial, LINK_LIVE)
    cdef uint64_t epoch = process_epoch()
    cdef Patience wait
    cdef int status
    patience_init(&wait, timeout_ms)
    if force or not side_lives(&link.sides[SIDE_INITIATOR], life_fd, members.address):
        end_link(link, seen, LINK_REMOVED)
        return True
    with nogil:
        status = take_word_of_acceptor(link, seen, epoch, &wait, life_fd, members.address)
        if status == 0:
            end_link(link, seen, LINK_REMOVED)
            word_release(&link.word, SIDE_ACCEPTOR)
        elif process_epoch() == epoch:      # in a child that a signal handler forked, the word is the parent's
            word_give_up(&link.word, SIDE_ACCEPTOR, 0)
    if status == LINK_INTERRUPTED:
        raise_pending()
    if status == LINK_PEER_GONE or status == LINK_ENDED or status == -EBADMSG:
        end_link(link, seen, LINK_REMOVED)      # nobody to wait for, or nobody who could be
        return True
    return status == 0


cdef int take_word_of_acceptor(LinkRecord* link, uint64_t seen, uint64_t epoch, Patience* wait, int life_fd,
                               char* members) noexcept nogil:
    cdef int waited = word_try(&link.word, SIDE_ACCEPTOR, 0)
    cdef int status
    while waited == -EBUSY or waited == -EAGAIN or waited == -EINTR:
        if waited != -EBUSY:
            status = run_signals(wait)
            if status != 0:
                return status
            if process_epoch() != epoch:
                return LINK_FORKED
            if load64_seq(&link.state) != seen:
                return LINK_ENDED
            if not side_lives(&link.sides[SIDE_INITIATOR], life_fd, members):
                return LINK_PEER_GONE
            if now_ns() >= wait.deadline_ns:
                return LINK_TIMEOUT
        waited = word_wait_slice(&link.word, SIDE_ACCEPTOR, wait.deadline_ns, 0)
    return waited
