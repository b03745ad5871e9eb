# cython: language_level=3, freethreading_compatible=True
"""Segments are attached once and kept, and copied by the memory mover (or by system calls on their file); memory that is private to
the peer's process has nothing to attach, and is copied by the kernel (`_peer_memory`).

While bytes are carried, deadline, link, peer and signals are looked at every few MiB.
"""
from libc.errno cimport ENOENT, ENOMEM

from shmkv._attached cimport ATTACH_SIZE, attach_segment, check_generation, populate, table_find
from shmkv._copy cimport MOVE_DIRECT, MOVE_TO_FILE, copy_moves_by, move_part
from shmkv._crash cimport crash_point
from shmkv._futex cimport load64_relaxed
from shmkv._layout cimport CACHE_REGISTERED, TensorRecord, tensor_at, word_generation
from shmkv._link cimport look, look_between_chunks
from shmkv._peer_memory cimport PeerProcess, peer_move

cdef enum:
    POPULATE_NBYTES = 64 << 20


cdef struct Looker:
    Link* link
    Patience* wait


cdef int attach(Link* link, const FoundRow* found, PeerEnd* end) noexcept nogil:
    """The memory of the pinned cache: 0, ATTACH_*, LINK_* or -errno."""
    cdef TensorRecord* first = tensor_at(link.directory, found.copy.first_tensor)
    end.nbytes = found.copy.segment_nbytes
    if found.copy.segment_serial != 0 or found.copy.kind != CACHE_REGISTERED:
        return attach_file(link, found, &end.segment)
    end.segment = NULL
    end.base = load64_relaxed(&first.base_address) - load64_relaxed(&first.offset)
    return 0


cdef int attach_file(Link* link, const FoundRow* found, Attached** segment) noexcept nogil:
    """The cache's segment, mapped once and kept; its header checked for this cache."""
    cdef int status = 0
    if link.segments.entries == NULL:
        return -ENOMEM
    segment[0] = table_find(&link.segments, found.copy.segment_serial)
    if segment[0] == NULL:
        crash_point(b"attaching")
        status = attach_segment(&link.segments, link.prefix, link.peer_incarnation, found.copy.segment_serial,
                                found.copy.segment_nbytes, segment)
        if status == -ENOENT and look(link) != 0:
            status = look(link)     # the peer is just finalizing, or dead and being swept
    elif segment[0].nbytes != found.copy.segment_nbytes:
        status = ATTACH_SIZE
    # What is registered within a segment lies in another cache's, whose generation the header has, and keeps that from being freed.
    if status == 0 and found.copy.kind != CACHE_REGISTERED:
        status = check_generation(segment[0], link.peer_incarnation, word_generation(found.cache_word))
    return status


cdef int bring_pages(Link* link, Patience* wait, PeerEnd* end) noexcept nogil:
    """Page-table entries for the whole segment, in steps, so that a deadline can end it; the next call goes on where this one
    stopped."""
    cdef int status = 0
    while status == 0 and end.segment != NULL and end.segment.populated < end.segment.nbytes:
        status = populate(end.segment, POPULATE_NBYTES)
        if status >= 0:
            status = look_between_chunks(link, wait)
    return status


cdef int look_at_link(void* looker) noexcept nogil:
    return look_between_chunks((<Looker*>looker).link, (<Looker*>looker).wait)


cdef int carry_in(Link* link, Patience* wait, const Plan* plan, uint64_t whole_nbytes, const PeerEnd* src,
                  char* dst) noexcept nogil:
    """The bytes of a plan, which is all or a part of a transfer of `whole_nbytes`, out of the peer's memory: 0, LINK_*, MEMORY_*,
    ATTACH_* or -errno."""
    cdef Looker looker
    looker.link, looker.wait = link, wait
    if src.segment == NULL:
        return carry_private(&looker, plan, dst, src.base, False)
    return move_part(plan, whole_nbytes, src.segment.address, src.segment.fd, dst, MOVE_DIRECT, look_at_link, &looker)


cdef int carry_out(Link* link, Patience* wait, const Plan* plan, uint64_t whole_nbytes, char* src,
                   const PeerEnd* dst) noexcept nogil:
    """The same into the peer's memory."""
    cdef Looker looker
    looker.link, looker.wait = link, wait
    if dst.segment == NULL:
        return carry_private(&looker, plan, src, dst.base, True)
    return move_part(plan, whole_nbytes, src, dst.segment.fd, dst.segment.address,
                     MOVE_DIRECT if dst.segment.fd < 0 else MOVE_TO_FILE, look_at_link, &looker)


cdef int carry_private(Looker* looker, const Plan* plan, char* here, uint64_t there, bint writes) noexcept nogil:
    cdef Link* link = looker.link
    cdef PeerProcess peer
    peer.life_fd, peer.members, peer.slot, peer.incarnation = link.life_fd, link.members, link.peer_slot, link.peer_incarnation
    peer.pid = 0
    if writes:
        copy_moves_by(b"process_vm_writev", False)
    else:
        copy_moves_by(b"process_vm_readv", False)
    return peer_move(plan, &peer, here, there, writes, look_at_link, looker, &link.fault)


PRIVATE = CARRY_PRIVATE
