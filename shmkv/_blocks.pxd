"""Plans over lists of blocks: which rows go where, in one plan for all selected tensors."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._kept_plans cimport KeptPlans
from shmkv._plan cimport Plan, Selection, Shape


cdef enum:
    BLOCKS_TO_BLOCKS = 1            # block src[i] to block dst[i]
    ROW_TO_BLOCKS = 2               # chunk src[i] of a row, cut into blocks of the destination's size, to block dst[i]
    BLOCKS_TO_ROW = 3               # block src[i] to chunk dst[i] of a row


cdef struct Blocks:
    # Lists of a call: numbers of blocks, or of chunks where the side is a row.
    uint32_t* src
    uint32_t* dst
    uint64_t* seen                  # room for a word of each source block that is looked at
    uint32_t count
    uint32_t looked                 # source blocks that have to be there: those of `src`, and behind them such as are not copied
    uint32_t src_max                # greatest number of each list
    uint32_t dst_max
    int mode


cdef int check_blocks_destination(const Shape* dst, uint32_t dst_tensors, Selection* want, const Blocks* blocks) noexcept nogil
cdef int build_blocks(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want,
                      const Blocks* blocks) noexcept nogil
cdef int build_whole_rows(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want,
                          const Blocks* blocks) noexcept nogil
cdef int plan_for_blocks(KeptPlans* plans, const char* records, uint32_t record_nbytes, uint32_t src_count, uint64_t src_rows,
                         uint64_t src_nbytes, const Shape* dst, const Selection* want, const Blocks* blocks,
                         Plan** plan) noexcept nogil


cdef class BlockLists:
    """Two lists of block numbers for C."""
    cdef Blocks blocks
