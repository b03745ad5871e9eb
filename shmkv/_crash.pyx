# cython: language_level=3, freethreading_compatible=True
"""What happens at a crash point, and the same points for the modules that are written in Python."""
from libc.stdint cimport uint32_t
from libc.string cimport memcpy, memset, strcmp

from shmkv._futex cimport add32_seq, load32_acquire, store32_release

cdef extern from *:
    """
    #include <signal.h>
    #include <stdlib.h>
    #include <unistd.h>

    static void crash_now(int stop)
    {
        kill(getpid(), stop ? SIGSTOP : SIGKILL);
    }
    static const char *crash_variable(const char *name)
    { return CRASH_POINTS && getenv(name) != NULL ? getenv(name) : ""; }
    """
    void crash_now(bint stop) noexcept nogil
    const char* crash_variable(const char* name) noexcept nogil

cdef char armed[64]                 # the point's name; "" = none
cdef uint32_t left                  # how often it is still passed
cdef bint stops = False


cdef void crash_reached(const char* point) noexcept nogil:
    if load32_acquire(&left) and strcmp(point, armed) == 0 and add32_seq(&left, <uint32_t>-1) == 0:
        crash_now(stops)


def reach(str point) -> None:
    """A crash point of a module written in Python."""
    if CRASH_POINTS:
        crash_reached(point.encode())


def is_built() -> bool:
    """Does this build have crash points?"""
    return CRASH_POINTS


def arm(str point, bint stop=False) -> None:
    """From now on die (or stop) at `point`, written `<point>[:<n>]`; "" disarms. ValueError if it is not written so."""
    global stops
    spelled, _, number = point.partition(":")
    cdef bytes name = spelled.encode()
    if not (number or "1").isdigit() or int(number or "1") < 1 or len(name) >= sizeof(armed):
        raise ValueError(f"a crash point is written <point>[:<n>], n from 1 on, not {point!r}")
    store32_release(&left, 0)
    memset(armed, 0, sizeof(armed))
    memcpy(armed, <const char*>name, len(name))
    stops = stop
    store32_release(&left, int(number or "1") if name else 0)


arm(crash_variable(b"SHMKV_CRASH_AT").decode(), crash_variable(b"SHMKV_CRASH_HOW") == b"stop")
