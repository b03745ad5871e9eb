# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The hot path as Python calls it: numbers out of objects, one block without the GIL, a status back.

Arguments are checked in `transfer.py` and the managers; nothing here knows what a status means to a caller.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from shmkv._blocks cimport BlockLists, Blocks
from shmkv._copy cimport last_copy
from shmkv._core cimport BY_BLOCKS_KEY, BY_ID, BY_KEY, Request, enter_counted, pull_locked, pull_now
from shmkv._futex cimport load32_acquire, now_ns
from shmkv._layout cimport KEY_BLOCKS, KEY_NONE
from shmkv._link cimport (
    LINK_ENDED,
    LINK_FORKED,
    LINK_INTERRUPTED,
    LINK_PEER_GONE,
    REMARK_DUE,
    Patience,
    link_leave,
    patience_init,
    raise_pending,
)
from shmkv._lend cimport Lent, lend_now, loan_of
from shmkv._link_handle cimport LinkHandle
from shmkv._local cimport Local, LocalCache, local_enter, local_leave
from shmkv._plan cimport Selection
from shmkv._within cimport COPY_DST_GONE, check_target, copy_now

cdef enum:
    KEY_UNUSABLE = 255              # as in keys.py


cdef int request_init(Request* want, tuple select) except -1:
    """`select`: (size, src_offset, dst_offset, src_row, dst_row, src_first, src_count, dst_first, dst_count, divisor), and where it
    is not all 0 also (window, src_period, dst_period, strict_format)."""
    memset(want, 0, sizeof(Request))
    return select_init(&want.select, select)


cdef int select_init(Selection* s, tuple select) except -1:
    if len(select) > 10:
        s.window, s.src_period, s.dst_period, s.strict_format = select[10:]
        select = select[:10]
    s.size, s.src_offset, s.dst_offset, s.src_row, s.dst_row, s.src_first, s.src_count, s.dst_first, s.dst_count, s.divisor = select
    return 0


cdef int set_key(Request* want, bytes packed) except -1:
    """The six numbers of `keys.py`: cluster id, kind, three words or the cache id, row."""
    cdef uint64_t words[6]
    if len(packed) != sizeof(words):
        raise ValueError(f"a packed key has {sizeof(words)} bytes, not {len(packed)}")
    memcpy(words, <const char*>packed, sizeof(words))
    want.by = BY_ID if words[1] == KEY_NONE else BY_BLOCKS_KEY if words[1] == KEY_BLOCKS else BY_KEY
    want.key.kind = <uint32_t>words[1]
    want.key.words[0], want.key.words[1], want.key.words[2], want.key.words[3] = words[2], words[3], words[4], 0
    want.cache_id = <int64_t>words[2]
    want.select.src_row = <uint32_t>words[5] if want.by == BY_ID else 0
    return 0


def pull(LinkHandle handle, LocalCache dst, bytes packed, tuple select, bint consumes, int64_t timeout_ms, *,
         BlockLists lists=None):
    """Pull one row over a link, or with `lists` many blocks, or a row from or into blocks: 0 or a negative status. Raises only what
    a signal handler raised.

    `packed`: a usable key as `keys.py` packs it; `select` as in `request_init`.
    """
    cdef Request want
    cdef int status
    request_init(&want, select)
    set_key(&want, packed)
    want.blocks = NULL if lists is None else &lists.blocks
    want.consumes = consumes
    patience_init(&want.wait, timeout_ms)
    with nogil:
        status = pull_now(&handle.link, &dst.local, &want)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


def pull_many(LinkHandle handle, requests, int64_t timeout_ms):
    """Pull several rows under one lock and one deadline: (how many were done, 0 or the status of the next one).

    `requests`: [(LocalCache, packed key, select, consumes)], as for `pull`. All destinations are checked before the first byte.
    """
    cdef int count = len(requests), done = 0, entered = 0, status = 0
    cdef Request* wants = <Request*>malloc(max(count, 1) * sizeof(Request))
    cdef Local** locals = <Local**>malloc(max(count, 1) * sizeof(Local*))
    cdef Patience wait
    try:
        if wants == NULL or locals == NULL:
            raise MemoryError(f"no memory for {count} requests")
        for i in range(count):
            dst, packed, select, consumes = requests[i]
            request_init(&wants[i], select)
            set_key(&wants[i], packed)
            wants[i].consumes = consumes
            locals[i] = &(<LocalCache?>dst).local
        patience_init(&wait, timeout_ms)
        with nogil:
            status = enter_all(locals, wants, count, &entered)
            if status == 0:
                status = enter_counted(&handle.link, &wait)
                if status == 0:
                    while done < count and status == 0:
                        wants[done].wait = wait
                        status = pull_locked(&handle.link, locals[done], &wants[done])
                        wait.begin_ns = wait.entered_ns = now_ns()
                        wait.signals_ns = wants[done].wait.signals_ns
                        done += status == 0
                    link_leave(&handle.link)
            else:
                done = entered
            for i in range(entered):
                local_leave(locals[i])
    finally:
        free(wants)
        free(locals)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return done, status


cdef int enter_all(Local** locals, Request* wants, int count, int* entered) noexcept nogil:
    """Count the call in at every destination and check what was asked of it; `entered` says how many have to be left."""
    cdef int i, status
    for i in range(count):
        if not local_enter(locals[i]):
            return COPY_DST_GONE
        status = check_target(locals[i], &wants[i].select, NULL)
        if status != 0:
            local_leave(locals[i])
            return status
        entered[0] += 1
    return 0


def lend(LinkHandle handle, bytes packed, tuple select, bint consumes, int64_t timeout_ms, uint32_t limit):
    """Lend a row over a link: (0, Loan), or (a negative status, None). Of `select` only the source's part counts; `limit`: leases
    that this side of the link may have."""
    cdef Request want
    cdef Lent lent
    cdef int status
    request_init(&want, select)
    set_key(&want, packed)
    want.consumes = consumes
    patience_init(&want.wait, timeout_ms)
    with nogil:
        status = lend_now(&handle.link, &want, limit, &lent)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return (0, loan_of(handle, &lent)) if status == 0 else (status, None)


def copy(LocalCache src, LocalCache dst, tuple select, int64_t timeout_ms, *, BlockLists lists=None, bint disjoint=False):
    """Copy one row, or the blocks of `lists`, between caches of this process: 0 or a negative status.

    `select` as in `request_init`; `disjoint`: the caller knows that no byte is both read and written.
    """
    cdef Selection want
    cdef Patience wait
    cdef const Blocks* blocks = NULL if lists is None else &lists.blocks
    cdef int status
    memset(&want, 0, sizeof(Selection))
    select_init(&want, select)
    patience_init(&wait, timeout_ms)
    with nogil:
        status = copy_now(&src.local, &dst.local, &want, blocks, disjoint, &wait)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status


def check(LocalCache dst, tuple select, *, BlockLists lists=None):
    """The destination's part of a pull's checks: 0 or a negative status. Arguments as for `copy`."""
    cdef Selection want
    memset(&want, 0, sizeof(Selection))
    select_init(&want, select)
    if not load32_acquire(&dst.local.is_open):
        return COPY_DST_GONE
    return check_target(&dst.local, &want, NULL if lists is None else &lists.blocks)


def last_pull():
    """(bytes, ns waited, ns copied, loop or system call, was it streamed) of the calling thread's last successful pull or copy;
    0, "" and False before the first."""
    return last_copy()


cdef class PreparedPull:
    """A pull whose arguments are checked: call it with a key.

    What the plain pull would answer is answered here, too. Whenever the quick way does not apply (another cluster, a link that
    ended or lost its peer, a destination that was deallocated, anything but a usable key and a row) `again(key, row)` makes the
    pull with all checks and gives the link handle to go on with; `fail(key, row, status)` gives the exception for any other status;
    `remark(handle, key)` is called when the link has something to tell.
    """
    cdef Request want
    cdef readonly LocalCache dst
    cdef LinkHandle handle          # the link that the last call used; it knows its cluster
    cdef int64_t timeout_ms
    cdef tuple key_types
    cdef object again
    cdef object fail
    cdef object remark
    cdef tuple options              # with which `pull_same` was found last
    cdef object __weakref__

    def __init__(self, LocalCache dst, tuple select, bint consumes, int64_t timeout_ms, tuple key_types, again, fail, remark):
        request_init(&self.want, select)
        self.want.consumes = consumes
        self.dst, self.timeout_ms, self.key_types, self.again, self.fail = dst, timeout_ms, key_types, again, fail
        self.remark = remark

    def __call__(self, key):
        """Pull the row that `key` names; raises what `pull_cache` raises."""
        return self.pull(key, self.want.select.dst_row)

    def note_options(self, tuple options):
        """What `pull_same` is asked for: eight objects."""
        if len(options) != 8:
            raise ValueError(f"{len(options)} options")
        self.options = options

    def pull_same(self, key, row, size, src_layers, dst_layers, src_offset, dst_offset, per_layer, heads, strict_format):
        """`pull`, and True, if these are the very objects that were noted and `row` an int; else nothing, and False: they
        are compared here because that is quicker than in Python."""
        cdef tuple noted = self.options
        if noted is None or size is not noted[0] or src_layers is not noted[1] or dst_layers is not noted[2] \
                or src_offset is not noted[3] or dst_offset is not noted[4] or per_layer is not noted[5] \
                or heads is not noted[6] or strict_format is not noted[7] or type(row) is not int:
            return False
        self.pull(key, row)
        return True

    cpdef pull(self, key, row):
        """The same into another row of the destination."""
        cdef LinkHandle handle = self.handle        # kept alive here: another thread may change links meanwhile
        cdef Request want
        cdef int status
        cdef bytes packed
        if handle is None or type(key) not in self.key_types or not 0 <= row <= 0xFFFFFFFF:
            return self.go_on_with(key, row)
        packed = key.packed
        want = self.want
        want.select.dst_row = row
        set_key(&want, packed)
        if (<const uint64_t*><const char*>packed)[0] != handle.cluster_id or want.key.kind == KEY_UNUSABLE:
            return self.go_on_with(key, row)
        patience_init(&want.wait, self.timeout_ms)
        with nogil:
            status = pull_now(&handle.link, &self.dst.local, &want)
        if status == 0:
            if handle.link.format_remark == REMARK_DUE:
                self.remark(handle, key)
            return None
        if status == LINK_INTERRUPTED:
            raise_pending()
        if status in (LINK_ENDED, LINK_PEER_GONE, LINK_FORKED, COPY_DST_GONE):
            return self.go_on_with(key, row)
        raise self.fail(key, row, status)

    cdef go_on_with(self, key, row):
        cdef LinkHandle handle = self.again(key, row)
        self.handle = handle
        if handle is not None:
            handle.followers.add(self)
        return None

    def forget(self, handle):
        """The link has ended: its peer's memory is not kept mapped for the sake of a call that may never come."""
        if self.handle is handle:
            self.handle = None


DST_GONE = COPY_DST_GONE
