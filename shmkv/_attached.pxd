"""Attach a segment without the GIL: open, fstat, map, check, keep. Knows names and headers, not what a segment holds."""
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    # Answers of an attach besides 0 and -errno; "not yet" is a result, not an error.
    ATTACH_NOT_READY = -1001        # version still zero
    ATTACH_FOREIGN = -1002          # not a regular file of this user with mode 0600
    ATTACH_SIZE = -1003             # another size than recorded
    ATTACH_MAGIC = -1004
    ATTACH_VERSION = -1005
    ATTACH_FINGERPRINT = -1006
    ATTACH_IDENTITY = -1007         # another incarnation, serial or generation than recorded


cdef enum:
    MAPPINGS_KEPT = 1024            # of one peer's segments; the least recently used one goes first
    DESCRIPTORS_KEPT = 64           # likewise, where descriptors are kept: RLIMIT_NOFILE is often 1024


cdef struct Mapped:
    # A mapping that lives as long as the table's entry or anybody who looks into it.
    char* address
    uint64_t nbytes
    uint32_t holders


cdef struct Attached:
    uint64_t serial
    uint64_t generation             # the one the header was checked for
    uint64_t nbytes
    uint64_t populated              # bytes from the start that have page-table entries
    Mapped* mapped                  # NULL when the bytes are read by system calls
    char* address                   # of the mapping, or NULL
    int fd                          # of the open file then; -1 when it is mapped
    uint64_t used                   # tick of the last use


cdef struct AttachedTable:
    Attached* entries               # open addressing by serial; serial 0 = free
    uint32_t log2
    uint32_t count
    uint64_t tick
    bint by_pread                   # keep descriptors instead of mappings
    bint writable                   # map them for writing: the peer's destinations of pushes


cdef void mapped_hold(Mapped* mapped) noexcept nogil
cdef void mapped_give(Mapped* mapped) noexcept nogil
cdef int table_init(AttachedTable* table, bint by_pread, bint writable) noexcept nogil
cdef void table_clear(AttachedTable* table) noexcept nogil
cdef Attached* table_find(AttachedTable* table, uint64_t serial) noexcept nogil
cdef int table_drop(AttachedTable* table, uint64_t serial) noexcept nogil
cdef int attach_segment(AttachedTable* table, const char* prefix, uint64_t incarnation, uint64_t serial, uint64_t nbytes,
                        Attached** found) noexcept nogil
cdef int check_generation(Attached* attached, uint64_t incarnation, uint64_t generation) noexcept nogil
cdef int populate(Attached* attached, uint64_t step) noexcept nogil
cdef int read_whole(int fd, char* to, uint64_t nbytes, uint64_t offset) noexcept nogil
cdef int write_whole(int fd, const char* from_, uint64_t nbytes, uint64_t offset) noexcept nogil
