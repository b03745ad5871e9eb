# cython: language_level=3, freethreading_compatible=True
"""What happens at a crash point, and the same points for the modules that are written in Python."""
from libc.stdint cimport uint32_t
from libc.string cimport memcpy, memset, strcmp

cdef extern from *:
    """
    #include <signal.h>
    #include <stdlib.h>

    /* To the calling thread, whichever it is: it goes no further, while a signal to the process may take another thread first. */
    static void crash_now(int stop)
    {
        raise(stop ? SIGSTOP : SIGKILL);
    }
    static void left_set(uint32_t *left, uint32_t n) { __atomic_store_n(left, n, __ATOMIC_RELEASE); }
    /* Is this the last of the passes that were left? */
    static int left_last(uint32_t *left)
    { return __atomic_load_n(left, __ATOMIC_ACQUIRE) && __atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0; }
    static const char *crash_variable(const char *name)
    { return CRASH_POINTS && getenv(name) != NULL ? getenv(name) : ""; }
    """
    void crash_now(bint stop) noexcept nogil
    void left_set(uint32_t* left, uint32_t n) noexcept nogil
    bint left_last(uint32_t* left) noexcept nogil
    const char* crash_variable(const char* name) noexcept nogil

cdef char armed[64]                 # the point's name; "" = none
cdef uint32_t left                  # how often it is still passed
cdef bint stops = False
cdef bint is_told_sparse = strcmp(crash_variable(b"SHMKV_TEST_SPARSE"), b"1") == 0
cdef char before[64]                # where the process stops once, before it can come to the point; "" = nowhere


cdef void crash_reached(const char* point) noexcept nogil:
    if before[0]:
        if strcmp(point, before) == 0:
            before[0] = 0
            crash_now(True)
    elif strcmp(point, armed) == 0 and left_last(&left):
        crash_now(stops)


cdef bint crash_sparse() noexcept nogil:
    return is_told_sparse


def sparse() -> bool:
    """Is this a test build that was told to leave cache segments without pages?"""
    return is_sparse()


def reach(str point) -> None:
    """A crash point of a module written in Python."""
    if CRASH_POINTS:
        crash_reached(point.encode())


def is_built() -> bool:
    """Does this build have crash points?"""
    return CRASH_POINTS


def arm(str point, bint stop=False, str after="") -> None:
    """From now on die (or stop) at `point`, written `<point>[:<n>]`; "" disarms. ValueError if it is not written so.

    `after`: the name of another point, at which the process stops first; only then `point` is looked for."""
    global stops
    spelled, _, number = point.partition(":")
    cdef bytes name = spelled.encode(), first = after.encode()
    if not (number or "1").isdigit() or int(number or "1") < 1 or len(name) >= sizeof(armed) or len(first) >= sizeof(before):
        raise ValueError(f"a crash point is written <point>[:<n>], n from 1 on, not {point!r}")
    left_set(&left, 0)
    memset(before, 0, sizeof(before))
    memcpy(before, <const char*>first, len(first))
    memset(armed, 0, sizeof(armed))
    memcpy(armed, <const char*>name, len(name))
    stops = stop
    left_set(&left, int(number or "1") if name else 0)


arm(crash_variable(b"SHMKV_CRASH_AT").decode(), crash_variable(b"SHMKV_CRASH_HOW") == b"stop")
