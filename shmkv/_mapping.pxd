"""Attach a segment without the GIL: open, fstat, map, check, keep. Knows names and headers, not what a segment holds."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._layout cimport Header


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


cdef class Region:
    """A mapping that lives as long as anything refers to it; `exports` counts the views that somebody holds."""
    cdef char* address
    cdef readonly uint64_t nbytes
    cdef readonly bint writable
    cdef uint32_t export_count


cdef struct Attached:
    uint64_t serial
    uint64_t generation             # the one the header was checked for
    uint64_t nbytes
    uint64_t populated              # bytes from the start that have page-table entries
    char* address
    uint64_t used                   # tick of the last use


cdef struct AttachedTable:
    Attached* entries               # open addressing by serial; serial 0 = free
    uint32_t log2
    uint32_t count
    uint64_t tick


cdef void publish_header(Header* shared, const Header* made) noexcept nogil
cdef void write_segment_header(Region region, uint64_t incarnation, uint64_t serial, uint64_t generation)
cdef int table_init(AttachedTable* table) noexcept nogil
cdef void table_clear(AttachedTable* table) noexcept nogil
cdef Attached* table_find(AttachedTable* table, uint64_t serial) noexcept nogil
cdef int table_drop(AttachedTable* table, uint64_t serial) noexcept nogil
cdef int attach_segment(AttachedTable* table, const char* prefix, uint64_t incarnation, uint64_t serial, uint64_t nbytes,
                        Attached** found) noexcept nogil
cdef int check_generation(Attached* attached, uint64_t incarnation, uint64_t generation) noexcept nogil
cdef int populate(Attached* attached, uint64_t step) noexcept nogil
