# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""A crew of parked threads, made on first need, for one job at a time.

A job is a number of shares; the caller and the crew take the next share until none is left. The caller never waits for a thread
that has not begun: a share is only owed once it was taken. The threads are made by pthread_create and never touch Python; signals
are blocked in them. After fork the child has no crew and makes its own. Not OpenMP: its threads spin, and hang after fork.
"""
import os

from shmkv._futex cimport (
    add32_seq,
    add64_relaxed,
    exchange32_seq,
    futex_wait_until,
    futex_wake_all,
    load32_acquire,
    now_ns,
    store32_release,
    store64_release,
    swap32_seq,
)
cdef extern from *:
    """
    #include <pthread.h>
    #include <signal.h>

    /* A detached thread with all signals blocked: Python's handlers belong to Python's threads. 0 or an errno value. */
    static int crew_start(void *(*body)(void *))
    {
        pthread_t thread;
        pthread_attr_t attributes;
        sigset_t all, before;
        int status;
        sigfillset(&all);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, 256 * 1024);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        status = pthread_create(&thread, &attributes, body, NULL);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        return status;
    }
    static int crew_at_fork(void (*child)(void)) { return pthread_atfork(NULL, NULL, child); }
    """
    int crew_start(void* (*body)(void*) noexcept nogil) noexcept nogil
    int crew_at_fork(void (*child)() noexcept nogil) noexcept nogil

DEFAULT_LIMIT = 4
MAX_LIMIT = 256

cdef enum:
    CREW_FREE = 0
    CREW_BUSY = 1


cdef struct Crew:
    uint32_t busy                   # CREW_BUSY while somebody's job is carried out
    uint32_t started                # threads that exist
    uint32_t generation             # futex: goes up with each job; the threads sleep on it
    uint32_t wanted                 # how many threads may still join the job
    uint32_t inside                 # threads that may touch the job
    uint64_t next                   # next share
    uint64_t shares
    uint32_t stopped                # a share failed: take no more
    int failed                      # its status
    ShareFn work
    void* job

cdef Crew crew
cdef uint32_t limit = 1


cdef uint32_t crew_limit() noexcept nogil:
    """Threads that a copy may use, the caller's among them."""
    return limit


cdef void take_shares(ShareFn work, void* job, int* status) noexcept nogil:
    cdef uint64_t share
    while not load32_acquire(&crew.stopped):
        share = add64_relaxed(&crew.next, 1) - 1
        if share >= crew.shares:
            return
        status[0] = work(job, share)
        if status[0] != 0:
            crew.failed = status[0]
            store32_release(&crew.stopped, 1)
            return


cdef void* body(void* nothing) noexcept nogil:
    cdef uint32_t seen = load32_acquire(&crew.generation) - 1        # the job for which it was made is its first
    cdef uint32_t wanted
    cdef int status = 0
    while True:
        while load32_acquire(&crew.generation) == seen:
            futex_wait_until(&crew.generation, seen, now_ns() + 3600000000000LL, False)
        seen = load32_acquire(&crew.generation)
        # Inside first, then look whether there still is a place: the caller looks at both in the other order.
        add32_seq(&crew.inside, 1)
        while True:
            wanted = load32_acquire(&crew.wanted)
            if wanted == 0 or swap32_seq(&crew.wanted, wanted, wanted - 1):
                break
        if wanted:
            take_shares(crew.work, crew.job, &status)
        if add32_seq(&crew.inside, <uint32_t>-1) == 0:
            futex_wake_all(&crew.inside, False)
    return NULL


cdef void start_threads(uint32_t count) noexcept nogil:
    """Have `count` threads; fewer if the system gives no more."""
    while crew.started < count and crew_start(body) == 0:
        crew.started += 1


cdef int crew_run(ShareFn work, void* job, uint64_t shares, uint32_t threads, ShareFn mine) noexcept nogil:
    """Carry out shares 0 to shares - 1 on up to `threads` threads, the caller's among them; 0 or the status of a share that
    failed, after which no new share is begun. The caller uses `mine`, the crew `work`. While another thread's job has the crew,
    the caller works alone."""
    cdef int status = 0
    cdef uint32_t inside
    cdef uint64_t share
    if threads < 2 or not swap32_seq(&crew.busy, CREW_FREE, CREW_BUSY):
        for share in range(shares):
            status = mine(job, share)
            if status != 0:
                break
        return status
    start_threads(threads - 1)
    crew.work = work
    crew.job = job
    crew.shares = shares
    crew.stopped = 0
    store64_release(&crew.next, 0)
    store32_release(&crew.wanted, threads - 1)
    add32_seq(&crew.generation, 1)
    futex_wake_all(&crew.generation, False)
    take_shares(mine, job, &status)
    exchange32_seq(&crew.wanted, 0)
    while True:
        inside = add32_seq(&crew.inside, 0)
        if inside == 0:
            break
        futex_wait_until(&crew.inside, inside, now_ns() + 1000000000LL, False)
    if status == 0 and crew.stopped:
        status = crew.failed
    store32_release(&crew.busy, CREW_FREE)
    return status


def configure(threads=None) -> None:
    """How many threads a big copy may use, the caller's among them: None = one a processor up to 4, 1 = no crew at all.

    ValueError naming the accepted values.
    """
    global limit
    if threads is not None and not 1 <= threads <= MAX_LIMIT:
        raise ValueError(f"copy threads must be 1 to {MAX_LIMIT}, not {threads}")
    limit = min(DEFAULT_LIMIT, len(os.sched_getaffinity(0))) if threads is None else threads


def current() -> dict:
    """Threads that a copy may use, and how many of the crew exist in this process."""
    return {"threads": limit, "started": crew.started}


cdef void forget_threads() noexcept nogil:
    """In a forked child: its parent's threads, and whoever used them, are not here."""
    crew.busy = CREW_FREE
    crew.started = crew.inside = crew.wanted = 0


if crew_at_fork(forget_threads) != 0:
    raise ImportError("pthread_atfork failed: no memory for a fork handler")
configure()
