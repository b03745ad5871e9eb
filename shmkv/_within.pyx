# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Copies inside this process, between two caches or within one. The result is as if through a temporary."""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from shmkv._blocks cimport build_blocks, check_blocks_destination
from shmkv._copy cimport MOVE_DIRECT, MOVE_GATHER, MOVE_SCATTER, last_copy_note, move
from shmkv._futex cimport now_ns
from shmkv._link cimport LINK_BUSY, LINK_CANCELLED, LINK_TIMEOUT, SIGNALS_NS, is_cancelled, is_inside, run_signals
from shmkv._local cimport local_enter, local_leave, may_share
from shmkv._plan cimport Plan, build, check_destination, plan_free


cdef int check_target(const Local* dst, Selection* select, const Blocks* blocks) noexcept nogil:
    """What is asked of the destination, before anybody's lock is taken: 0 or PLAN_*."""
    if blocks != NULL:
        return check_blocks_destination(dst.shapes, dst.num_tensors, select, blocks)
    return check_destination(dst.shapes, dst.num_tensors, select)


cdef int copy_now(Local* src, Local* dst, Selection* select, const Blocks* blocks, bint disjoint,
                  Patience* wait) noexcept nogil:
    """Copy a row, or the blocks of lists that are not NULL. `disjoint`: the caller knows that no byte is both read and written. The
    caller keeps the source from being freed."""
    cdef Plan plan
    cdef int status
    if is_inside():
        return LINK_BUSY
    if not local_enter(dst):
        return COPY_DST_GONE
    memset(&plan, 0, sizeof(Plan))
    status = check_target(dst, select, blocks)
    if status == 0 and blocks != NULL:
        status = build_blocks(&plan, src.shapes, src.num_tensors, dst.shapes, select, blocks)
    elif status == 0:
        status = build(&plan, src.shapes, src.num_tensors, dst.shapes, select)
    if status == 0:
        status = move_within(&plan, src, dst, disjoint or not may_share(src, dst), wait)
    if status == 0:
        last_copy_note(plan.nbytes, 0, now_ns() - wait.begin_ns)
    plan_free(&plan)
    local_leave(dst)
    return status


cdef int move_within(const Plan* plan, Local* src, Local* dst, bint disjoint, Patience* wait) noexcept nogil:
    cdef char* between
    cdef int status
    if disjoint:
        return move(plan, src.base, -1, dst.base, MOVE_DIRECT, look_at_clock, wait)
    between = <char*>malloc(plan.nbytes)
    if between == NULL:
        return -ENOMEM
    status = move(plan, src.base, -1, between, MOVE_GATHER, look_at_clock, wait)
    if status == 0:
        status = move(plan, between, -1, dst.base, MOVE_SCATTER, look_at_clock, wait)
    free(between)
    return status


cdef int look_at_clock(void* context) noexcept nogil:
    """What a mover is given to ask where there is no link: a Patience. 0, LINK_CANCELLED, LINK_TIMEOUT or LINK_INTERRUPTED."""
    cdef Patience* wait = <Patience*>context
    cdef int64_t now = now_ns()
    if is_cancelled(wait):
        return LINK_CANCELLED
    if now >= wait.deadline_ns:
        return LINK_TIMEOUT
    return run_signals(wait) if wait.is_main and now - wait.signals_ns >= SIGNALS_NS else 0
