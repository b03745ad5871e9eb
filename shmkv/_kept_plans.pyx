# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Plans that are kept: a server pulls the same shape again and again.

A plan uses private copies of the source's tensor records; whether it is still the right one is asked by comparing those with what
stands in shared memory now.
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from shmkv._futex cimport load_words
from shmkv._plan cimport PLAN_DAMAGED, SHAPE_RECORD_NBYTES, build, check_shape, plan_free, set_dense


cdef bint is_for(const KeptPlan* kept, const char* records, uint32_t record_nbytes, uint32_t src_count, uint64_t src_nbytes,
                 uint64_t dst_number, const Selection* want) noexcept nogil:
    """Was this plan made from the same numbers? The source's are compared with what stands in shared memory now, the plan uses
    its own copies of them."""
    cdef uint32_t i
    if kept.used == 0 or kept.dst_number != dst_number or kept.src_nbytes != src_nbytes or kept.src_count != src_count:
        return False
    if memcmp(&kept.want, want, sizeof(Selection)) != 0:
        return False
    for i in range(src_count):
        if memcmp(&kept.src[i], records + <size_t>i * record_nbytes, SHAPE_RECORD_NBYTES) != 0:
            return False
    return True


cdef int plan_for(KeptPlans* plans, const char* records, uint32_t record_nbytes, uint32_t src_count, uint64_t src_rows,
                  uint64_t src_nbytes, const Shape* dst, uint64_t dst_number, const Selection* want, Plan** plan) noexcept nogil:
    """The plan for these tensor records and this selection: a kept one, or a new one in the place of the least recently used.

    `records` stand in shared memory, `record_nbytes` apart, and begin with a Shape each. 0, PLAN_* or -ENOMEM.
    """
    cdef KeptPlan* place = &plans.kept[0]
    cdef KeptPlan* kept
    cdef int i, status
    plans.tick += 1
    for i in range(PLANS_KEPT):
        kept = &plans.kept[i]
        if is_for(kept, records, record_nbytes, src_count, src_nbytes, dst_number, want):
            kept.used = plans.tick
            plan[0] = &kept.plan
            return 0
        if kept.used < place.used:
            place = kept
    place.used = 0
    status = copy_shapes(place, records, record_nbytes, src_count, src_rows, src_nbytes)
    if status == 0:
        status = build(&place.plan, place.src, src_count, dst, want)
    if status != 0:
        return status
    memcpy(&place.want, want, sizeof(Selection))
    place.dst_number = dst_number
    place.src_nbytes = src_nbytes
    place.used = plans.tick
    plan[0] = &place.plan
    return 0


cdef int copy_shapes(KeptPlan* place, const char* records, uint32_t record_nbytes, uint32_t count, uint64_t rows,
                     uint64_t nbytes) noexcept nogil:
    """Private copies of the source's tensors, each checked: 0, PLAN_DAMAGED or -ENOMEM."""
    cdef Shape* shapes = <Shape*>realloc(place.src, count * sizeof(Shape))
    cdef uint32_t i
    if shapes == NULL:
        return -ENOMEM
    place.src = shapes
    place.src_count = count
    for i in range(count):
        load_words(&shapes[i], records + <size_t>i * record_nbytes, SHAPE_RECORD_NBYTES)
        set_dense(&shapes[i])
        if check_shape(&shapes[i], nbytes) != 0 or shapes[i].rows != rows:
            return PLAN_DAMAGED
    return 0


cdef void plans_free(KeptPlans* plans) noexcept nogil:
    """Let go of all that are kept; new ones can be kept afterwards."""
    cdef int i
    for i in range(PLANS_KEPT):
        free(plans.kept[i].src)
        plan_free(&plans.kept[i].plan)
    free(plans.scratch.src)
    plan_free(&plans.scratch.plan)
    memset(plans, 0, sizeof(KeptPlans))
