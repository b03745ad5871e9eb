# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The two-sided lock word and the FIFO queue of threads before it.

The word of a link is FREE, HELD by one of its two sides, or OFFERED to one. The threads of a process queue first, so that at
most one thread a side ever touches the word, and so at most the other side can sleep on it:

  acquire   FREE -> HELD_me, or OFFERED_me -> HELD_me. Else set WAITERS and sleep on exactly the value that was seen.
  release   without WAITERS: HELD_me -> FREE. With it: HELD_me -> OFFERED_other, then wake. The releaser cannot take the word
            again before the other side had it or a slice has passed (`retake_ns`): an awake waiter never starves, a stopped
            one blocks nobody.
  give up   take WAITERS back; if the word was offered meanwhile, take it and release it.

Never a pid or a thread id: those repeat, and two containers can share /dev/shm. Any other value is answered -EBADMSG.
All transitions are seq_cst compare-and-swaps: they order the copy between them as well.
"""
from libc.errno cimport EAGAIN, EBADMSG, EBUSY, EINTR

from shmkv._crash cimport crash_point


cdef int word_try(uint32_t* word, uint32_t side, int64_t retake_ns) noexcept nogil:
    """Take the word if that needs no wait: 0, -EBUSY or -EBADMSG (a value that nobody writes)."""
    cdef uint32_t seen, holder, kept
    while True:
        seen = load32_acquire(word)
        holder = seen & ~<uint32_t>WORD_WAITERS
        kept = seen & WORD_WAITERS
        if holder == WORD_FREE or holder == WORD_OFFERED + side:
            pass
        elif holder == WORD_OFFERED + (side ^ 1):
            if now_ns() < retake_ns:
                return -EBUSY
            kept = 0                # the bit was ours, and the other side has been woken already
        elif holder == WORD_HELD + (side ^ 1):
            return -EBUSY
        else:
            return -EBADMSG
        crash_point(b"word-taking")
        if swap32_seq(word, seen, (WORD_HELD + side) | kept):
            return 0


cdef int word_wait_slice(uint32_t* word, uint32_t side, int64_t until_ns, int64_t retake_ns) noexcept nogil:
    """Sleep until the word may be ours or the slice is over, then try: 0, -EAGAIN (look at the world), -EINTR, -EBADMSG."""
    cdef int64_t slice_end = now_ns() + SLICE_NS
    cdef uint32_t seen, holder
    cdef int status
    if slice_end > until_ns:
        slice_end = until_ns
    while True:
        status = word_try(word, side, retake_ns)
        if status != -EBUSY:
            return status
        crash_point(b"word-looking")
        # The word may have come to us between the try and this load: marking or sleeping on it would lose a slice.
        seen = load32_acquire(word)
        holder = seen & ~<uint32_t>WORD_WAITERS
        if holder == WORD_FREE or holder == WORD_OFFERED + side:
            continue
        if not seen & WORD_WAITERS:
            crash_point(b"word-marking")
            if not swap32_seq(word, seen, seen | WORD_WAITERS):
                continue
            seen |= WORD_WAITERS
        if holder == WORD_OFFERED + (side ^ 1) and retake_ns < slice_end:
            slice_end = retake_ns
        crash_point(b"word-waiting")
        status = futex_wait_until(word, seen, slice_end, True)
        if status == -EINTR:
            return status
        if now_ns() >= slice_end:       # whatever the kernel said: where it refuses to wait, the slice ends all the same
            status = word_try(word, side, retake_ns)
            return -EAGAIN if status == -EBUSY else status


cdef int64_t word_give_up(uint32_t* word, uint32_t side, int64_t retake_ns) noexcept nogil:
    """Leave without the word: take back the WAITERS bit; an offer that came meanwhile is taken and released. Returns the time
    before which this side must not take an offer back."""
    cdef uint32_t seen, holder
    while True:
        seen = load32_acquire(word)
        holder = seen & ~<uint32_t>WORD_WAITERS
        crash_point(b"word-giving-up")
        if holder == WORD_OFFERED + side:
            if swap32_seq(word, seen, (WORD_HELD + side) | (seen & WORD_WAITERS)):
                return word_release(word, side)
        elif not seen & WORD_WAITERS or swap32_seq(word, seen, holder):
            crash_point(b"word-given-up")
            return retake_ns


cdef int64_t word_release(uint32_t* word, uint32_t side) noexcept nogil:
    """Give the word back; returns the time before which this side must not take an offer back, 0 if none was made."""
    cdef uint32_t seen
    while True:
        seen = load32_acquire(word)
        if seen & ~<uint32_t>WORD_WAITERS != WORD_HELD + side:
            return 0                # scribbled over by a peer: the next to look at it says so
        crash_point(b"word-freeing")
        if not seen & WORD_WAITERS:
            if swap32_seq(word, seen, WORD_FREE):
                return 0
        elif swap32_seq(word, seen, WORD_OFFERED + (side ^ 1)):
            crash_point(b"word-offered")
            futex_wake_all(word, True)
            return now_ns() + SLICE_NS


# -- the queue of one process's threads ------------------------------------------------------------------------------

cdef void queue_init(ThreadQueue* queue) noexcept nogil:
    pthread_mutex_init(&queue.guard, NULL)
    queue.busy = False
    queue.head = NULL
    queue.tail = NULL


cdef bint queue_enter(ThreadQueue* queue, Waiter* me) noexcept nogil:
    """True: go on. False: `me` stands in the queue; wait with queue_wait_slice."""
    cdef bint free
    me.granted = 0
    me.next = NULL
    pthread_mutex_lock(&queue.guard)
    free = not queue.busy
    if free:
        queue.busy = True
    elif queue.tail == NULL:
        queue.head = queue.tail = me
    else:
        queue.tail.next = me
        queue.tail = me
    pthread_mutex_unlock(&queue.guard)
    return free


cdef int queue_wait_slice(Waiter* me, int64_t until_ns) noexcept nogil:
    """0: it is our turn. -EAGAIN: a slice or the deadline is over. -EINTR."""
    cdef int64_t slice_end = now_ns() + SLICE_NS
    cdef int status
    if slice_end > until_ns:
        slice_end = until_ns
    while not load32_acquire(&me.granted):
        status = futex_wait_until(&me.granted, 0, slice_end, False)
        if status == -EINTR:
            return status
        if now_ns() >= slice_end:
            return 0 if load32_acquire(&me.granted) else -EAGAIN
    return 0


cdef bint queue_give_up(ThreadQueue* queue, Waiter* me) noexcept nogil:
    """Step out of the queue. True: it was our turn meanwhile, the caller has to call queue_leave."""
    cdef Waiter** link
    cdef Waiter* before = NULL
    pthread_mutex_lock(&queue.guard)
    if me.granted:
        pthread_mutex_unlock(&queue.guard)
        return True
    link = &queue.head
    while link[0] != me:
        before = link[0]
        link = &before.next
    link[0] = me.next
    if queue.tail == me:
        queue.tail = before
    pthread_mutex_unlock(&queue.guard)
    return False


cdef void queue_leave(ThreadQueue* queue) noexcept nogil:
    """Let the next thread go on, in the order of arrival."""
    cdef Waiter* next
    pthread_mutex_lock(&queue.guard)
    next = queue.head
    if next == NULL:
        queue.busy = False
    else:
        queue.head = next.next
        if queue.head == NULL:
            queue.tail = NULL
        # The waiter's memory is its stack: it may be gone as soon as it sees the grant, so the wake comes under the guard,
        # which it takes in queue_leave at the latest. A wake on an address that has gone is harmless.
        store32_release(&next.granted, 1)
        futex_wake_all(&next.granted, False)
    pthread_mutex_unlock(&queue.guard)


# -- for tests and benchmarks: the same words, from Python ------------------------------------------------------------

cdef class LockWord:
    """The lock word at an address, seen from one side. For tests and `bench/`; the library itself never goes this way."""
    cdef uint32_t* word
    cdef uint32_t side
    cdef int64_t retake_ns
    cdef object owner

    def __cinit__(self, owner, uint64_t address, uint32_t side):
        if side > 1 or address % 4 or not address:
            raise ValueError(f"side must be 0 or 1 and address aligned, not {side}, {address:#x}")
        self.owner = owner
        self.word = <uint32_t*><size_t>address
        self.side = side

    @property
    def value(self):
        """The word as it stands."""
        return load32_acquire(self.word)

    def acquire(self, int64_t timeout_ms):
        """True if taken, False after `timeout_ms`; ValueError on a value that no side writes."""
        cdef int64_t until = now_ns() + timeout_ms * 1000000
        cdef int status
        with nogil:
            status = word_try(self.word, self.side, self.retake_ns)
            while status == -EBUSY or status == -EAGAIN or status == -EINTR:
                if now_ns() >= until:
                    self.retake_ns = word_give_up(self.word, self.side, self.retake_ns)
                    break
                status = word_wait_slice(self.word, self.side, until, self.retake_ns)
        if status == -EBADMSG:
            raise ValueError(f"lock word {self.value:#x} names no side")
        return status == 0

    def add_under(self, uint64_t address, int count):
        """Add 1 to an ordinary 64-bit number, `count` times, each time under the lock, without the GIL."""
        cdef uint64_t* number = <uint64_t*><size_t>address
        cdef int status, _i
        with nogil:
            for _i in range(count):
                status = word_try(self.word, self.side, self.retake_ns)
                while status != 0:
                    status = word_wait_slice(self.word, self.side, now_ns() + SLICE_NS, self.retake_ns)
                number[0] += 1
                self.retake_ns = word_release(self.word, self.side)

    def release(self):
        """Give it back; only by the side that has it."""
        with nogil:
            self.retake_ns = word_release(self.word, self.side)

    def pairs(self, int count):
        """Nanoseconds of `count` uncontended acquire/release pairs."""
        cdef int64_t begin = now_ns()
        cdef int _i
        with nogil:
            for _i in range(count):
                word_try(self.word, self.side, 0)
                word_release(self.word, self.side)
        return now_ns() - begin
