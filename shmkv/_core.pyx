# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""One pull. `pull_locked` is the table of contents; each step is one function.

  link_enter    queue of this process's threads, then the link's word, one deadline for both (`_link`)
  find          the row in the peer's directory, pinned by the hazard (`_lookup`)
  attach        the segment, once, kept (`_mapping`)
  make_plan     every bound, on private copies (`_plan`)
  move          the bytes; deadline, signals, link and peer are looked at every few MiB (`_copy`)
  finish        were the bytes the row's all the time? then coverage, consume
  link_leave    word released, next thread

`pull_now` goes in and out of the lock. Python stands before it and behind it (`_pull`, `transfer.py`).
"""
from libc.errno cimport ENOENT, ENOMEM
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from shmkv._attached cimport (
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
from shmkv._copy cimport MOVE_DIRECT, MOVE_GATHER, MOVE_SCATTER, move
from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    add32_seq,
    add64_relaxed,
    load32_acquire,
    load32_seq,
    load64_acquire,
    load64_relaxed,
    now_ns,
    store64_relaxed,
    swap32_seq,
)
from shmkv._layout cimport (
    COUNT_BYTES,
    COUNT_COPY_NS,
    COUNT_FAILED,
    COUNT_PULLS,
    COUNT_TIMEOUTS,
    COUNT_WAIT_NS,
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
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    SIGNALS_NS,
    is_forked,
    is_inside,
    link_enter,
    link_leave,
    look,
    look_between_chunks,
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
from shmkv._plan cimport PLAN_DAMAGED, Plan, ShapeList, build, check_destination, plan_for, plan_free

cdef extern from *:
    """
    /* What the calling thread's last pull did: kept here, because several threads pull at once. */
    static __thread uint64_t last_nbytes;
    static __thread int64_t last_wait_ns, last_copy_ns;
    static inline void last_pull_note(uint64_t nbytes, int64_t wait_ns, int64_t copy_ns)
    { last_nbytes = nbytes; last_wait_ns = wait_ns; last_copy_ns = copy_ns; }
    static inline uint64_t last_pull_nbytes(void) { return last_nbytes; }
    static inline int64_t last_pull_wait_ns(void) { return last_wait_ns; }
    static inline int64_t last_pull_copy_ns(void) { return last_copy_ns; }
    """
    void last_pull_note(uint64_t nbytes, int64_t wait_ns, int64_t copy_ns) noexcept nogil
    uint64_t last_pull_nbytes() noexcept nogil
    int64_t last_pull_wait_ns() noexcept nogil
    int64_t last_pull_copy_ns() noexcept nogil

cdef enum:
    POPULATE_NBYTES = 64 << 20


cdef struct Looker:
    Link* link
    Patience* wait


# -- a pull over a link ----------------------------------------------------------------------------------------------

cdef int pull_now(Link* link, Local* dst, Request* want) noexcept nogil:
    """0 or the answer of the first step that did not pass."""
    cdef int status
    if not local_enter(dst):
        return PULL_DST_GONE
    status = check_destination(dst.shapes, dst.num_tensors, &want.select)
    if status == 0:
        status = link_enter(link, &want.wait)
        if status == 0:
            status = pull_locked(link, dst, want)
            link_leave(link)
        elif status == LINK_TIMEOUT:
            add64_relaxed(&link.mine.counters[COUNT_TIMEOUTS], 1)
    local_leave(dst)
    return status


cdef int pull_locked(Link* link, Local* dst, Request* want) noexcept nogil:
    cdef FoundRow found
    cdef Attached* segment = NULL
    cdef Plan* plan = NULL
    cdef Looker looker
    cdef int status
    drop_unlinked(link)
    status = find(link, want, &found)
    if status == 0:
        status = attach(link, want, &found, &segment)
        if status == 0:
            status = make_plan(link, want, &found.copy, segment.nbytes, dst, &plan)
        if status == 0:
            looker.link = link
            looker.wait = &want.wait
            status = move(plan, segment.address, segment.fd, dst.base, MOVE_DIRECT, look_at_link, &looker)
        if status == 0:
            crash_point(b"copied")
            want.nbytes = plan.nbytes
            status = finish(link, want, &found)
        if is_forked(link):         # by a signal handler, which may have raised, too: hazard, lock and counters are the parent's
            return status if status == LINK_INTERRUPTED else LINK_FORKED
        unpin(link.mine)
    count(link, want, status)
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
    if count - link.unlinked_seen >= UNLINKED_RING:     # the owner may be writing the oldest entry again
        table_clear(&link.segments)
        if table_init(&link.segments, link.segments.by_pread) != 0:
            return
        link.unlinked_seen = count
    while link.unlinked_seen != count:
        table_drop(&link.segments, load64_relaxed(unlinked_at(link.directory, link.unlinked_seen)))
        link.unlinked_seen += 1


cdef int attach(Link* link, Request* want, const FoundRow* found, Attached** segment) noexcept nogil:
    """The cache's segment, mapped and populated. Page-table entries come in steps, so that a deadline can end it; the next
    call goes on where this one stopped."""
    cdef int status = 0
    if link.segments.entries == NULL:
        return -ENOMEM
    segment[0] = table_find(&link.segments, found.copy.segment_serial)
    if segment[0] == NULL:
        crash_point(b"attaching")
        status = attach_segment(&link.segments, link.prefix, link.peer_incarnation, found.copy.segment_serial,
                                found.copy.segment_nbytes, segment)
        if status == -ENOENT and look(link) != 0:
            status = look(link)     # the peer is just finalizing, or dead and being swept
    elif segment[0].nbytes != found.copy.segment_nbytes:
        status = ATTACH_SIZE
    if status == 0:
        status = check_generation(segment[0], link.peer_incarnation, word_generation(found.cache_word))
    while status == 0 and segment[0].populated < segment[0].nbytes:
        status = populate(segment[0], POPULATE_NBYTES)
        if status >= 0:
            status = look_between_chunks(link, &want.wait)
    return status


cdef int make_plan(Link* link, Request* want, const CacheRecord* cache, uint64_t nbytes, Local* dst, Plan** plan) noexcept nogil:
    """Turn the selection into spans, or find them made already for the same numbers."""
    cdef TensorRecord* shared = tensor_at(link.directory, cache.first_tensor)
    if cache.num_tensors == 0:
        return PLAN_DAMAGED
    return plan_for(&link.plans, <const char*>shared, sizeof(TensorRecord), cache.num_tensors, cache.num_rows, nbytes, dst.shapes,
                    dst.number, &want.select, plan)


cdef int finish(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """After the last byte: still the same row? Then mark what was pulled, and consume the key when all was."""
    cdef uint32_t count = <uint32_t>want.select.dst_count
    cdef int status = recheck(found, want.by_key)
    if status != 0:
        return status
    crash_point(b"rechecked")
    store64_relaxed(&found.row.last_use_ns, want.wait.entered_ns)
    if not want.consumes or found.key_kind != KEY_REQUEST or word_state(found.row_word) != ROW_LIVE:
        return 0
    if count < found.copy.num_tensors:
        if not cover(link.directory, found, want.select.src_first, count):
            return 0
        if not is_full(link.directory, &found.copy, found.batch_index, word_generation(found.row_word)):
            return 0
    consume(found)
    return 0


cdef inline void count_up(uint64_t* counter, uint64_t by) noexcept nogil:
    """Under the link's lock nobody else of this side writes it: no locked instruction is needed."""
    store64_relaxed(counter, load64_relaxed(counter) + by)


cdef void count(Link* link, const Request* want, int status) noexcept nogil:
    """Counters of this side, and the calling thread's note of its last pull."""
    cdef uint64_t* counters = link.mine.counters
    cdef int64_t waited_ns = want.wait.entered_ns - want.wait.begin_ns
    cdef int64_t copied_ns = now_ns() - want.wait.entered_ns
    count_up(&counters[COUNT_WAIT_NS], <uint64_t>waited_ns)
    if status == 0:
        count_up(&counters[COUNT_PULLS], 1)
        count_up(&counters[COUNT_BYTES], want.nbytes)
        count_up(&counters[COUNT_COPY_NS], <uint64_t>copied_ns)
        last_pull_note(want.nbytes, waited_ns, copied_ns)
    elif status == LINK_TIMEOUT:
        count_up(&counters[COUNT_TIMEOUTS], 1)
    else:
        count_up(&counters[COUNT_FAILED], 1)


# -- a copy inside this process --------------------------------------------------------------------------------------

cdef int copy_now(Local* src, Local* dst, Request* want) noexcept nogil:
    """Between two caches of this process, or within one: the result is as if through a temporary. The caller keeps the source
    from being freed."""
    cdef Plan plan
    cdef int status
    if is_inside():
        return LINK_BUSY
    if not local_enter(dst):
        return PULL_DST_GONE
    memset(&plan, 0, sizeof(Plan))
    status = check_destination(dst.shapes, dst.num_tensors, &want.select)
    if status == 0:
        status = build(&plan, src.shapes, src.num_tensors, dst.shapes, &want.select)
    if status == 0:
        status = move_within(&plan, src, dst, want)
    if status == 0:
        last_pull_note(plan.nbytes, 0, now_ns() - want.wait.begin_ns)
    plan_free(&plan)
    local_leave(dst)
    return status


cdef int move_within(const Plan* plan, Local* src, Local* dst, Request* want) noexcept nogil:
    cdef char* between
    cdef int status
    if src != dst or want.select.src_row != want.select.dst_row:
        return move(plan, src.base, -1, dst.base, MOVE_DIRECT, look_at_clock, &want.wait)
    # The same row of one cache: windows of source and destination can overlap.
    between = <char*>malloc(plan.nbytes)
    if between == NULL:
        return -ENOMEM
    status = move(plan, src.base, -1, between, MOVE_GATHER, look_at_clock, &want.wait)
    if status == 0:
        status = move(plan, between, -1, dst.base, MOVE_SCATTER, look_at_clock, &want.wait)
    free(between)
    return status


cdef int look_at_clock(void* context) noexcept nogil:
    cdef Patience* wait = <Patience*>context
    cdef int64_t now = now_ns()
    if now >= wait.deadline_ns:
        return LINK_TIMEOUT
    return run_signals(wait) if wait.is_main and now - wait.signals_ns >= SIGNALS_NS else 0


# -- caches of this process ------------------------------------------------------------------------------------------

cdef bint local_enter(Local* cache) noexcept nogil:
    """Count this call in, unless the cache was closed; seq_cst on both sides, as with hazards."""
    add32_seq(&cache.uses, 1)
    if load32_seq(&cache.is_open):
        return True
    local_leave(cache)
    return False


cdef void local_leave(Local* cache) noexcept nogil:
    add32_seq(&cache.uses, <uint32_t>-1)


cdef uint64_t local_numbers = 0


cdef class LocalCache:
    """Tensors of one cache in this process.

    `shapes`: a ShapeList, or one (offset, nbytes, outer, rows, inner) a tensor, in bytes from the start of `region`.
    """

    def __cinit__(self, Region region, shapes):
        cdef Local* local = &self.local
        self.region = region
        self.shapes = shapes if isinstance(shapes, ShapeList) else ShapeList(shapes)
        local.base = region.address
        local.shapes = self.shapes.shapes
        local.num_tensors = self.shapes.count
        local.is_open = 1
        local.number = add64_relaxed(&local_numbers, 1)

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


cdef void last_pull_read(uint64_t* nbytes, int64_t* wait_ns, int64_t* copy_ns) noexcept nogil:
    """What the calling thread's last successful pull or copy did, all 0 before the first."""
    nbytes[0] = last_pull_nbytes()
    wait_ns[0] = last_pull_wait_ns()
    copy_ns[0] = last_pull_copy_ns()
