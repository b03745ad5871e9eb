# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""One push to a cache of the peer that its id or its blocks key names. `push_locked` is the table of contents.

  link_enter      queue, word, deadline (`_link`)
  reach           the cache in the peer's directory, pinned by this side's hazard (`_lookup`)
  attach          its segment, writable, once, kept; or the private memory of the peer's process (`_carry`)
  make_plan       whole rows of the source to rows of the destination; every bound, on private copies (`_plan`, `_blocks`)
  carry_out       the bytes (`_carry`)
  recheck_written was the memory the cache's all the time?
  unpin, link_leave

As with `_push`, the source is counted in by the caller, and nothing is published here.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._blocks cimport (
    BLOCKS_TO_BLOCKS,
    BlockLists,
    build_blocks,
    build_whole_rows,
    check_blocks_destination,
)
from shmkv._carry cimport PeerEnd, attach, bring_pages, carry_out
from shmkv._core cimport BY_BLOCKS_KEY, BY_ID, Request, count, drop_unlinked, enter_counted
from shmkv._futex cimport now_ns
from shmkv._kept_plans cimport copy_shapes
from shmkv._layout cimport TensorRecord, tensor_at
from shmkv._link cimport (
    LINK_ENDED,
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    Link,
    LinkEnd,
    is_forked,
    link_leave,
    look_at_memory,
    patience_init,
    raise_pending,
)
from shmkv._local cimport Local, LocalCache
from shmkv._lookup cimport FIND_REMOVED, FoundRow, find_blocks, find_row, pin, recheck_written, unpin
from shmkv._plan cimport (
    PLAN_BLOCK_NBYTES,
    PLAN_DAMAGED,
    Plan,
    Selection,
    Shape,
    check_destination,
    row_nbytes,
)
from shmkv._pull cimport request_init, set_key
from shmkv._push cimport PUSH_CLOSED, check_source_rows


cdef int push_now(Link* link, Local* src, Request* want, uint32_t whole_tensors) noexcept nogil:
    """0 or the answer of the first step that did not pass."""
    cdef int status = check_source_rows(src, want.blocks, want.select.src_row)
    if status != 0:
        return status
    status = enter_counted(link, &want.wait)
    if status == 0:
        status = push_locked(link, src, want, whole_tensors)
        link_leave(link)
    return status


cdef int push_locked(Link* link, Local* src, Request* want, uint32_t whole_tensors) noexcept nogil:
    cdef FoundRow found
    cdef int status
    drop_unlinked(link)
    status = reach(link, want, &found)
    if status == 0:
        status = push_to(link, src, want, &found, whole_tensors)
        if is_forked(link):
            return status if status == LINK_INTERRUPTED else LINK_FORKED    # hazard, lock and counters are the parent's
        unpin(link.mine)
    count(link, &want.wait, want.nbytes, status)
    return status


cdef int reach(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """The cache, pinned, whatever its rows; the deadline ends the looking again."""
    cdef int status
    while True:
        if want.by == BY_BLOCKS_KEY:
            status = find_blocks(link.directory, want.key.words[2], found)
        else:
            status = find_row(link.directory, want.cache_id, 0, found)
        if status != 0:
            return status
        found.row = NULL
        if pin(link.mine, found):
            return 0
        if now_ns() >= want.wait.deadline_ns:
            return LINK_TIMEOUT


cdef int push_to(Link* link, Local* src, Request* want, FoundRow* found, uint32_t whole_tensors) noexcept nogil:
    cdef PeerEnd dst
    cdef Plan* plan = &link.plans.scratch.plan
    cdef uint64_t whole_nbytes
    cdef int status
    if not found.copy.remote_accessible:
        return PUSH_CLOSED
    status = attach(link, found, &dst)
    if status == 0:
        status = bring_pages(link, &want.wait, &dst)
    if status == 0:
        status = make_plan(link, src, want, found, dst.nbytes)
    if status == 0:
        whole_nbytes = plan.nbytes // want.select.dst_count * whole_tensors if whole_tensors else plan.nbytes
        status = carry_out(link, &want.wait, plan, whole_nbytes, src.base, &dst)
    if status == 0:
        want.nbytes = plan.nbytes
        status = 0 if recheck_written(link.mine, found) else FIND_REMOVED
    return status


cdef int make_plan(Link* link, const Local* src, Request* want, const FoundRow* found, uint64_t nbytes) noexcept nogil:
    """Spans from the source's rows to the destination's: 0, PLAN_* or -ENOMEM."""
    cdef TensorRecord* shared = tensor_at(link.directory, found.copy.first_tensor)
    cdef Plan* plan = &link.plans.scratch.plan
    cdef uint32_t tensors = found.copy.num_tensors
    cdef int status
    if tensors == 0:
        return PLAN_DAMAGED
    status = copy_shapes(&link.plans.scratch, <const char*>shared, sizeof(TensorRecord), tensors, found.copy.num_rows, nbytes)
    if status != 0:
        return status
    if want.blocks == NULL:
        status = check_destination(link.plans.scratch.src, tensors, &want.select)
    else:
        status = check_blocks_destination(link.plans.scratch.src, tensors, &want.select, want.blocks)
    if status != 0:
        return status
    if want.blocks != NULL and want.blocks.mode != BLOCKS_TO_BLOCKS:
        if not have_size(link.plans.scratch.src, &want.select):
            return PLAN_BLOCK_NBYTES
        return build_blocks(plan, src.shapes, src.num_tensors, link.plans.scratch.src, &want.select, want.blocks)
    return build_whole_rows(plan, src.shapes, src.num_tensors, link.plans.scratch.src, &want.select, want.blocks)


cdef bint have_size(const Shape* dst, const Selection* want) noexcept nogil:
    """Are blocks of all selected tensors of the destination as long as the caller thinks (-1: whatever they are)?"""
    cdef int64_t i
    for i in range(want.dst_count):
        if want.size >= 0 and row_nbytes(&dst[want.dst_first + i]) != <uint64_t>want.size:
            return False
    return True


# -- as Python calls it ------------------------------------------------------------------------------------------------

def push(LinkEnd handle, LocalCache src, bytes packed, tuple select, BlockLists lists, int64_t timeout_ms, *,
         uint32_t whole_tensors=0):
    """Push tensors of one row, or of the blocks of `lists`, to the cache that a key names: 0 or a negative status.

    `packed`: a CacheKeyByIdAndIndex, whose row is the destination, or a BlocksCacheKey, as `keys.py` packs it; `select` as for a
    pull, with the bytes of a block of the destination as its size where `lists` cut a row, or -1. `whole_tensors`: of how many
    tensors the transfer is that this call is a part of, 0 = of these. The caller has counted the source in.
    """
    cdef Request want
    cdef uint32_t src_row
    cdef int status
    if handle.directory is None:
        return look_at_memory(&handle.link) or LINK_ENDED       # let go of: the link is over
    request_init(&want, select)
    src_row = want.select.src_row
    set_key(&want, packed)
    if want.by == BY_ID:
        want.select.dst_row = want.select.src_row
    want.select.src_row = src_row
    want.blocks = NULL if lists is None else &lists.blocks
    patience_init(&want.wait, timeout_ms)
    with nogil:
        status = push_now(&handle.link, &src.local, &want, whole_tensors)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


CLOSED = PUSH_CLOSED
