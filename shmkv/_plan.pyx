# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""From a selection to spans: every bound is checked here, on private copies, without arithmetic that can wrap.

Order of the checks and their answers: see `check_destination` (before any lock) and `build` (with the source in hand).
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset


cdef enum:
    SPANS_MAX = 1 << 24             # of one plan: over 1 GiB of them


cdef class ShapeList:
    """From a list of (offset, nbytes, outer, rows, inner[, dtype[, row_pitch, piece_pitch]]), in bytes from the start of the
    memory; not empty. Without pitches nothing lies between rows."""

    def __cinit__(self, list tensors):
        cdef Shape* shape
        cdef uint32_t i
        self.count = len(tensors)
        self.shapes = <Shape*>malloc(max(self.count, 1) * sizeof(Shape))
        self.dtypes = <uint32_t*>malloc(max(self.count, 1) * sizeof(uint32_t))
        if self.shapes == NULL or self.dtypes == NULL:
            raise MemoryError(f"no memory for {self.count} shapes")
        for i in range(self.count):
            shape = &self.shapes[i]
            shape.offset, shape.nbytes, shape.outer, shape.rows, shape.inner = tensors[i][:5]
            self.dtypes[i] = tensors[i][5] if len(tensors[i]) > 5 else 0
            set_dense(shape)
            if len(tensors[i]) > 6:
                shape.row_pitch, shape.piece_pitch = tensors[i][6:]

    def describe(self):
        """(offset, nbytes, outer, rows, inner, dtype) of each tensor."""
        return [(self.shapes[i].offset, self.shapes[i].nbytes, self.shapes[i].outer, self.shapes[i].rows, self.shapes[i].inner,
                 self.dtypes[i]) for i in range(self.count)]

    def piece_pitches(self):
        """Bytes from one piece of a row to the next, of each tensor."""
        return [self.shapes[i].piece_pitch for i in range(self.count)]

    def moved(self, list offsets):
        """The same tensors at other offsets."""
        cdef uint32_t i
        tensors = []
        for i in range(self.count):
            shape = self.shapes[i]
            tensors.append((offsets[i], shape.nbytes, shape.outer, shape.rows, shape.inner, self.dtypes[i], shape.row_pitch,
                            shape.piece_pitch))
        return ShapeList(tensors)

    def __dealloc__(self):
        free(self.shapes)
        free(self.dtypes)


cdef int check_shape(const Shape* shape, uint64_t segment_nbytes) noexcept nogil:
    """Does a tensor record describe bytes inside its segment? 0 or PLAN_DAMAGED."""
    cdef uint64_t piece_row
    if shape.outer == 0 or shape.rows == 0 or shape.inner == 0:
        return PLAN_DAMAGED
    if shape.nbytes > segment_nbytes or shape.offset > segment_nbytes - shape.nbytes:
        return PLAN_DAMAGED
    # rows * inner * outer == nbytes, found by division so that nothing wraps.
    if shape.inner > shape.nbytes or shape.nbytes % shape.inner:
        return PLAN_DAMAGED
    piece_row = shape.nbytes // shape.inner
    if shape.rows > piece_row or piece_row % shape.rows or piece_row // shape.rows != shape.outer:
        return PLAN_DAMAGED
    return 0


cdef inline bint reaches(uint64_t stride, uint64_t offset, uint64_t nbytes, uint64_t part, uint64_t period) noexcept nogil:
    """Do `nbytes` from `offset` on fit a row of `stride` bytes: at a stretch, or `part` of each `period`?"""
    if period == 0:
        return offset <= stride and nbytes <= stride - offset
    return offset + part <= period and stride % period == 0 and stride // period == nbytes // part


cdef inline int window(const Shape* dst, const Selection* want, uint64_t* nbytes) noexcept nogil:
    """Bytes to copy for this destination tensor: 0 or PLAN_DST_WINDOW."""
    cdef uint64_t stride = row_nbytes(dst)
    if want.dst_offset >= stride:
        return PLAN_DST_WINDOW
    nbytes[0] = stride - want.dst_offset
    if want.size < 0:
        return 0
    nbytes[0] = <uint64_t>want.size
    if want.size == 0 or not reaches(stride, want.dst_offset, nbytes[0], want.window, want.dst_period):
        return PLAN_DST_WINDOW
    return 0


cdef int check_destination(const Shape* dst, uint32_t dst_tensors, Selection* want) noexcept nogil:
    """Row, tensors and window of the destination, before anybody's lock is taken; fills in dst_count when it is -1."""
    cdef uint64_t nbytes = 0
    cdef int64_t i
    cdef int status
    if want.dst_row >= dst[0].rows:
        return PLAN_DST_ROW
    if want.dst_count < 0:
        want.dst_count = dst_tensors
    if want.dst_count == 0 or want.dst_first + want.dst_count > dst_tensors:
        return PLAN_DST_RANGE
    for i in range(want.dst_count):
        status = window(&dst[want.dst_first + i], want, &nbytes)
        if status != 0:
            return status
    return 0


cdef int reserve_spans(Plan* plan, uint64_t count) noexcept nogil:
    """Room for `count` spans in an empty plan."""
    cdef Span* spans
    plan.count = 0
    plan.nbytes = 0
    if plan.capacity >= count:
        return 0
    if count > SPANS_MAX:
        return -ENOMEM
    spans = <Span*>realloc(plan.spans, count * sizeof(Span))
    if spans == NULL:
        return -ENOMEM
    plan.spans = spans
    plan.capacity = <uint32_t>count
    return 0


cdef void place(const Shape* shape, uint64_t row, uint64_t offset, uint64_t* at, uint64_t* left, uint64_t* inner,
                uint64_t* gap) noexcept nogil:
    """Where byte `offset` of a row stands, how much of its piece is left, and how pieces follow each other."""
    cdef uint64_t piece = offset // shape.inner if shape.outer > 1 else 0
    cdef uint64_t within = offset - piece * shape.inner
    inner[0] = shape.inner
    gap[0] = shape.piece_pitch - shape.inner
    at[0] = shape.offset + piece * shape.piece_pitch + row * shape.row_pitch + within
    left[0] = shape.inner - within


cdef inline bint joins(const Span* before, const Span* span) noexcept nogil:
    """Do two one-run spans touch on both sides?"""
    return before.nbytes <= before.src_left and before.nbytes <= before.dst_left \
        and span.nbytes <= span.src_left and span.nbytes <= span.dst_left \
        and before.src + before.nbytes == span.src and before.dst + before.nbytes == span.dst


cdef void add(Plan* plan, const Span* span) noexcept nogil:
    """Append a span to a plan that has room for it, or lengthen the last one if the two touch on both sides."""
    cdef Span* last
    if plan.count:
        last = &plan.spans[plan.count - 1]
        if joins(last, span):
            plan.nbytes += span.nbytes
            last.nbytes += span.nbytes
            last.src_left = last.dst_left = last.nbytes
            return
    plan.spans[plan.count] = span[0]
    plan.spans[plan.count].before = plan.nbytes
    plan.count += 1
    plan.nbytes += span.nbytes


cdef int check_tensors(const Selection* want, uint32_t src_tensors) noexcept nogil:
    """Are the selected tensors of the source there, and as many as the destination's? 0 or PLAN_*."""
    cdef int64_t count = want.src_count if want.src_count >= 0 else src_tensors
    if want.divisor and src_tensors % want.divisor:
        return PLAN_DIVISOR
    if count == 0 or want.src_first + count > src_tensors:
        return PLAN_SRC_RANGE
    return 0 if count == want.dst_count else PLAN_COUNTS


cdef int build(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want) noexcept nogil:
    """Spans of one pull. check_destination has passed and every shape has passed check_shape; 0, PLAN_* or -ENOMEM."""
    cdef uint64_t nbytes = 0, stride
    cdef int64_t i
    cdef int status
    # The row's length comes first, then the ranges. A source whose selected tensors do not exist has tensor 0's length.
    for i in range(want.dst_count):
        window(&dst[want.dst_first + i], want, &nbytes)
        stride = row_nbytes(&src[want.src_first + i if want.src_first + i < src_tensors else 0])
        if not reaches(stride, want.src_offset, nbytes, want.window, want.src_period):
            return PLAN_HEADS if want.window else PLAN_SRC_WINDOW
    status = check_tensors(want, src_tensors)
    if status != 0:
        return status
    if want.window:
        return build_heads(plan, src, dst, want)
    status = reserve_spans(plan, <uint64_t>want.dst_count)
    if status != 0:
        return status
    for i in range(want.dst_count):
        window(&dst[want.dst_first + i], want, &nbytes)
        add_window(plan, &src[want.src_first + i], &dst[want.dst_first + i], want, want.src_offset, want.dst_offset, nbytes)
    return 0


cdef inline void add_window(Plan* plan, const Shape* src, const Shape* dst, const Selection* want, uint64_t src_offset,
                            uint64_t dst_offset, uint64_t nbytes) noexcept nogil:
    """`nbytes` from `src_offset` of the source row to `dst_offset` of the destination row."""
    cdef Span span
    span.nbytes = nbytes
    place(src, want.src_row, src_offset, &span.src, &span.src_left, &span.src_inner, &span.src_gap)
    place(dst, want.dst_row, dst_offset, &span.dst, &span.dst_left, &span.dst_inner, &span.dst_gap)
    add(plan, &span)


cdef inline bint is_even(const Shape* src, const Shape* dst, const Selection* want) noexcept nogil:
    """Is the distance from one group of heads to the next the same all over the row, on both sides?"""
    return (src.outer == 1 or want.src_period == 0) and (dst.outer == 1 or want.dst_period == 0)


cdef int build_heads(Plan* plan, const Shape* src, const Shape* dst, const Selection* want) noexcept nogil:
    """Some of the heads of each row: one span a tensor, or one for each group of heads where a row is in pieces itself."""
    cdef uint64_t groups = <uint64_t>want.size // want.window, spans = 0, group
    cdef uint64_t src_step = want.src_period or want.window, dst_step = want.dst_period or want.window
    cdef const Shape* source
    cdef const Shape* target
    cdef int64_t i
    cdef int status
    for i in range(want.dst_count):
        spans += 1 if is_even(&src[want.src_first + i], &dst[want.dst_first + i], want) else groups
    status = reserve_spans(plan, spans)
    if status != 0:
        return status
    for i in range(want.dst_count):
        source, target = &src[want.src_first + i], &dst[want.dst_first + i]
        if is_even(source, target, want):
            add_groups(plan, source, target, want)
            continue
        for group in range(groups):
            add_window(plan, source, target, want, want.src_offset + group * src_step, want.dst_offset + group * dst_step,
                       want.window)
    return 0


cdef inline void add_groups(Plan* plan, const Shape* src, const Shape* dst, const Selection* want) noexcept nogil:
    """All groups of heads of a row as the pieces of one span."""
    cdef Span span
    span.nbytes = <uint64_t>want.size
    place(src, want.src_row, want.src_offset, &span.src, &span.src_left, &span.src_inner, &span.src_gap)
    place(dst, want.dst_row, want.dst_offset, &span.dst, &span.dst_left, &span.dst_inner, &span.dst_gap)
    if want.src_period:
        span.src_left = span.src_inner = want.window
        span.src_gap = want.src_period - want.window
    if want.dst_period:
        span.dst_left = span.dst_inner = want.window
        span.dst_gap = want.dst_period - want.window
    add(plan, &span)


cdef inline void skip(uint64_t* at, uint64_t* left, uint64_t inner, uint64_t gap, uint64_t nbytes) noexcept nogil:
    """Go `nbytes` on along one side of a span, over as many pieces as that takes."""
    cdef uint64_t pieces
    if nbytes < left[0]:
        at[0] += nbytes
        left[0] -= nbytes
        return
    nbytes -= left[0]
    pieces = nbytes // inner
    nbytes -= pieces * inner
    at[0] += left[0] + gap + pieces * (inner + gap) + nbytes
    left[0] = inner - nbytes


cdef Span seek(const Plan* plan, uint64_t offset, uint32_t* number) noexcept nogil:
    """What is left of the span in which byte `offset` of a plan lies, and the span's number; `offset` is below plan.nbytes."""
    cdef uint32_t low = 0, high = plan.count, middle
    cdef Span span
    while high - low > 1:
        middle = (low + high) // 2
        if plan.spans[middle].before <= offset:
            low = middle
        else:
            high = middle
    number[0] = low
    span = plan.spans[low]
    offset -= span.before
    span.before += offset
    span.nbytes -= offset
    skip(&span.src, &span.src_left, span.src_inner, span.src_gap, offset)
    skip(&span.dst, &span.dst_left, span.dst_inner, span.dst_gap, offset)
    return span


cdef void plan_free(Plan* plan) noexcept nogil:
    free(plan.spans)
    plan.spans = NULL
    plan.count = plan.capacity = 0


# -- for tests: a plan as a Python value ------------------------------------------------------------------------------

def runs(src: list, dst: list, *, int64_t size=-1, uint64_t src_offset=0, uint64_t dst_offset=0, uint32_t src_row=0,
         uint32_t dst_row=0, uint32_t src_first=0, uint32_t dst_first=0, int64_t src_count=-1, int64_t dst_count=-1,
         uint64_t window=0, uint64_t src_period=0, uint64_t dst_period=0):
    """The runs [(src byte, dst byte, nbytes)] of a selection, or a negative PLAN_* number.

    `src`, `dst`: one tuple a tensor, as for ShapeList.
    """
    cdef ShapeList sources = ShapeList(src), targets = ShapeList(dst)
    cdef Plan plan
    cdef Selection want
    memset(&plan, 0, sizeof(Plan))
    memset(&want, 0, sizeof(Selection))
    want.size, want.src_offset, want.dst_offset, want.src_row, want.dst_row = size, src_offset, dst_offset, src_row, dst_row
    want.src_first, want.dst_first, want.src_count, want.dst_count = src_first, dst_first, src_count, dst_count
    want.window, want.src_period, want.dst_period = window, src_period, dst_period
    cdef int status = check_destination(targets.shapes, targets.count, &want)
    if status == 0:
        status = build(&plan, sources.shapes, sources.count, targets.shapes, &want)
    try:
        return plan_runs(&plan) if status == 0 else status
    finally:
        plan_free(&plan)


cdef list plan_runs(const Plan* plan):
    """[(src byte, dst byte, nbytes)] in the order in which they are copied."""
    cdef Span span
    cdef uint64_t step
    cdef uint32_t i
    found = []
    for i in range(plan.count):
        span = plan.spans[i]
        while span.nbytes:
            step = min(span.nbytes, span.src_left, span.dst_left)
            found.append((span.src, span.dst, step))
            advance(&span, step)
    return found


DST_ROW = PLAN_DST_ROW
DST_RANGE = PLAN_DST_RANGE
DST_WINDOW = PLAN_DST_WINDOW
SRC_WINDOW = PLAN_SRC_WINDOW
SRC_RANGE = PLAN_SRC_RANGE
COUNTS = PLAN_COUNTS
DAMAGED = PLAN_DAMAGED
DIVISOR = PLAN_DIVISOR
DST_BLOCK = PLAN_DST_BLOCK
SRC_BLOCK = PLAN_SRC_BLOCK
BLOCK_NBYTES = PLAN_BLOCK_NBYTES
BLOCKS_WINDOW = PLAN_BLOCKS_WINDOW
HEADS = PLAN_HEADS
FORMAT = PLAN_FORMAT
ARGUMENT_FAULTS = frozenset([DST_ROW, DST_RANGE, DST_WINDOW, SRC_WINDOW, SRC_RANGE, COUNTS, DIVISOR, DST_BLOCK, SRC_BLOCK,
                             BLOCK_NBYTES, BLOCKS_WINDOW, HEADS, FORMAT])
