# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""From a selection to spans: every bound is checked here, on private copies, without arithmetic that can wrap.

Order of the checks and their answers: see `check_destination` (before any lock) and `build` (with the source in hand).
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from shmkv._futex cimport load_words


cdef class ShapeList:
    """From a list of (offset, nbytes, outer, rows, inner[, dtype]), in bytes from the segment's start; not empty."""

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


cdef inline uint64_t row_nbytes(const Shape* shape) noexcept nogil:
    return shape.outer * shape.inner


cdef inline int window(const Shape* dst, const Selection* want, uint64_t* nbytes) noexcept nogil:
    """Bytes to copy for this destination tensor: 0 or PLAN_DST_WINDOW."""
    cdef uint64_t stride = row_nbytes(dst)
    if want.dst_offset >= stride:
        return PLAN_DST_WINDOW
    nbytes[0] = stride - want.dst_offset
    if want.size >= 0:
        if want.size == 0 or <uint64_t>want.size > nbytes[0]:
            return PLAN_DST_WINDOW
        nbytes[0] = <uint64_t>want.size
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


cdef int reserve_spans(Plan* plan, uint32_t count) noexcept nogil:
    cdef Span* spans
    if plan.capacity >= count:
        return 0
    spans = <Span*>realloc(plan.spans, count * sizeof(Span))
    if spans == NULL:
        return -ENOMEM
    plan.spans = spans
    plan.capacity = count
    return 0


cdef inline void place(const Shape* shape, uint32_t row, uint64_t offset, uint64_t* at, uint64_t* left, uint64_t* inner,
                       uint64_t* gap) noexcept nogil:
    """Where byte `offset` of a row stands, how much of its piece is left, and how pieces follow each other."""
    cdef uint64_t piece = offset // shape.inner if shape.outer > 1 else 0
    cdef uint64_t within = offset - piece * shape.inner
    inner[0] = shape.inner
    gap[0] = (shape.rows - 1) * shape.inner
    at[0] = shape.offset + (piece * shape.rows + row) * shape.inner + within
    left[0] = shape.inner - within


cdef inline bint joins(const Span* before, const Span* span) noexcept nogil:
    """Do two one-run spans touch on both sides?"""
    return before.nbytes <= before.src_left and before.nbytes <= before.dst_left \
        and span.nbytes <= span.src_left and span.nbytes <= span.dst_left \
        and before.src + before.nbytes == span.src and before.dst + before.nbytes == span.dst


cdef inline void add(Plan* plan, const Span* span) noexcept nogil:
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


cdef int build(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want) noexcept nogil:
    """Spans of one pull. check_destination has passed and every shape has passed check_shape; 0, PLAN_* or -ENOMEM."""
    cdef int64_t count = want.src_count if want.src_count >= 0 else src_tensors
    cdef uint64_t nbytes = 0, stride
    cdef Span span
    cdef int64_t i
    cdef int status
    # The row's length comes first, then the ranges. A source whose selected tensors do not exist has tensor 0's length.
    for i in range(want.dst_count):
        window(&dst[want.dst_first + i], want, &nbytes)
        stride = row_nbytes(&src[want.src_first + i if want.src_first + i < src_tensors else 0])
        if want.src_offset > stride or nbytes > stride - want.src_offset:
            return PLAN_SRC_WINDOW
    if want.divisor and src_tensors % want.divisor:
        return PLAN_DIVISOR
    if count == 0 or want.src_first + count > src_tensors:
        return PLAN_SRC_RANGE
    if count != want.dst_count:
        return PLAN_COUNTS
    status = reserve_spans(plan, <uint32_t>count)
    if status != 0:
        return status
    plan.count = 0
    plan.nbytes = 0
    for i in range(count):
        window(&dst[want.dst_first + i], want, &span.nbytes)
        place(&src[want.src_first + i], want.src_row, want.src_offset, &span.src, &span.src_left, &span.src_inner,
              &span.src_gap)
        place(&dst[want.dst_first + i], want.dst_row, want.dst_offset, &span.dst, &span.dst_left, &span.dst_inner,
              &span.dst_gap)
        add(plan, &span)
    return 0


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


# -- plans that are kept: a server pulls the same shape again and again -----------------------------------------------

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
        if memcmp(&kept.src[i], records + <size_t>i * record_nbytes, sizeof(Shape)) != 0:
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
        load_words(&shapes[i], records + <size_t>i * record_nbytes, sizeof(Shape))
        if check_shape(&shapes[i], nbytes) != 0 or shapes[i].rows != rows:
            return PLAN_DAMAGED
    return 0


cdef void plans_free(KeptPlans* plans) noexcept nogil:
    """Let go of all that are kept; new ones can be kept afterwards."""
    cdef int i
    for i in range(PLANS_KEPT):
        free(plans.kept[i].src)
        plan_free(&plans.kept[i].plan)
    memset(plans, 0, sizeof(KeptPlans))


# -- for tests: a plan as a Python value ------------------------------------------------------------------------------

def runs(src: list, dst: list, *, int64_t size=-1, uint64_t src_offset=0, uint64_t dst_offset=0, uint32_t src_row=0,
         uint32_t dst_row=0, uint32_t src_first=0, uint32_t dst_first=0, int64_t src_count=-1, int64_t dst_count=-1):
    """The runs [(src byte, dst byte, nbytes)] of a selection, or a negative PLAN_* number.

    `src`, `dst`: one (offset, nbytes, outer, rows, inner) a tensor, in bytes.
    """
    cdef Plan plan
    cdef Selection want
    cdef Span span
    cdef Shape[64] src_shapes, dst_shapes
    cdef uint64_t step
    plan.spans = NULL
    plan.count = plan.capacity = 0
    want.size, want.src_offset, want.dst_offset, want.src_row, want.dst_row = size, src_offset, dst_offset, src_row, dst_row
    want.src_first, want.dst_first, want.src_count, want.dst_count = src_first, dst_first, src_count, dst_count
    want.divisor = 0
    for i in range(len(src)):
        src_shapes[i].offset, src_shapes[i].nbytes, src_shapes[i].outer, src_shapes[i].rows, src_shapes[i].inner = src[i]
    for i in range(len(dst)):
        dst_shapes[i].offset, dst_shapes[i].nbytes, dst_shapes[i].outer, dst_shapes[i].rows, dst_shapes[i].inner = dst[i]
    cdef int status = check_destination(dst_shapes, len(dst), &want)
    if status == 0:
        status = build(&plan, src_shapes, len(src), dst_shapes, &want)
    if status != 0:
        plan_free(&plan)
        return status
    found = []
    for i in range(plan.count):
        span = plan.spans[i]
        while span.nbytes:
            step = min(span.nbytes, span.src_left, span.dst_left)
            found.append((span.src, span.dst, step))
            advance(&span, step)
    plan_free(&plan)
    return found


DST_ROW = PLAN_DST_ROW
DST_RANGE = PLAN_DST_RANGE
DST_WINDOW = PLAN_DST_WINDOW
SRC_WINDOW = PLAN_SRC_WINDOW
SRC_RANGE = PLAN_SRC_RANGE
COUNTS = PLAN_COUNTS
DAMAGED = PLAN_DAMAGED
DIVISOR = PLAN_DIVISOR
ARGUMENT_FAULTS = frozenset(
    [PLAN_DST_ROW, PLAN_DST_RANGE, PLAN_DST_WINDOW, PLAN_SRC_WINDOW, PLAN_SRC_RANGE, PLAN_COUNTS, PLAN_DIVISOR])
