# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""One pull. `pull_locked` is the table of contents; each step is one function.

  link_enter    queue of this process's threads, then the link's word, one deadline for both (`_link`)
  find          the row in the peer's directory, pinned by the hazard (`_lookup`)
  attach        the segment, once, kept (`_mapping`)
  make_plan     every bound, on private copies (`_plan`)
  move          the bytes; deadline, signals, link and peer are looked at every few MiB (`_copy`)
  finish        were the bytes the row's all the time? then coverage, consume
  link_leave    word released, next thread

Python stands before it (arguments: `transfer.py`) and behind it (status to exception).
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from shmkv._copy cimport MOVE_DIRECT, MOVE_GATHER, MOVE_SCATTER, move
from shmkv._futex cimport add32_seq, load32_acquire, load64_acquire, now_ns, store64_relaxed, swap32_seq
from shmkv._layout cimport (
    COUNT_BYTES,
    COUNT_COPY_NS,
    COUNT_FAILED,
    COUNT_PULLS,
    COUNT_TIMEOUTS,
    COUNT_WAIT_NS,
    KEY_NONE,
    KEY_REQUEST,
    ROW_LIVE,
    UNLINKED_RING,
    CacheRecord,
    TensorRecord,
    directory_header,
    tensor_at,
    unlinked_at,
    word_generation,
    word_state,
)
from shmkv._link cimport (
    LINK_BUSY,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    LinkHandle,
    is_inside,
    link_enter,
    link_leave,
    look_between_chunks,
    patience_init,
    raise_pending,
    run_signals,
)
from shmkv._lookup cimport (
    FIND_NEVER,
    FoundRow,
    consume,
    cover,
    find_key,
    find_row,
    is_full,
    pin,
    recheck,
    unpin,
    why_ended,
    FIND_UNPUBLISHED,
)
from shmkv._mapping cimport (
    ATTACH_SIZE,
    Attached,
    attach_segment,
    check_generation,
    populate,
    table_clear,
    table_drop,
    table_find,
    table_init,
)
from shmkv._plan cimport PLAN_DAMAGED, build, check_destination, check_shape, plan_free

cdef enum:
    POPULATE_NBYTES = 64 << 20


cdef struct Looker:
    Link* link
    Patience* wait


# -- a pull over a link ----------------------------------------------------------------------------------------------

cdef int pull_now(Link* link, Local* dst, Request* want) noexcept nogil:
    """0 or the answer of the first step that did not pass. The plan in `want` is the caller's to free."""
    cdef int64_t begin = now_ns()
    cdef int64_t entered
    cdef int status
    if not local_enter(dst):
        return PULL_DST_GONE
    status = check_destination(dst.shapes, dst.num_tensors, &want.select)
    if status == 0:
        status = link_enter(link, &want.wait)
        if status == 0:
            entered = now_ns()
            status = pull_locked(link, dst, want)
            count(link, want, status, entered - begin, now_ns() - entered)
            link_leave(link)
    local_leave(dst)
    return status


cdef int pull_locked(Link* link, Local* dst, Request* want) noexcept nogil:
    cdef FoundRow found
    cdef Attached* segment = NULL
    cdef Looker looker
    cdef int status
    drop_unlinked(link)
    status = find(link, want, &found)
    if status != 0:
        return status
    status = attach(link, want, &found, &segment)
    if status == 0:
        status = make_plan(link, want, &found.copy, segment.nbytes, dst)
    if status == 0:
        looker.link = link
        looker.wait = &want.wait
        status = move(&want.plan, segment.address, dst.base, MOVE_DIRECT, look_at_link, &looker)
    if status == 0:
        status = finish(link, want, &found)
    unpin(link.mine)
    return status


cdef int look_at_link(void* context) noexcept nogil:
    cdef Looker* looker = <Looker*>context
    return look_between_chunks(looker.link, looker.wait)


cdef int find(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """The row, pinned and published. What changes between the look and the pin is looked up again, until the deadline."""
    cdef int status
    while True:
        if want.by_key:
            status = find_key(link.directory, &want.key, found)
            if status == FIND_NEVER:
                return why_ended(link.directory, &want.key)
        else:
            status = find_row(link.directory, want.cache_id, want.select.src_row, found)
        if status != 0:
            return status
        if pin(link.mine, found):
            break
        if now_ns() >= want.wait.deadline_ns:
            return LINK_TIMEOUT
    want.select.src_row = found.batch_index
    if load32_acquire(&found.row.progress) >= tensors_wanted(want, &found.copy):    # consume: progress
        return 0
    unpin(link.mine)
    return FIND_UNPUBLISHED


cdef uint64_t tensors_wanted(const Request* want, const CacheRecord* cache) noexcept nogil:
    """How far the row must be published: the last selected tensor, or all there are if the range is not a valid one."""
    cdef uint64_t end = cache.num_tensors
    if want.select.src_count >= 0 and want.select.src_first + <uint64_t>want.select.src_count < end:
        end = want.select.src_first + <uint64_t>want.select.src_count
    return end


cdef void drop_unlinked(Link* link) noexcept nogil:
    """Let go of mappings whose segments the peer gave up since the last call."""
    cdef uint64_t count = load64_acquire(&directory_header(link.directory).segments_unlinked)
    if count - link.unlinked_seen > UNLINKED_RING:
        table_clear(&link.segments)
        if table_init(&link.segments) != 0:
            return
        link.unlinked_seen = count
    while link.unlinked_seen != count:
        table_drop(&link.segments, unlinked_at(link.directory, link.unlinked_seen)[0])
        link.unlinked_seen += 1


cdef int attach(Link* link, Request* want, const FoundRow* found, Attached** segment) noexcept nogil:
    """The cache's segment, mapped and populated. Page-table entries come in steps, so that a deadline can end it; the next
    call goes on where this one stopped."""
    cdef int status = 0
    if link.segments.entries == NULL:
        return -ENOMEM
    segment[0] = table_find(&link.segments, found.copy.segment_serial)
    if segment[0] == NULL:
        status = attach_segment(&link.segments, link.prefix, link.peer_incarnation, found.copy.segment_serial,
                                found.copy.segment_nbytes, segment)
    elif segment[0].nbytes != found.copy.segment_nbytes:
        status = ATTACH_SIZE
    if status == 0:
        status = check_generation(segment[0], link.peer_incarnation, word_generation(found.cache_word))
    while status == 0 and segment[0].populated < segment[0].nbytes:
        status = populate(segment[0], POPULATE_NBYTES)
        if status >= 0:
            status = look_between_chunks(link, &want.wait)
    return status


cdef int make_plan(Link* link, Request* want, const CacheRecord* cache, uint64_t nbytes, Local* dst) noexcept nogil:
    """Copy the source's tensor records, check the copies, and turn the selection into spans."""
    cdef uint32_t i, count = cache.num_tensors
    cdef TensorRecord* shared = tensor_at(link.directory, cache.first_tensor)
    cdef Shape* shapes
    cdef int status = 0
    if count == 0:
        return PLAN_DAMAGED
    shapes = <Shape*>malloc(count * sizeof(Shape))
    if shapes == NULL:
        return -ENOMEM
    for i in range(count):
        memcpy(&shapes[i], &shared[i], sizeof(Shape))
        if check_shape(&shapes[i], nbytes) != 0 or shapes[i].rows != cache.num_rows:
            status = PLAN_DAMAGED
            break
    if status == 0:
        status = build(&want.plan, shapes, count, dst.shapes, &want.select)
    free(shapes)
    return status


cdef int finish(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """After the last byte: still the same row? Then mark what was pulled, and consume the key when all was."""
    cdef uint32_t count = <uint32_t>want.select.dst_count
    cdef int status = recheck(found, want.by_key)
    if status != 0:
        return status
    store64_relaxed(&found.row.last_use_ns, now_ns())
    if not want.consumes or found.key_kind != KEY_REQUEST or word_state(found.row_word) != ROW_LIVE:
        return 0
    if count < found.copy.num_tensors:
        if not cover(link.directory, found, want.select.src_first, count):
            return 0
        if not is_full(link.directory, &found.copy, found.batch_index, word_generation(found.row_word)):
            return 0
    consume(found)
    return 0


cdef void count(Link* link, const Request* want, int status, int64_t waited_ns, int64_t copied_ns) noexcept nogil:
    cdef uint64_t* counters = link.mine.counters
    store64_relaxed(&counters[COUNT_WAIT_NS], counters[COUNT_WAIT_NS] + <uint64_t>waited_ns)
    if status == 0:
        store64_relaxed(&counters[COUNT_PULLS], counters[COUNT_PULLS] + 1)
        store64_relaxed(&counters[COUNT_BYTES], counters[COUNT_BYTES] + want.plan.nbytes)
        store64_relaxed(&counters[COUNT_COPY_NS], counters[COUNT_COPY_NS] + <uint64_t>copied_ns)
    elif status == LINK_TIMEOUT:
        store64_relaxed(&counters[COUNT_TIMEOUTS], counters[COUNT_TIMEOUTS] + 1)
    else:
        store64_relaxed(&counters[COUNT_FAILED], counters[COUNT_FAILED] + 1)


# -- a copy inside this process --------------------------------------------------------------------------------------

cdef int copy_now(Local* src, Local* dst, Request* want) noexcept nogil:
    """Between two caches of this process, or within one: the result is as if through a temporary. The caller keeps the source
    from being freed."""
    cdef int status
    if is_inside():
        return LINK_BUSY
    if not local_enter(dst):
        return PULL_DST_GONE
    status = check_destination(dst.shapes, dst.num_tensors, &want.select)
    if status == 0:
        status = build(&want.plan, src.shapes, src.num_tensors, dst.shapes, &want.select)
    if status == 0:
        status = move_within(src, dst, want)
    local_leave(dst)
    return status


cdef int move_within(Local* src, Local* dst, Request* want) noexcept nogil:
    cdef char* between
    cdef int status
    if src != dst or want.select.src_row != want.select.dst_row:
        return move(&want.plan, src.base, dst.base, MOVE_DIRECT, look_at_clock, &want.wait)
    # The same row of one cache: windows of source and destination can overlap.
    between = <char*>malloc(want.plan.nbytes)
    if between == NULL:
        return -ENOMEM
    status = move(&want.plan, src.base, between, MOVE_GATHER, look_at_clock, &want.wait)
    if status == 0:
        status = move(&want.plan, between, dst.base, MOVE_SCATTER, look_at_clock, &want.wait)
    free(between)
    return status


cdef int look_at_clock(void* context) noexcept nogil:
    cdef Patience* wait = <Patience*>context
    cdef int64_t now = now_ns()
    if now >= wait.deadline_ns:
        return LINK_TIMEOUT
    return run_signals(wait) if wait.is_main and now - wait.signals_ns >= 50000000 else 0


# -- caches of this process ------------------------------------------------------------------------------------------

cdef bint local_enter(Local* cache) noexcept nogil:
    """Count this call in, unless the cache was closed; seq_cst on both sides, as with hazards."""
    add32_seq(&cache.uses, 1)
    if load32_acquire(&cache.is_open):
        return True
    local_leave(cache)
    return False


cdef void local_leave(Local* cache) noexcept nogil:
    add32_seq(&cache.uses, <uint32_t>-1)


cdef class LocalCache:
    """Tensors of one cache in this process.

    `shapes`: one (offset, nbytes, outer, rows, inner) a tensor, in bytes from the start of `region`.
    """

    def __cinit__(self, Region region, list shapes):
        cdef Local* local = &self.local
        cdef Shape* shape
        self.region = region
        local.base = region.address
        local.num_tensors = len(shapes)
        local.shapes = <Shape*>malloc(local.num_tensors * sizeof(Shape))
        if local.shapes == NULL:
            raise MemoryError("no memory for the shapes of a cache")
        for i in range(local.num_tensors):
            shape = &local.shapes[i]
            shape.offset, shape.nbytes, shape.outer, shape.rows, shape.inner = shapes[i]
        local.is_open = 1

    def __dealloc__(self):
        free(self.local.shapes)

    def close(self):
        """No new call may use the cache from now on."""
        swap32_seq(&self.local.is_open, 1, 0)

    @property
    def uses(self):
        """Calls of this process that read or write the cache now."""
        return add32_seq(&self.local.uses, 0)

    def count_in(self):
        """Keep the cache from being freed until `leave`, also one that was deallocated and lives by its keys. The caller has
        the owner's lock, so it is not freed meanwhile."""
        add32_seq(&self.local.uses, 1)

    def leave(self):
        """The end of a `count_in`."""
        local_leave(&self.local)


# -- from Python -----------------------------------------------------------------------------------------------------

cdef void request_init(Request* want, tuple select, int64_t timeout_ms):
    """`select`: (size, src_offset, dst_offset, src_row, dst_row, src_first, src_count, dst_first, dst_count, divisor)."""
    cdef Selection* s = &want.select
    memset(want, 0, sizeof(Request))
    s.size, s.src_offset, s.dst_offset, s.src_row, s.dst_row, s.src_first, s.src_count, s.dst_first, s.dst_count, s.divisor = select
    patience_init(&want.wait, timeout_ms)


def pull(LinkHandle handle, LocalCache dst, tuple key, tuple select, bint consumes, int64_t timeout_ms):
    """Pull one row over a link: 0 or a negative status. Raises only what a signal handler raised.

    `key`: (kind, req_id, prefix_id, model_id), or (KEY_NONE, cache_id, 0, 0) for a cache id; `select` as in `request_init`.
    """
    cdef Request want
    cdef int status
    request_init(&want, select, timeout_ms)
    want.key.kind, want.key.words[0], want.key.words[1], want.key.words[2] = key
    want.by_key = want.key.kind != KEY_NONE
    want.cache_id = <int64_t>want.key.words[0]
    want.consumes = consumes
    with nogil:
        status = pull_now(&handle.link, &dst.local, &want)
        plan_free(&want.plan)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


def copy(LocalCache src, LocalCache dst, tuple select, int64_t timeout_ms):
    """Copy one row between caches of this process: 0 or a negative status. `select` as in `request_init`."""
    cdef Request want
    cdef int status
    request_init(&want, select, timeout_ms)
    with nogil:
        status = copy_now(&src.local, &dst.local, &want)
        plan_free(&want.plan)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


def check(LocalCache dst, tuple select):
    """The destination's part of a pull's checks: 0 or a negative status. `select` as in `request_init`."""
    cdef Request want
    request_init(&want, select, 0)
    if not load32_acquire(&dst.local.is_open):
        return PULL_DST_GONE
    return check_destination(dst.local.shapes, dst.local.num_tensors, &want.select)


DST_GONE = PULL_DST_GONE
SRC_GONE = PULL_SRC_GONE
