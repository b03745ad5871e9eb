# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""One pull. `pull_locked` is the table of contents; each step is one function.

  link_enter    queue of this process's threads, then the link's word, one deadline for both (`_link`)
  find          the row, or the blocks, in the peer's directory, pinned by the hazard (`_lookup`)
  attach        the segment, once, kept; or the private memory of the peer's process (`_carry`)
  make_plan     every bound, on private copies (`_plan`, `_blocks`)
  carry_in      the bytes; deadline, signals, link and peer are looked at every few MiB (`_carry`, `_copy`, `_peer_memory`)
  finish        were the bytes the row's all the time? then coverage, consume
  link_leave    word released, next thread

`pull_now` goes in and out of the lock. Python stands before it and behind it (`_pull`, `transfer.py`).
"""
from shmkv._attached cimport table_clear, table_drop, table_init
from shmkv._blocks cimport plan_for_blocks
from shmkv._carry cimport PeerEnd, attach, bring_pages, carry_in
from shmkv._copy cimport last_copy_note
from shmkv._coverage cimport consume, cover, is_full
from shmkv._crash cimport crash_point
from shmkv._events cimport memory_changed
from shmkv._futex cimport (
    add32_relaxed,
    add64_relaxed,
    load32_acquire,
    load64_acquire,
    load64_relaxed,
    now_ns,
    store64_relaxed,
)
from shmkv._kept_plans cimport plan_for
from shmkv._layout cimport (
    CACHE_REGISTERED,
    COUNT_BYTES,
    COUNT_COPY_NS,
    COUNT_FAILED,
    COUNT_PULLS,
    COUNT_TIMEOUTS,
    COUNT_WAIT_NS,
    KEY_PREFIX,
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
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    REMARK_DUE,
    REMARK_NONE,
    is_forked,
    link_enter,
    link_leave,
)
from shmkv._local cimport local_enter, local_leave
from shmkv._lookup cimport (
    FIND_NEVER,
    FIND_UNPUBLISHED,
    FoundRow,
    find_blocks,
    find_key,
    find_row,
    look_at_rows,
    pin,
    recheck,
    recheck_rows,
    unpin,
    why_ended,
)
from shmkv._plan cimport PLAN_DAMAGED, PLAN_FORMAT, PLAN_SRC_BLOCK, Plan
from shmkv._within cimport COPY_DST_GONE, check_target

# -- a pull over a link ----------------------------------------------------------------------------------------------

cdef int pull_now(Link* link, Local* dst, Request* want) noexcept nogil:
    """0 or the answer of the first step that did not pass."""
    cdef int status
    if not local_enter(dst):
        return COPY_DST_GONE
    status = check_target(dst, &want.select, want.blocks)
    if status == 0:
        status = enter_counted(link, &want.wait)
        if status == 0:
            status = pull_locked(link, dst, want)
            link_leave(link)
    local_leave(dst)
    return status


cdef int enter_counted(Link* link, Patience* wait) noexcept nogil:
    """`link_enter`; a call whose turn did not come in time is counted here, all others where they end (`count`)."""
    cdef int status = link_enter(link, wait)
    if status == LINK_TIMEOUT:
        add64_relaxed(&link.mine.counters[COUNT_TIMEOUTS], 1)
    return status


cdef int pull_locked(Link* link, Local* dst, Request* want) noexcept nogil:
    cdef FoundRow found
    cdef PeerEnd src
    cdef Plan* plan = NULL
    cdef int status
    drop_unlinked(link)
    status = find(link, want, &found)
    if status == 0:
        status = attach(link, &found, &src)
        if status == 0:
            status = bring_pages(link, &want.wait, &src)
        if status == 0:
            status = make_plan(link, want, &found.copy, src.nbytes, dst, &plan)
        if status == 0:
            status = carry_in(link, &want.wait, plan, plan.nbytes, &src, dst.base)
        if status == 0:
            crash_point(b"copied")
            want.nbytes = plan.nbytes
            status = finish(link, want, &found)
        if is_forked(link):         # by a signal handler, which may have raised, too: hazard, lock and counters are the parent's
            return status if status == LINK_INTERRUPTED else LINK_FORKED
        unpin(link.mine)
    count(link, &want.wait, want.nbytes, status)
    if status == 0:
        note_format(link, &found.copy, dst)
    return status


cdef void note_format(Link* link, const CacheRecord* cache, const Local* dst) noexcept nogil:
    """Two formats are met on this link for the first time: somebody has to be told."""
    if link.format_remark == REMARK_NONE and is_other_format(cache, dst):
        link.format_remark = REMARK_DUE


cdef int find(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """The row, pinned and published. What changes between the look and the pin is looked up again, until the deadline."""
    cdef int status
    while True:
        if want.by == BY_KEY:
            status = find_key(link.directory, &want.key, found)
            if status == FIND_NEVER:
                return why_ended(link.directory, &want.key)
        elif want.by == BY_BLOCKS_KEY:
            status = find_blocks(link.directory, want.key.words[2], found)
        else:
            status = find_row(link.directory, want.cache_id, want.select.src_row, found)
        if status != 0:
            return status
        if pin(link.mine, found):
            break
        if now_ns() >= want.wait.deadline_ns:
            return LINK_TIMEOUT
    status = look_at_progress(link, want, found)
    if status != 0:
        unpin(link.mine)
    return status


cdef int look_at_progress(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """Are the bytes of what was found published, as far as they are wanted? 0, FIND_UNPUBLISHED or PLAN_SRC_BLOCK."""
    cdef uint64_t tensors = tensors_wanted(want, &found.copy)
    if want.by == BY_BLOCKS_KEY:
        if want.blocks.src_max >= found.copy.num_rows:
            return PLAN_SRC_BLOCK
        return look_at_rows(link.directory, found, want.blocks.src, want.blocks.looked, tensors, want.blocks.seen)
    want.select.src_row = found.batch_index
    return 0 if load32_acquire(&found.row.progress) >= tensors else FIND_UNPUBLISHED    # consume: progress


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
        if table_init(&link.segments, link.segments.by_pread, link.segments.writable) != 0:
            return
        link.unlinked_seen = count
    while link.unlinked_seen != count:
        table_drop(&link.segments, load64_relaxed(unlinked_at(link.directory, link.unlinked_seen)))
        link.unlinked_seen += 1


cdef int make_plan(Link* link, Request* want, const CacheRecord* cache, uint64_t nbytes, Local* dst, Plan** plan) noexcept nogil:
    """Turn the selection into spans, or find them made already for the same numbers."""
    cdef TensorRecord* shared = tensor_at(link.directory, cache.first_tensor)
    if cache.num_tensors == 0:
        return PLAN_DAMAGED
    if want.select.strict_format and is_other_format(cache, dst):
        return PLAN_FORMAT
    if want.blocks != NULL:
        return plan_for_blocks(&link.plans, <const char*>shared, sizeof(TensorRecord), cache.num_tensors, cache.num_rows, nbytes,
                               dst.shapes, &want.select, want.blocks, plan)
    return plan_for(&link.plans, <const char*>shared, sizeof(TensorRecord), cache.num_tensors, cache.num_rows, nbytes, dst.shapes,
                    dst.number, &want.select, plan)


cdef inline bint is_other_format(const CacheRecord* cache, const Local* dst) noexcept nogil:
    return cache.format != dst.format and cache.format != 0 and dst.format != 0


cdef int finish(Link* link, Request* want, FoundRow* found) noexcept nogil:
    """After the last byte: still the same row? Then mark what was pulled, and consume the key when all was."""
    cdef uint32_t count = <uint32_t>want.select.dst_count
    cdef int status
    if want.by == BY_BLOCKS_KEY:
        return recheck_rows(link.directory, found, want.blocks.src, want.blocks.looked, want.blocks.seen, want.wait.entered_ns)
    status = recheck(found, want.by == BY_KEY)
    if status != 0:
        return status
    crash_point(b"rechecked")
    store64_relaxed(&found.row.last_use_ns, want.wait.entered_ns)
    if found.key_kind == KEY_PREFIX:
        add32_relaxed(&found.row.hits, 1)
    if not want.consumes or found.key_kind != KEY_REQUEST or word_state(found.row_word) != ROW_LIVE \
            or found.copy.kind == CACHE_REGISTERED:
        return 0
    if count < found.copy.num_tensors:
        if not cover(link.directory, found, want.select.src_first, count):
            return 0
        if not is_full(link.directory, &found.copy, found.batch_index, word_generation(found.row_word)):
            return 0
    if consume(found):
        memory_changed(link.directory)
    return 0


cdef inline void count_up(uint64_t* counter, uint64_t by) noexcept nogil:
    """Under the link's lock nobody else of this side writes it: no locked instruction is needed."""
    store64_relaxed(counter, load64_relaxed(counter) + by)


cdef void count(Link* link, const Patience* wait, uint64_t nbytes, int status) noexcept nogil:
    """Counters of this side, and the calling thread's note of its last pull or push."""
    cdef uint64_t* counters = link.mine.counters
    cdef int64_t waited_ns = wait.entered_ns - wait.begin_ns
    cdef int64_t copied_ns = now_ns() - wait.entered_ns
    count_up(&counters[COUNT_WAIT_NS], <uint64_t>waited_ns)
    if status == 0:
        count_up(&counters[COUNT_PULLS], 1)
        count_up(&counters[COUNT_BYTES], nbytes)
        count_up(&counters[COUNT_COPY_NS], <uint64_t>copied_ns)
        last_copy_note(nbytes, waited_ns, copied_ns)
    elif status == LINK_TIMEOUT:
        count_up(&counters[COUNT_TIMEOUTS], 1)
    else:
        count_up(&counters[COUNT_FAILED], 1)
