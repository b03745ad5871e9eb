# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""From lists of block numbers to spans. A block is a row; blocks that are neighbours on both sides become one run.

Runs of one plan may be copied at the same time by several threads, so no destination stands in a list twice, and none is the
source of another: whoever makes the lists sees to that (`block_arguments.py`).
"""
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from shmkv._kept_plans cimport copy_shapes
from shmkv._plan cimport (
    PLAN_BLOCK_NBYTES,
    PLAN_BLOCKS_WINDOW,
    PLAN_DST_BLOCK,
    PLAN_DST_RANGE,
    PLAN_DST_ROW,
    PLAN_DST_WINDOW,
    PLAN_SRC_BLOCK,
    ShapeList,
    Span,
    add,
    check_tensors,
    place,
    plan_free,
    plan_runs,
    reserve_spans,
    row_nbytes,
)


cdef class BlockLists:
    """From two equally long lists of numbers below 2**32, not empty. `also`: source blocks that have to be there although another
    one goes to their destination."""

    def __cinit__(self, list src, list dst, int mode, list also=None):
        cdef Blocks* blocks = &self.blocks
        cdef uint32_t i
        cdef list looked = src + (also or [])
        if mode not in (BLOCKS_TO_BLOCKS, ROW_TO_BLOCKS, BLOCKS_TO_ROW) or not src or len(src) != len(dst):
            raise ValueError(f"lists of {len(src)} and {len(dst)} blocks in mode {mode}")
        blocks.mode = mode
        blocks.count = len(src)
        blocks.looked = len(looked)
        blocks.src = <uint32_t*>calloc(blocks.looked, sizeof(uint32_t))
        blocks.dst = <uint32_t*>calloc(blocks.count, sizeof(uint32_t))
        blocks.seen = <uint64_t*>calloc(blocks.looked, sizeof(uint64_t))
        if blocks.src == NULL or blocks.dst == NULL or blocks.seen == NULL:
            raise MemoryError(f"no memory for lists of {blocks.count} blocks")
        for i in range(blocks.looked):
            blocks.src[i] = looked[i]
            blocks.src_max = max(blocks.src_max, blocks.src[i])
        for i in range(blocks.count):
            blocks.dst[i] = dst[i]
            blocks.dst_max = max(blocks.dst_max, blocks.dst[i])

    @property
    def looked(self):
        """The numbers of the source blocks that have to be there, as a list."""
        return [self.blocks.src[i] for i in range(self.blocks.looked)]

    @property
    def pairs(self):
        """(source, destination) of each, in order."""
        return [(self.blocks.src[i], self.blocks.dst[i]) for i in range(self.blocks.count)]

    @property
    def mode(self):
        """TO_BLOCKS, FROM_ROW or TO_ROW."""
        return self.blocks.mode

    def __dealloc__(self):
        free(self.blocks.src)
        free(self.blocks.dst)
        free(self.blocks.seen)


cdef int check_blocks_destination(const Shape* dst, uint32_t dst_tensors, Selection* want, const Blocks* blocks) noexcept nogil:
    """Blocks or row, and tensors, of the destination, before anybody's lock is taken; fills in dst_count when it is -1."""
    if blocks.mode == BLOCKS_TO_ROW and want.dst_row >= dst[0].rows:
        return PLAN_DST_ROW
    if blocks.mode != BLOCKS_TO_ROW and blocks.dst_max >= dst[0].rows:
        return PLAN_DST_BLOCK
    if want.dst_count < 0:
        want.dst_count = dst_tensors
    return PLAN_DST_RANGE if want.dst_count == 0 or want.dst_first + want.dst_count > dst_tensors else 0


cdef inline int check_nbytes(const Shape* src, const Shape* dst, const Blocks* blocks) noexcept nogil:
    """Do the blocks of one tensor fit the other side? 0 or PLAN_*."""
    cdef uint64_t src_nbytes = row_nbytes(src), dst_nbytes = row_nbytes(dst)
    if blocks.mode == ROW_TO_BLOCKS:
        return PLAN_BLOCKS_WINDOW if blocks.src_max >= src_nbytes // dst_nbytes else 0
    if blocks.mode == BLOCKS_TO_ROW:
        return PLAN_BLOCKS_WINDOW if blocks.dst_max >= dst_nbytes // src_nbytes else 0
    return PLAN_BLOCK_NBYTES if src_nbytes != dst_nbytes else 0


cdef int build_blocks(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want,
                      const Blocks* blocks) noexcept nogil:
    """Spans of all blocks of all selected tensors. check_blocks_destination has passed, and check_shape for every shape; 0, PLAN_*
    or -ENOMEM."""
    cdef int64_t i
    cdef int status
    if blocks.mode != ROW_TO_BLOCKS and blocks.src_max >= src[0].rows:
        return PLAN_SRC_BLOCK
    for i in range(want.dst_count):
        status = check_nbytes(&src[want.src_first + i if want.src_first + i < src_tensors else 0], &dst[want.dst_first + i], blocks)
        if status != 0:
            return status
    status = check_tensors(want, src_tensors)
    if status == 0:
        status = reserve_spans(plan, <uint64_t>want.dst_count * blocks.count)
    if status != 0:
        return status
    for i in range(want.dst_count):
        add_blocks(plan, &src[want.src_first + i], &dst[want.dst_first + i], want, blocks)
    return 0


cdef void add_blocks(Plan* plan, const Shape* src, const Shape* dst, const Selection* want, const Blocks* blocks) noexcept nogil:
    """The blocks of one tensor, in the order of the lists."""
    cdef uint64_t nbytes = row_nbytes(src if blocks.mode == BLOCKS_TO_ROW else dst)
    cdef uint32_t i
    cdef Span span
    for i in range(blocks.count):
        span.nbytes = nbytes
        if blocks.mode == ROW_TO_BLOCKS:
            place(src, want.src_row, blocks.src[i] * nbytes, &span.src, &span.src_left, &span.src_inner, &span.src_gap)
        else:
            place(src, blocks.src[i], 0, &span.src, &span.src_left, &span.src_inner, &span.src_gap)
        if blocks.mode == BLOCKS_TO_ROW:
            place(dst, want.dst_row, blocks.dst[i] * nbytes, &span.dst, &span.dst_left, &span.dst_inner, &span.dst_gap)
        else:
            place(dst, blocks.dst[i], 0, &span.dst, &span.dst_left, &span.dst_inner, &span.dst_gap)
        add(plan, &span)


cdef int build_whole_rows(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want,
                          const Blocks* blocks) noexcept nogil:
    """Spans of a whole row of each selected tensor, or of its blocks, to the beginning of rows that may be longer. Of either side
    rows and blocks, and of the destination tensors, are known to be there; 0, PLAN_* or -ENOMEM."""
    cdef uint32_t pairs = 1 if blocks == NULL else blocks.count, j
    cdef int64_t i
    cdef int status = check_tensors(want, src_tensors)
    if status != 0:
        return status
    for i in range(want.dst_count):
        if row_nbytes(&src[want.src_first + i]) > row_nbytes(&dst[want.dst_first + i]):
            return PLAN_DST_WINDOW if blocks == NULL else PLAN_BLOCK_NBYTES
    status = reserve_spans(plan, <uint64_t>want.dst_count * pairs)
    if status != 0:
        return status
    for i in range(want.dst_count):
        for j in range(pairs):
            add_row(plan, &src[want.src_first + i], want.src_row if blocks == NULL else blocks.src[j], &dst[want.dst_first + i],
                    want.dst_row if blocks == NULL else blocks.dst[j])
    return 0


cdef void add_row(Plan* plan, const Shape* src, uint32_t src_row, const Shape* dst, uint32_t dst_row) noexcept nogil:
    cdef Span span
    span.nbytes = row_nbytes(src)
    place(src, src_row, 0, &span.src, &span.src_left, &span.src_inner, &span.src_gap)
    place(dst, dst_row, 0, &span.dst, &span.dst_left, &span.dst_inner, &span.dst_gap)
    add(plan, &span)


cdef int plan_for_blocks(KeptPlans* plans, const char* records, uint32_t record_nbytes, uint32_t src_count, uint64_t src_rows,
                         uint64_t src_nbytes, const Shape* dst, const Selection* want, const Blocks* blocks,
                         Plan** plan) noexcept nogil:
    """The plan for these tensor records and these lists, made anew each time in room that is kept: lists seldom come again.

    `records` as for `plan_for`. 0, PLAN_* or -ENOMEM.
    """
    cdef int status = copy_shapes(&plans.scratch, records, record_nbytes, src_count, src_rows, src_nbytes)
    if status == 0:
        status = build_blocks(&plans.scratch.plan, plans.scratch.src, src_count, dst, want, blocks)
    plan[0] = &plans.scratch.plan
    return status


def runs(list src, list dst, list src_blocks, list dst_blocks, int mode, *, uint32_t src_row=0, uint32_t dst_row=0,
         uint32_t src_first=0, uint32_t dst_first=0, int64_t src_count=-1, int64_t dst_count=-1):
    """For tests: the runs [(src byte, dst byte, nbytes)] of lists of blocks, or a negative PLAN_* number.

    `src`, `dst`: one tuple a tensor, as for ShapeList.
    """
    cdef ShapeList sources = ShapeList(src), targets = ShapeList(dst)
    cdef BlockLists lists = BlockLists(src_blocks, dst_blocks, mode)
    cdef Plan plan
    cdef Selection want
    memset(&plan, 0, sizeof(Plan))
    memset(&want, 0, sizeof(Selection))
    want.src_row, want.dst_row, want.src_first, want.dst_first = src_row, dst_row, src_first, dst_first
    want.src_count, want.dst_count = src_count, dst_count
    cdef int status = check_blocks_destination(targets.shapes, targets.count, &want, &lists.blocks)
    if status == 0:
        status = build_blocks(&plan, sources.shapes, sources.count, targets.shapes, &want, &lists.blocks)
    try:
        return plan_runs(&plan) if status == 0 else status
    finally:
        plan_free(&plan)


TO_BLOCKS = BLOCKS_TO_BLOCKS
FROM_ROW = ROW_TO_BLOCKS
TO_ROW = BLOCKS_TO_ROW
