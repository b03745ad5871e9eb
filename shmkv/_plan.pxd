"""Selection: which bytes of one row go where. Speaks of tensors, rows and offsets, never of addresses: a plan is a value."""
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    # Answers besides 0 and -errno, in the order in which a pull looks.
    PLAN_DST_ROW = -1201            # batch_index beyond the destination's rows
    PLAN_DST_RANGE = -1202          # destination tensors beyond num_tensors
    PLAN_DST_WINDOW = -1203         # nothing to copy, or dst_cache_offset + size beyond the destination row
    PLAN_SRC_WINDOW = -1204         # src_cache_offset + size beyond the source row
    PLAN_SRC_RANGE = -1205          # source tensors beyond num_tensors
    PLAN_COUNTS = -1206             # unequal numbers of selected tensors
    PLAN_DAMAGED = -1207            # a tensor record that no owner writes
    PLAN_DIVISOR = -1208            # the source's tensors are not whole layers
    PLAN_DST_BLOCK = -1209          # a block beyond the destination's
    PLAN_SRC_BLOCK = -1210          # a block beyond the source's
    PLAN_BLOCK_NBYTES = -1211       # blocks of unequal bytes
    PLAN_BLOCKS_WINDOW = -1212      # more blocks than the row on the other side has room for
    PLAN_HEADS = -1213              # the source's rows are not whole groups of heads
    PLAN_FORMAT = -1214             # source and destination were given different kv_tensor_formats


cdef enum:
    SHAPE_RECORD_NBYTES = 40        # of a Shape: its first five numbers, which a TensorRecord begins with


cdef struct Shape:
    # One tensor seen as rows: row b is `outer` pieces of `inner` bytes, piece p at `p * piece_pitch + b * row_pitch`.
    uint64_t offset                 # of the tensor, in bytes from the start of its memory
    uint64_t nbytes                 # from its first to its last byte
    uint64_t outer
    uint64_t rows
    uint64_t inner
    # In a segment nothing lies between rows: `inner` and `rows * inner`. Memory of the caller may have gaps.
    uint64_t row_pitch
    uint64_t piece_pitch


cdef class ShapeList:
    """Tensors of a cache as rows, for C; never changed once it is made."""
    cdef Shape* shapes
    cdef uint32_t* dtypes
    cdef readonly uint32_t count


cdef struct Selection:
    # What a call asks for, both sides spelt alike.
    int64_t size                    # bytes of each row, -1 = the rest of the destination row
    uint64_t src_offset             # within the row
    uint64_t dst_offset
    uint32_t src_row
    uint32_t dst_row
    uint32_t src_first              # first selected tensor
    uint32_t dst_first
    int64_t src_count               # -1 = all
    int64_t dst_count
    uint32_t divisor                # tensors a layer that must divide the source's number of tensors, 0 = any
    # Some of the heads: `window` bytes of each group of heads, 0 = whole rows. A side that has all of its heads taken has period 0.
    uint64_t window
    uint64_t src_period             # bytes of all heads
    uint64_t dst_period
    uint64_t strict_format          # a source of another kv_tensor_format is refused


cdef struct Span:
    # The same window of one row of one tensor on both sides.
    uint64_t src                    # byte where the window begins
    uint64_t dst
    uint64_t src_left               # bytes until the end of the piece in which it begins
    uint64_t dst_left
    uint64_t src_inner
    uint64_t dst_inner
    uint64_t src_gap                # from the end of a piece to the next one
    uint64_t dst_gap
    uint64_t nbytes
    uint64_t before                 # bytes of the plan's earlier spans


cdef struct Plan:
    Span* spans
    uint32_t count
    uint32_t capacity
    uint64_t nbytes                 # in all


cdef inline void advance(Span* span, uint64_t step) noexcept nogil:
    """Go `step` bytes on; the step ends at the end of a piece at the latest, on either side."""
    span.nbytes -= step
    span.src += step
    span.dst += step
    span.src_left -= step
    span.dst_left -= step
    if span.src_left == 0:
        span.src += span.src_gap
        span.src_left = span.src_inner
    if span.dst_left == 0:
        span.dst += span.dst_gap
        span.dst_left = span.dst_inner


cdef inline uint64_t row_nbytes(const Shape* shape) noexcept nogil:
    return shape.outer * shape.inner


cdef inline void set_dense(Shape* shape) noexcept nogil:
    """Rows and pieces follow each other without a gap, as in every segment."""
    shape.row_pitch = shape.inner
    shape.piece_pitch = shape.rows * shape.inner


cdef Span seek(const Plan* plan, uint64_t offset, uint32_t* number) noexcept nogil
cdef int check_shape(const Shape* shape, uint64_t segment_nbytes) noexcept nogil
cdef int check_destination(const Shape* dst, uint32_t dst_tensors, Selection* want) noexcept nogil
cdef int reserve_spans(Plan* plan, uint64_t count) noexcept nogil
cdef void place(const Shape* shape, uint64_t row, uint64_t offset, uint64_t* at, uint64_t* left, uint64_t* inner,
                uint64_t* gap) noexcept nogil
cdef void add(Plan* plan, const Span* span) noexcept nogil
cdef int check_tensors(const Selection* want, uint32_t src_tensors) noexcept nogil
cdef int build(Plan* plan, const Shape* src, uint32_t src_tensors, const Shape* dst, const Selection* want) noexcept nogil
cdef list plan_runs(const Plan* plan)
cdef void plan_free(Plan* plan) noexcept nogil
