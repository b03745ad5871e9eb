"""Named points at which a process of a test build stops or dies when told so. An ordinary build has none of them.

`SHMKV_CRASH_AT=<point>[:<n>]` kills the process when it comes to the point for the n-th time (first time without n), as an
outside `kill -9` would; with `SHMKV_CRASH_HOW=stop` it stops there instead. `docs/reliability.md` has the table of points.

A test build has one more switch: with `SHMKV_TEST_SPARSE=1` cache segments get pages only where somebody touches them, so that rows
of many GiB can be had on a machine that has no room for them.
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


cdef bint crash_sparse() noexcept nogil


cdef inline bint is_sparse() noexcept nogil:
    """Do cache segments go without pages? False in an ordinary build."""
    return CRASH_POINTS and crash_sparse()


cdef inline void crash_point(const char* point) noexcept nogil:
    """Compiled to nothing in an ordinary build."""
    if CRASH_POINTS:
        crash_reached(point)
