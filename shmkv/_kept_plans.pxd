"""Plans of a link, kept by what they were made from."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._plan cimport Plan, Selection, Shape


cdef enum:
    PLANS_KEPT = 8


cdef struct KeptPlan:
    Selection want
    uint64_t dst_number             # of the destination; numbers are never used again
    uint64_t src_nbytes             # of the source's segment, for which the bounds were checked
    uint64_t used                   # tick of the last use; 0 = empty
    uint32_t src_count
    Shape* src                      # private copies of the source's tensor records
    Plan plan


cdef struct KeptPlans:
    KeptPlan kept[PLANS_KEPT]
    KeptPlan scratch                # room for plans that are not looked for again
    uint64_t tick


cdef int plan_for(KeptPlans* plans, const char* records, uint32_t record_nbytes, uint32_t src_count, uint64_t src_rows,
                  uint64_t src_nbytes, const Shape* dst, uint64_t dst_number, const Selection* want, Plan** plan) noexcept nogil
cdef int copy_shapes(KeptPlan* place, const char* records, uint32_t record_nbytes, uint32_t count, uint64_t rows,
                     uint64_t nbytes) noexcept nogil
cdef void plans_free(KeptPlans* plans) noexcept nogil
