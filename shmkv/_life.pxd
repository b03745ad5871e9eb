"""Who lives: the life file's bytes, and whether this process is still the one that opened it.

A POSIX record lock, because the kernel drops it at death whatever happens, it is not inherited by fork and it works across pid
namespaces. Knows nothing of slots' meaning.
"""
from libc.stdint cimport uint32_t, uint64_t

cdef int life_look(int fd, uint32_t slot) noexcept nogil
cdef int life_holder(int fd, uint32_t slot, int* pid) noexcept nogil
cdef uint64_t process_epoch() noexcept nogil
