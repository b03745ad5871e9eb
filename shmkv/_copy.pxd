"""Movers: carry the runs of a plan out. The memory mover copies with one of the loops of `_kernels.h`."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._plan cimport Plan


cdef enum:
    CHUNK_NBYTES = 4 << 20          # between two looks at the deadline
    SHARE_NBYTES = 1 << 20          # the same where threads share a copy: at its end one may wait that long for another


cdef enum:
    # Which ends of the runs are laid out as the plan says; the other end is one dense buffer.
    MOVE_DIRECT = 0
    MOVE_GATHER = 1                 # plan -> dense
    MOVE_SCATTER = 2                # dense -> plan
    MOVE_TO_FILE = 3                # as the plan says; the destination is the file


ctypedef int (*CheckFn)(void* context) noexcept nogil

cdef int move(const Plan* plan, const char* src, int fd, char* dst, int mode, CheckFn check, void* context) noexcept nogil
cdef int move_part(const Plan* plan, uint64_t whole_nbytes, const char* src, int fd, char* dst, int mode, CheckFn check,
                   void* context) noexcept nogil
cdef uint64_t share_of(uint64_t nbytes, uint32_t* threads) noexcept nogil
cdef void copy_moves_by(const char* mover, bint streaming) noexcept nogil
cdef void last_copy_note(uint64_t nbytes, int64_t wait_ns, int64_t copy_ns) noexcept nogil
cdef tuple last_copy()
