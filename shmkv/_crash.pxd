"""Named points at which a process of a test build stops or dies when told so. An ordinary build has none of them.

`SHMKV_CRASH_AT=<point>[:<n>]` kills the process when it comes to the point for the n-th time (first time without n), as an
outside `kill -9` would; with `SHMKV_CRASH_HOW=stop` it stops there instead. `docs/reliability.md` has the table of points.
"""

cdef extern from *:
    """
    #ifdef SHMKV_CRASH_POINTS
    #define CRASH_POINTS 1
    #else
    #define CRASH_POINTS 0
    #endif
    """
    bint CRASH_POINTS


cdef void crash_reached(const char* point) noexcept nogil


cdef inline void crash_point(const char* point) noexcept nogil:
    """Compiled to nothing in an ordinary build."""
    if CRASH_POINTS:
        crash_reached(point)
