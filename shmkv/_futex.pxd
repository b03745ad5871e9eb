"""Words: load, store, swap, wait, wake; the two-sided lock of a link; the queue of one process's threads before it.

Knows nothing of links, caches or Python. Waiting functions take absolute CLOCK_MONOTONIC times in ns and return after one
slice at the most: the loop with the deadline stands in the caller, once.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <errno.h>
    #include <limits.h>
    #include <linux/futex.h>
    #include <pthread.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    static inline uint32_t load32_relaxed(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline uint64_t load64_relaxed(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline uint32_t load32_acquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline uint64_t load64_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline uint64_t load64_seq(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline uint32_t load32_seq(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void fence_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    static inline void fence_release(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }
    static inline void store32_release(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void store64_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void store32_relaxed(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline void store64_relaxed(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline uint64_t exchange64_seq(uint64_t *p, uint64_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
    static inline uint32_t exchange32_seq(uint32_t *p, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
    static inline uint32_t add32_seq(uint32_t *p, uint32_t v) { return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST); }
    static inline uint32_t add32_relaxed(uint32_t *p, uint32_t v) { return __atomic_add_fetch(p, v, __ATOMIC_RELAXED); }
    static inline uint64_t add64_relaxed(uint64_t *p, uint64_t v) { return __atomic_add_fetch(p, v, __ATOMIC_RELAXED); }
    static inline int swap32_seq(uint32_t *p, uint32_t expected, uint32_t v)
    { return __atomic_compare_exchange_n(p, &expected, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
    static inline int swap64_seq(uint64_t *p, uint64_t expected, uint64_t v)
    { return __atomic_compare_exchange_n(p, &expected, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }

    /* Between a shared record and private memory, word by word: each word of the shared side is touched exactly once, whatever
       the compiler thinks of the copy afterwards. `nbytes` is a multiple of 8 (records have a 64-bit field), of 4 for a store; the
       shared side is aligned to 8. */
    static inline void load_words(void *to, const void *shared, size_t nbytes)
    {
        size_t i;
        for (i = 0; i + 8 <= nbytes; i += 8) {
            uint64_t word = load64_relaxed((const uint64_t *)((const char *)shared + i));
            memcpy((char *)to + i, &word, 8);
        }
    }

    static inline void store_words(void *shared, const void *from, size_t nbytes)
    {
        uint64_t word;
        uint32_t half;
        size_t i;
        for (i = 0; i + 8 <= nbytes; i += 8) {
            memcpy(&word, (const char *)from + i, 8);
            store64_relaxed((uint64_t *)((char *)shared + i), word);
        }
        if (i < nbytes) {
            memcpy(&half, (const char *)from + i, 4);
            store32_relaxed((uint32_t *)((char *)shared + i), half);
        }
    }

    static inline void clear_words(void *shared, size_t nbytes)
    {
        size_t i;
        for (i = 0; i < nbytes; i += 8) store64_relaxed((uint64_t *)((char *)shared + i), 0);
    }

    /* The clock of every deadline here; answered by the vDSO. */
    static inline int64_t now_ns(void)
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }

    /* Sleep while *word == value, until an absolute time. 0 or -errno (EAGAIN, EINTR, ETIMEDOUT).
       `shared` leaves the private flag out: the word is mapped by several processes, at different addresses. */
    static inline int futex_wait_until(uint32_t *word, uint32_t value, int64_t until_ns, int shared)
    {
        struct timespec t = { until_ns / 1000000000, until_ns % 1000000000 };
        int op = FUTEX_WAIT_BITSET | (shared ? 0 : FUTEX_PRIVATE_FLAG);
        if (syscall(SYS_futex, word, op, value, &t, NULL, FUTEX_BITSET_MATCH_ANY) == 0) return 0;
        return -errno;
    }

    /* One of the words that a thread sleeps on together, as the kernel takes them (futex_waitv). */
    struct futex_slept { uint64_t value, address; uint32_t flags, reserved; };
    #define FUTEX_SLEPT_MOST 128
    #ifndef SYS_futex_waitv
    #define SYS_futex_waitv 449
    #endif

    static inline void futex_slept_set(struct futex_slept *slept, uint64_t address, uint32_t value)
    {
        struct futex_slept made = { value, address, 2 /* 32 bits, shared */, 0 };
        *slept = made;
    }

    /* Sleep while all words have the values given with them, until an absolute time. 0 or -errno (EAGAIN, EINTR, ETIMEDOUT;
       ENOSYS or EPERM where the kernel has no such call, or somebody keeps it back). */
    static inline int futex_wait_any(struct futex_slept *slept, uint32_t count, int64_t until_ns)
    {
        struct timespec t = { until_ns / 1000000000, until_ns % 1000000000 };
        return syscall(SYS_futex_waitv, slept, count, 0, &t, CLOCK_MONOTONIC) >= 0 ? 0 : -errno;
    }

    static inline void futex_wake_all(uint32_t *word, int shared)
    {
        syscall(SYS_futex, word, FUTEX_WAKE | (shared ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX, NULL, NULL, 0);
    }
    """
    uint32_t load32_relaxed(const uint32_t *p) noexcept nogil
    uint64_t load64_relaxed(const uint64_t *p) noexcept nogil
    uint32_t load32_acquire(const uint32_t *p) noexcept nogil
    uint64_t load64_acquire(const uint64_t *p) noexcept nogil
    uint64_t load64_seq(const uint64_t *p) noexcept nogil
    uint32_t load32_seq(const uint32_t *p) noexcept nogil
    void fence_acquire() noexcept nogil
    void fence_release() noexcept nogil
    void store32_release(uint32_t *p, uint32_t value) noexcept nogil
    void store64_release(uint64_t *p, uint64_t value) noexcept nogil
    void store32_relaxed(uint32_t *p, uint32_t value) noexcept nogil
    void store64_relaxed(uint64_t *p, uint64_t value) noexcept nogil
    void load_words(void *to, const void *shared, size_t nbytes) noexcept nogil
    void store_words(void *shared, const void *from_, size_t nbytes) noexcept nogil
    void clear_words(void *shared, size_t nbytes) noexcept nogil
    uint64_t exchange64_seq(uint64_t *p, uint64_t value) noexcept nogil
    uint32_t exchange32_seq(uint32_t *p, uint32_t value) noexcept nogil
    uint32_t add32_seq(uint32_t *p, uint32_t value) noexcept nogil
    uint32_t add32_relaxed(uint32_t *p, uint32_t value) noexcept nogil
    uint64_t add64_relaxed(uint64_t *p, uint64_t value) noexcept nogil
    bint swap32_seq(uint32_t *p, uint32_t expected, uint32_t value) noexcept nogil
    bint swap64_seq(uint64_t *p, uint64_t expected, uint64_t value) noexcept nogil
    int64_t now_ns() noexcept nogil
    int futex_wait_until(uint32_t *word, uint32_t value, int64_t until_ns, bint shared) noexcept nogil
    struct futex_slept:
        uint64_t value
        uint64_t address
    enum:
        FUTEX_SLEPT_MOST
    void futex_slept_set(futex_slept *slept, uint64_t address, uint32_t value) noexcept nogil
    int futex_wait_any(futex_slept *slept, uint32_t count, int64_t until_ns) noexcept nogil
    void futex_wake_all(uint32_t *word, bint shared) noexcept nogil

    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t *mutex) noexcept nogil


cdef enum:
    SLICE_NS = 20000000             # a lost wake or a dead holder costs this much, not the deadline


cdef enum:
    # The lock word: who has it, plus the bit that says the other side sleeps on it.
    WORD_FREE = 0
    WORD_HELD = 1                   # + side
    WORD_OFFERED = 3                # + side: released straight to that side, which was asleep
    WORD_WAITERS = 0x80000000


cdef int word_try(uint32_t* word, uint32_t side, int64_t retake_ns) noexcept nogil
cdef int word_wait_slice(uint32_t* word, uint32_t side, int64_t until_ns, int64_t retake_ns) noexcept nogil
cdef int64_t word_give_up(uint32_t* word, uint32_t side, int64_t retake_ns) noexcept nogil
cdef int64_t word_release(uint32_t* word, uint32_t side) noexcept nogil


cdef struct Waiter:
    uint32_t granted
    Waiter* next


cdef struct ThreadQueue:
    pthread_mutex_t guard           # held for a few loads and stores, never across a wait
    bint busy                       # a thread is past the queue
    Waiter* head
    Waiter* tail


cdef void queue_init(ThreadQueue* queue) noexcept nogil
cdef bint queue_enter(ThreadQueue* queue, Waiter* me) noexcept nogil
cdef int queue_wait_slice(Waiter* me, int64_t until_ns) noexcept nogil
cdef bint queue_give_up(ThreadQueue* queue, Waiter* me) noexcept nogil
cdef void queue_leave(ThreadQueue* queue) noexcept nogil
