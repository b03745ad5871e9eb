# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Pulls that wait: a row is copied piece by piece, as its tensors are published.

What has to wait holds a lease on the cache, and never the link's lock, which is taken anew for each piece. What is all there at the
first look is copied under that look's hazard, as by a pull that does not wait.
"""
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from shmkv._await cimport (
    AWAIT_KEY,
    AWAIT_ROW,
    Beginning,
    find_awaited,
    look_at_row,
    progress_of,
    sleep_for,
)
from shmkv._carry cimport PeerEnd, attach, bring_pages, carry_in
from shmkv._core cimport BY_KEY, Request, count, drop_unlinked, enter_counted, finish, make_plan, note_format
from shmkv._crash cimport crash_point
from shmkv._futex cimport exchange32_seq, now_ns, store32_release
from shmkv._layout cimport word_generation
from shmkv._lease cimport lease_take
from shmkv._lend cimport give_back
from shmkv._life cimport process_epoch
from shmkv._link cimport (
    LINK_CANCELLED,
    LINK_FORKED,
    LINK_INTERRUPTED,
    Link,
    Patience,
    is_cancelled,
    is_forked,
    link_leave,
    patience_init,
    raise_pending,
)
from shmkv._link_handle cimport LinkHandle
from shmkv._local cimport Local, LocalCache, local_enter, local_leave
from shmkv._lookup cimport FIND_NEVER, FIND_UNPUBLISHED, FoundRow, recheck, unpin
from shmkv._plan cimport Plan
from shmkv._pull cimport request_init, set_key
from shmkv._wait cimport WAIT_NOT_YET, Ending, Sleeper, sleeper_end_turn, sleeper_seen
from shmkv._within cimport COPY_DST_GONE, check_target, copy_now

cdef enum:
    FLOW_MORE = 1                   # a piece was copied, and there are others


cdef struct Flow:
    Request want                    # the whole selection
    FoundRow found                  # the row; as it was found, which the lease keeps true
    Beginning beginning
    int lease                       # its number, -1 = none
    uint32_t limit                  # leases that this side of the link may have
    bint waits                      # or what is not there is answered at once
    bint is_found
    bint is_over                    # nothing is held any more
    uint32_t piece                  # tensors that are marked as pulled one by one; 0 = as many as are there, marked at the end
    uint32_t count                  # selected tensors, from is_found on
    uint32_t done                   # of these, copied
    bint has_begun                  # it has had the link's lock


cdef int flow_run(Flow* flow, Link* link, Local* dst, Sleeper* sleeper, int64_t turn_ns, bint watched) noexcept nogil:
    """FLOW_MORE, 0 = all is copied, WAIT_NOT_YET, or why it failed."""
    cdef uint32_t seen
    cdef int status = 0
    while status == 0:
        seen = sleeper_seen(sleeper)
        status = flow_step(flow, link, dst)
        if status == 0 and (flow.done == flow.count or flow.piece):
            break
        if status == AWAIT_KEY and not flow.waits:
            status = FIND_NEVER
        elif status == AWAIT_KEY or status == AWAIT_ROW:
            status = sleep_for(link, &flow.want, &flow.found, status, sleeper, seen, turn_ns, watched)
    sleeper_end_turn(sleeper, status, turn_ns)
    if status == 0 and flow.done < flow.count:
        return FLOW_MORE
    return status


cdef int flow_step(Flow* flow, Link* link, Local* dst) noexcept nogil:
    """One look under the link's lock, and what there is to copy: 0 if something was, AWAIT_*, or why it failed."""
    cdef int status
    if not local_enter(dst):
        return COPY_DST_GONE
    status = 0 if flow.is_found else check_target(dst, &flow.want.select, NULL)
    if status == 0:
        flow.want.wait.begin_ns = flow.want.wait.entered_ns = now_ns()
        flow.want.wait.enters_closing = flow.has_begun      # a drain lets it end; each turn makes its Patience anew
        status = enter_counted(link, &flow.want.wait)
        if status == 0:
            flow.has_begun = True
            status = step_locked(flow, link, dst)
            link_leave(link)
    local_leave(dst)
    return status


cdef int step_locked(Flow* flow, Link* link, Local* dst) noexcept nogil:
    cdef bint pinned = not flow.is_found
    cdef int status = LINK_CANCELLED if is_cancelled(&flow.want.wait) else 0
    if status == 0 and pinned:
        status = begin(flow, link, dst)
        pinned = flow.is_found
    if status == 0:
        status = copy_ready(flow, link, dst)
    if is_forked(link):
        return LINK_FORKED          # a signal handler forked: hazard, lock and lease are the parent's
    if pinned:
        unpin(link.mine)
    return status


cdef int begin(Flow* flow, Link* link, Local* dst) noexcept nogil:
    """Find and pin the row, check the whole selection, take a lease if there is anything to wait for."""
    cdef PeerEnd src
    cdef Plan* plan = NULL
    cdef uint32_t first = flow.want.select.src_first
    cdef int status
    drop_unlinked(link)
    status = find_awaited(link, &flow.want, &flow.found, &flow.beginning)
    if status != 0:
        return status
    flow.is_found = True            # pinned
    flow.want.select.src_row = flow.found.batch_index
    status = attach(link, &flow.found, &src)
    if status == 0:
        status = make_plan(link, &flow.want, &flow.found.copy, src.nbytes, dst, &plan)
    flow.count = <uint32_t>flow.want.select.dst_count
    if status == 0 and not flow.waits and progress_of(&flow.found) < first + flow.count:
        status = FIND_UNPUBLISHED
    if status == 0 and (flow.piece or progress_of(&flow.found) < first + flow.count):
        status = lease_take(link.mine, word_generation(flow.found.cache_word), flow.limit)
        if status >= 0:
            flow.lease = status
            status = 0
    if status != 0:
        count(link, &flow.want.wait, flow.want.nbytes, status)
    return status


cdef int copy_ready(Flow* flow, Link* link, Local* dst) noexcept nogil:
    """Copy what is published and was not copied yet, one piece of it at the most."""
    cdef uint32_t first = flow.want.select.src_first
    cdef uint32_t published = progress_of(&flow.found)
    cdef uint32_t wanted = flow.count - flow.done
    cdef int status
    if flow.piece:
        wanted = min(wanted, flow.piece)
        if published < first + flow.done + wanted:
            published = 0           # not all of the piece
    if published <= first + flow.done:
        return look_at_row(&flow.found, flow.want.by == BY_KEY)
    wanted = min(wanted, published - first - flow.done)
    status = copy_piece(flow, link, dst, wanted)
    if status == 0:
        flow.done += wanted
    return status


cdef int copy_piece(Flow* flow, Link* link, Local* dst, uint32_t wanted) noexcept nogil:
    """`wanted` tensors from the first one on that was not copied; then what a pull does after its last byte."""
    cdef Request piece = flow.want
    cdef PeerEnd src
    cdef Plan* plan = NULL
    cdef int status
    piece.select.src_first += flow.done
    piece.select.dst_first += flow.done
    piece.select.src_count = piece.select.dst_count = wanted
    piece.select.divisor = 0        # was asked of the whole
    status = attach(link, &flow.found, &src)
    if status == 0:
        status = bring_pages(link, &piece.wait, &src)
    if status == 0:
        status = make_plan(link, &piece, &flow.found.copy, src.nbytes, dst, &plan)
    if status == 0:
        status = carry_in(link, &piece.wait, plan, plan.nbytes // wanted * flow.count, &src, dst.base)
    flow.want.wait.signals_ns = piece.wait.signals_ns
    if status == 0:
        crash_point(b"piece-copied")
        piece.nbytes = plan.nbytes
        status = finish_piece(flow, link, &piece, wanted)
    if not is_forked(link):
        count(link, &piece.wait, piece.nbytes, status)
        if status == 0:
            note_format(link, &flow.found.copy, dst)
    return status


cdef int finish_piece(Flow* flow, Link* link, Request* piece, uint32_t wanted) noexcept nogil:
    """Coverage and consume as for a pull of this piece, or, for a pull that is one whole, of all pieces at the last one."""
    if flow.piece:
        return finish(link, piece, &flow.found)
    if flow.done + wanted == flow.count:
        return finish(link, &flow.want, &flow.found)
    return recheck(&flow.found, flow.want.by == BY_KEY)


cdef void flow_end(Flow* flow, Link* link) noexcept nogil:
    """Give the lease back, if there is one and it is this process's; twice does nothing more."""
    if flow.lease >= 0 and link.epoch == process_epoch():
        give_back(link, flow.lease)
    flow.lease = -1
    flow.is_over = True


def copy_within(Ending ending, LocalCache src, LocalCache dst, tuple select, int64_t deadline_ns):
    """`_pull.copy` of a row as a part of a wait: it ends at `deadline_ns` (CLOCK_MONOTONIC), and when the wait is cancelled."""
    cdef Request want
    cdef Patience wait
    cdef int status
    request_init(&want, select)
    wait.deadline_ns = deadline_ns
    ending.begin_turn(&wait)
    with nogil:
        status = copy_now(&src.local, &dst.local, &want.select, NULL, False, &wait)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


cdef class RowFlow(Ending):
    """A pull that waits, of one row over a link. `run` is called until it answers 0 or a failure, by one thread at a time.

    `piece`: tensors that are answered MORE and marked as pulled one after the other, 0: no answer before all are there, which are
    marked at the end. `waits`: or what is not there is answered at once. The others are those of `_pull.pull` and `_pull.lend`.
    """
    cdef Flow flow
    cdef LinkHandle handle
    cdef LocalCache dst
    cdef uint32_t running

    def __init__(self, LinkHandle handle, LocalCache dst, bytes packed, tuple select, bint consumes, int64_t timeout_ms,
                 uint32_t limit, uint32_t piece=0, bint waits=True):
        memset(&self.flow, 0, sizeof(Flow))
        request_init(&self.flow.want, select)
        set_key(&self.flow.want, packed)
        self.flow.want.consumes = consumes
        patience_init(&self.flow.want.wait, timeout_ms)
        self.flow.limit = limit
        self.flow.piece = piece
        self.flow.waits = waits
        self.flow.lease = -1
        self.handle, self.dst = handle, dst

    def __dealloc__(self):
        if self.handle is not None:
            flow_end(&self.flow, &self.handle.link)

    def run(self, int64_t turn_ns, bint watched):
        """0: all is copied. MORE, _wait.NOT_YET at `turn_ns` (CLOCK_MONOTONIC), or why it failed. Raises what a signal handler
        raised, and ValueError if another thread is inside."""
        cdef Link* link = &self.handle.link
        cdef int status
        if exchange32_seq(&self.running, 1):
            raise ValueError("another thread waits in this pull already")
        self.begin_turn(&self.flow.want.wait)
        with nogil:
            status = LINK_CANCELLED if self.flow.is_over \
                else flow_run(&self.flow, link, &self.dst.local, &self.sleeper, turn_ns, watched)
            if status == 0 or (status < 0 and status != WAIT_NOT_YET):
                flow_end(&self.flow, link)
            store32_release(&self.running, 0)
        if status == LINK_INTERRUPTED:
            raise_pending()
        return status

    def close(self):
        """End it: now if no thread is inside, else as soon as that one looks."""
        self.cancel()
        if not exchange32_seq(&self.running, 1):
            flow_end(&self.flow, &self.handle.link)
            store32_release(&self.running, 0)

    @property
    def has_lease(self):
        """Does it keep a cache of the peer from being freed?"""
        return self.flow.lease >= 0

    @property
    def is_pulling(self):
        """Has it had the link's lock once, and is it not over?"""
        return self.flow.has_begun and not self.flow.is_over

    @property
    def done(self):
        """(tensors copied, tensors selected); the second is 0 before the row was found."""
        return self.flow.done, self.flow.count


MORE = FLOW_MORE
