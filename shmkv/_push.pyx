# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""One push: some tensors of a row, or of blocks, to addresses in the peer's process. `push_locked` is the table of contents.

  link_enter      queue of this process's threads, the side opened, the link's word, one deadline for all (`_link`)
  check_places    every address leads into a living tensor with room, before the first byte (`_addresses`)
  reach           the cache behind the next address, pinned by this side's hazard (`_lookup`)
  attach          its segment, writable, once, kept; or the private memory of the peer's process (`_carry`)
  make_plan       the window of the source to a window at the address; every bound (`_plan`, `_blocks`)
  carry_out       the bytes; deadline, link and peer are looked at every few MiB (`_carry`, `_copy`, `_peer_memory`)
  recheck_written was the memory the cache's all the time?
  unpin           after the last byte; then the next address that lies in another cache
  link_leave      word released, side shut, next thread

The source is counted in by the caller. Nothing is published here: what was pushed is told by the result of the task.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from shmkv._addresses cimport Place, find_place, is_in_cache, read_place
from shmkv._blocks cimport BLOCKS_TO_BLOCKS, BlockLists, Blocks, build_blocks
from shmkv._carry cimport PeerEnd, attach, bring_pages, carry_out
from shmkv._core cimport count, drop_unlinked, enter_counted
from shmkv._futex cimport now_ns
from shmkv._link cimport (
    LINK_ENDED,
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_TIMEOUT,
    Link,
    LinkEnd,
    Patience,
    is_forked,
    link_leave,
    look_at_memory,
    patience_init,
    raise_pending,
)
from shmkv._local cimport Local, LocalCache
from shmkv._lookup cimport FIND_REMOVED, pin, recheck_written, unpin
from shmkv._plan cimport PLAN_SRC_BLOCK, PLAN_SRC_RANGE, Plan, Selection, Shape, build, row_nbytes, set_dense

cdef enum:
    MOST_TENSORS = 8                # that go into one plan

cdef enum:
    LAST_NUMBER = 0xFFFFFFFF        # block numbers that need more bits come as this one


cdef struct PushRequest:
    const uint64_t* addresses       # all of a destination, in the order of the tensors
    uint32_t count                  # of these
    uint32_t begin                  # those of this call
    uint32_t end
    uint32_t checked_end            # and those that have to lead somewhere before the first byte
    uint32_t first_tensor           # of the source, for address `begin`
    uint32_t src_row
    Blocks* blocks                  # or NULL
    uint64_t block_nbytes           # of a block of the destination, when a row is cut into blocks
    uint32_t hint                   # record of the cache that the last address led to
    uint32_t bad                    # the address that was refused
    Patience wait
    uint64_t nbytes                 # what was copied


cdef int push_now(Link* link, Local* src, PushRequest* want) noexcept nogil:
    """0 or the answer of the first step that did not pass."""
    cdef int status = check_source(src, want)
    if status != 0:
        return status
    status = enter_counted(link, &want.wait)
    if status == 0:
        status = push_locked(link, src, want)
        link_leave(link)
    return status


cdef int check_source(const Local* src, const PushRequest* want) noexcept nogil:
    """Row or blocks, and tensors, of the source: 0, PUSH_ROW or PLAN_*."""
    if <uint64_t>want.first_tensor + want.checked_end - want.begin > src.num_tensors:
        return PLAN_SRC_RANGE
    return check_source_rows(src, want.blocks, want.src_row)


cdef int check_source_rows(const Local* src, const Blocks* blocks, uint32_t row) noexcept nogil:
    """The row, or the blocks if blocks go to blocks: 0, PUSH_ROW or PLAN_SRC_BLOCK."""
    if blocks != NULL and blocks.mode == BLOCKS_TO_BLOCKS:
        return 0 if blocks.src_max < src.shapes[0].rows else PLAN_SRC_BLOCK
    return 0 if row < src.shapes[0].rows else PUSH_ROW


cdef int push_locked(Link* link, Local* src, PushRequest* want) noexcept nogil:
    cdef uint32_t at = want.begin
    cdef int status
    drop_unlinked(link)
    status = check_places(link, src, want)
    while status == 0 and at < want.end:
        status = push_some(link, src, want, &at)
    if not is_forked(link):
        count(link, &want.wait, want.nbytes, status)
    return status


cdef inline const Shape* source_of(const Local* src, const PushRequest* want, uint32_t at) noexcept nogil:
    """The tensor that goes to address number `at`."""
    return &src.shapes[want.first_tensor + at - want.begin]


cdef int check_places(Link* link, const Local* src, PushRequest* want) noexcept nogil:
    """Does every address lead into a tensor with room enough? 0, PUSH_ADDRESS or PUSH_ROOM. Asked again once a cache is pinned."""
    cdef Place place
    cdef Shape window
    cdef uint32_t at
    for at in range(want.begin, want.checked_end):
        want.bad = at
        if find_place(link.directory, want.addresses[at], want.hint, &place) != 0:
            return PUSH_ADDRESS
        want.hint = place.slot
        if not make_window(&place, source_of(src, want, at), want, &window):
            return PUSH_ROOM
    return 0


cdef bint make_window(const Place* place, const Shape* source, const PushRequest* want, Shape* window) noexcept nogil:
    """What is written from an address on, as a tensor of its own: one row, or blocks up to the greatest number. False if that goes
    beyond the end of the tensor in which the address lies."""
    window.outer = 1
    window.inner = want.block_nbytes or row_nbytes(source)
    window.rows = 1 if want.blocks == NULL else <uint64_t>want.blocks.dst_max + 1
    window.offset = place.shape.offset + place.offset
    window.nbytes = window.rows * window.inner
    set_dense(window)
    return window.rows <= LAST_NUMBER and window.rows <= place.room // window.inner


cdef int push_some(Link* link, Local* src, PushRequest* want, uint32_t* at) noexcept nogil:
    """To the next address, and to those behind it that lead into the same cache."""
    cdef Place place
    cdef Shape windows[MOST_TENSORS]
    cdef PeerEnd dst
    cdef Plan* plan = &link.plans.scratch.plan
    cdef uint32_t tensors = 0
    cdef int status = reach(link, want, at[0], &place)
    if status != 0:
        return status
    status = attach(link, &place.found, &dst)
    if status == 0 and dst.segment == NULL and not place.found.copy.remote_accessible:
        status = PUSH_CLOSED
    if status == 0:
        status = bring_pages(link, &want.wait, &dst)
    if status == 0:
        tensors = make_windows(link, src, want, at[0], &place, windows)
        status = make_plan(plan, src, want, at[0], tensors, windows)
    if status == 0:
        status = carry_out(link, &want.wait, plan, plan.nbytes // tensors * want.count, src.base, &dst)
    if status == 0:
        want.nbytes += plan.nbytes
        status = 0 if recheck_written(link.mine, &place.found) else FIND_REMOVED
    if is_forked(link):
        return LINK_FORKED          # hazard, lock and counters are the parent's
    unpin(link.mine)
    at[0] += tensors
    return status


cdef int reach(Link* link, PushRequest* want, uint32_t at, Place* place) noexcept nogil:
    """The cache behind an address, pinned. What changes between the look and the pin is looked up again, until the deadline."""
    want.bad = at
    while True:
        if find_place(link.directory, want.addresses[at], want.hint, place) != 0:
            return PUSH_ADDRESS
        if pin(link.mine, &place.found):
            if read_place(link.directory, want.addresses[at], place):
                want.hint = place.slot
                return 0
            unpin(link.mine)
        if now_ns() >= want.wait.deadline_ns:
            return LINK_TIMEOUT


cdef uint32_t make_windows(Link* link, const Local* src, PushRequest* want, uint32_t at, const Place* place,
                           Shape* windows) noexcept nogil:
    """Where the next tensors go that lie in the pinned cache and on no byte of each other: how many; 0 if not even the first
    fits."""
    cdef Place other = place[0]
    cdef uint32_t made = 0
    while True:
        if not make_window(&other, source_of(src, want, at + made), want, &windows[made]) or overlaps(windows, made):
            return made
        made += 1
        if at + made >= want.end or made == MOST_TENSORS \
                or not is_in_cache(link.directory, want.addresses[at + made], place.slot, &other) \
                or other.found.cache_word != place.found.cache_word:
            return made


cdef bint overlaps(const Shape* windows, uint32_t number) noexcept nogil:
    """Has a window bytes in common with one before it?"""
    cdef const Shape* last = &windows[number]
    cdef uint32_t i
    for i in range(number):
        if windows[i].offset < last.offset + last.nbytes and last.offset < windows[i].offset + windows[i].nbytes:
            return True
    return False


cdef int make_plan(Plan* plan, const Local* src, const PushRequest* want, uint32_t at, uint32_t tensors,
                   const Shape* windows) noexcept nogil:
    """Spans from the source's tensors to the windows: 0, PUSH_ROOM, PLAN_* or -ENOMEM."""
    cdef Selection select
    if tensors == 0:
        return PUSH_ROOM
    memset(&select, 0, sizeof(Selection))
    select.size = -1
    select.src_row = want.src_row
    select.src_first = want.first_tensor + at - want.begin
    select.src_count = select.dst_count = tensors
    if want.blocks != NULL:
        return build_blocks(plan, src.shapes, src.num_tensors, windows, &select, want.blocks)
    return build(plan, src.shapes, src.num_tensors, windows, &select)


# -- as Python calls it ------------------------------------------------------------------------------------------------

cdef class Addresses:
    """Addresses in the peer's process, uint64, for C: one a tensor. For one thread at a time."""
    cdef uint64_t* numbers
    cdef readonly uint32_t count
    cdef uint32_t hint
    cdef readonly uint32_t bad      # the one that the last push refused

    def __cinit__(self, addresses):
        cdef uint32_t i
        self.count = len(addresses)
        self.numbers = <uint64_t*>calloc(max(self.count, 1), sizeof(uint64_t))
        if self.numbers == NULL:
            raise MemoryError(f"no memory for {self.count} addresses")
        for i in range(self.count):
            self.numbers[i] = addresses[i]

    def __dealloc__(self):
        free(self.numbers)

    def part(self, uint32_t begin, uint32_t end):
        """The addresses `begin` to `end` - 1, as a list."""
        return [self.numbers[i] for i in range(begin, min(end, self.count))]


def push(LinkEnd handle, LocalCache src, Addresses addresses, uint32_t begin, uint32_t end, uint32_t first_tensor,
         uint32_t src_row, BlockLists lists, int64_t timeout_ms, *, bint check_all=False, uint64_t block_nbytes=0):
    """Push tensors of one row, or of the blocks of `lists`, to the addresses `begin` to `end` - 1: 0 or a negative status.

    `first_tensor`: of the source, for the first address; `check_all`: all addresses from `begin` on have to lead somewhere before
    the first byte is written; `block_nbytes`: of a block at the destination, for lists that cut a row. The caller has counted the
    source in.
    """
    cdef PushRequest want
    cdef int status
    if not begin < end <= addresses.count:
        raise ValueError(f"addresses {begin} to {end} of {addresses.count}")
    if handle.directory is None:
        return look_at_memory(&handle.link) or LINK_ENDED       # let go of: the link is over
    memset(&want, 0, sizeof(PushRequest))
    want.addresses, want.begin, want.end, want.hint = addresses.numbers, begin, end, addresses.hint
    want.count, want.checked_end = addresses.count, addresses.count if check_all else end
    want.first_tensor, want.src_row = first_tensor, src_row
    want.blocks = NULL if lists is None else &lists.blocks
    want.block_nbytes = block_nbytes
    patience_init(&want.wait, timeout_ms)
    with nogil:
        status = push_now(&handle.link, &src.local, &want)
    addresses.hint, addresses.bad = want.hint, want.bad
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


ADDRESS = PUSH_ADDRESS
ROOM = PUSH_ROOM
ROW = PUSH_ROW
