# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Segments of others, attached once and kept in a table of the link: read-only, or writable in the table of one who pushes.

A table that reads by `pread`, or writes by `pwrite`, keeps descriptors and maps nothing: a peer that truncates a segment while it
is copied is a short read there, where a mapping would answer with a bus error.
"""
import os

from libc.errno cimport EINVAL, ENOMEM, errno
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free

from shmkv._crash cimport is_sparse
from shmkv._futex cimport add32_seq, load32_acquire, load64_acquire, load_words
from shmkv._layout cimport MAGIC_SEGMENT, LAYOUT_VERSION, Header, SegmentHeader, layout_fingerprint
from shmkv._mapping cimport Region, close, map_descriptor, munmap, open_segment

cdef extern from *:
    """
    #define _GNU_SOURCE 1
    #include <errno.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #endif

    /* Bytes read, 0 at the end of the file, or -errno. */
    static inline int64_t pread_again(int fd, char *to, uint64_t nbytes, uint64_t offset)
    {
        ssize_t got;
        if (nbytes > 1u << 30) nbytes = 1u << 30;
        do got = pread(fd, to, nbytes, (off_t)offset); while (got < 0 && errno == EINTR);
        return got < 0 ? -errno : got;
    }

    /* Bytes written, or -errno. */
    static inline int64_t pwrite_again(int fd, const char *from, uint64_t nbytes, uint64_t offset)
    {
        ssize_t put;
        if (nbytes > 1u << 30) nbytes = 1u << 30;
        do put = pwrite(fd, from, nbytes, (off_t)offset); while (put < 0 && errno == EINTR);
        return put < 0 ? -errno : put;
    }

    static inline int populate_read(char *address, uint64_t nbytes)
    {
        return madvise(address, nbytes, MADV_POPULATE_READ) == 0 ? 0 : -errno;
    }
    """
    int64_t pread_again(int fd, char* to, uint64_t nbytes, uint64_t offset) noexcept nogil
    int64_t pwrite_again(int fd, const char* from_, uint64_t nbytes, uint64_t offset) noexcept nogil
    int populate_read(char* address, uint64_t nbytes) noexcept nogil


cdef int table_init(AttachedTable* table, bint by_pread, bint writable) noexcept nogil:
    table.by_pread = by_pread
    table.writable = writable
    table.log2 = 4
    table.count = 0
    table.tick = 0
    table.entries = <Attached*>calloc(1 << table.log2, sizeof(Attached))
    return 0 if table.entries != NULL else -ENOMEM


cdef void table_clear(AttachedTable* table) noexcept nogil:
    """Unmap everything; the table is unusable afterwards."""
    cdef uint32_t i
    if table.entries == NULL:
        return
    for i in range(<uint32_t>1 << table.log2):
        if table.entries[i].serial:
            let_go(&table.entries[i])
    free(table.entries)
    table.entries = NULL


cdef void let_go(Attached* entry) noexcept nogil:
    if entry.fd >= 0:
        close(entry.fd)
    if entry.mapped != NULL:
        mapped_give(entry.mapped)


cdef void mapped_hold(Mapped* mapped) noexcept nogil:
    """One more that looks into the mapping; the caller has the link's lock, or holds it already."""
    add32_seq(&mapped.holders, 1)


cdef void mapped_give(Mapped* mapped) noexcept nogil:
    """One less; the last one unmaps."""
    if add32_seq(&mapped.holders, <uint32_t>-1) == 0:
        munmap(mapped.address, mapped.nbytes)
        free(mapped)


cdef int map_it(Attached* made, int fd, bint writable) noexcept nogil:
    """Map what `fd` has, and close it: 0 or -errno."""
    cdef int status = 0
    made.mapped = <Mapped*>calloc(1, sizeof(Mapped))
    if made.mapped == NULL:
        close(fd)
        return -ENOMEM
    made.address = map_descriptor(fd, made.nbytes, writable, False, &status)
    close(fd)
    if status != 0:
        free(made.mapped)
        made.mapped = NULL
        return status
    made.mapped.address, made.mapped.nbytes, made.mapped.holders = made.address, made.nbytes, 1
    return 0


cdef inline Attached* table_slot(AttachedTable* table, uint64_t serial) noexcept nogil:
    """The entry of `serial`, or the free one where it belongs."""
    cdef uint32_t mask = (<uint32_t>1 << table.log2) - 1
    cdef uint32_t i = <uint32_t>(serial * 0x9E3779B97F4A7C15ULL >> 32) & mask
    while table.entries[i].serial and table.entries[i].serial != serial:
        i = (i + 1) & mask
    return &table.entries[i]


cdef Attached* table_find(AttachedTable* table, uint64_t serial) noexcept nogil:
    cdef Attached* entry
    if table.entries == NULL:
        return NULL
    entry = table_slot(table, serial)
    if not entry.serial:
        return NULL
    table.tick += 1
    entry.used = table.tick
    return entry


cdef int table_drop_oldest(AttachedTable* table) noexcept nogil:
    """Unmap the segment that was not used for the longest time."""
    cdef Attached* oldest = NULL
    cdef uint32_t i
    for i in range(<uint32_t>1 << table.log2):
        if table.entries[i].serial and (oldest == NULL or table.entries[i].used < oldest.used):
            oldest = &table.entries[i]
    return table_drop(table, oldest.serial) if oldest != NULL else 0


cdef int table_rebuild(AttachedTable* table, uint32_t log2, uint64_t without) noexcept nogil:
    """Move all entries but one into a table of 2**log2."""
    cdef AttachedTable next
    cdef uint32_t i
    next.log2 = log2
    next.count = 0
    next.tick = table.tick
    next.by_pread = table.by_pread
    next.writable = table.writable
    next.entries = <Attached*>calloc(1 << log2, sizeof(Attached))
    if next.entries == NULL:
        return -ENOMEM
    for i in range(<uint32_t>1 << table.log2):
        if table.entries[i].serial and table.entries[i].serial != without:
            table_slot(&next, table.entries[i].serial)[0] = table.entries[i]
            next.count += 1
    free(table.entries)
    table[0] = next
    return 0


cdef int table_drop(AttachedTable* table, uint64_t serial) noexcept nogil:
    """Unmap one segment, if it is mapped at all."""
    cdef Attached* entry = table_find(table, serial)
    cdef Attached gone
    cdef int status
    if entry == NULL:
        return 0
    gone = entry[0]
    status = table_rebuild(table, table.log2, serial)
    if status == 0:
        let_go(&gone)
    return status


cdef int copy_header(const Attached* attached, SegmentHeader* copy) noexcept nogil:
    """A private copy of a segment's header, its version loaded first (consume: header). 0, ATTACH_NOT_READY, ATTACH_SIZE or
    -errno."""
    cdef const SegmentHeader* shared = <const SegmentHeader*>attached.address
    cdef uint32_t version
    cdef int status
    if attached.fd >= 0:
        status = read_whole(attached.fd, <char*>copy, sizeof(SegmentHeader), 0)
        return status if status != 0 or copy.header.version else ATTACH_NOT_READY
    version = load32_acquire(&shared.header.version)
    if version == 0:
        return ATTACH_NOT_READY
    load_words(&copy.header, shared, sizeof(Header))
    copy.header.version = version
    copy.generation = load64_acquire(&shared.generation)
    return 0


cdef int check_header(const Attached* attached, uint64_t incarnation, SegmentHeader* copy) noexcept nogil:
    """Compare a segment's header with what is recorded elsewhere."""
    cdef int status = copy_header(attached, copy)
    if status != 0:
        return status
    if copy.header.magic != MAGIC_SEGMENT:
        return ATTACH_MAGIC
    if copy.header.version != LAYOUT_VERSION:
        return ATTACH_VERSION
    if copy.header.fingerprint != layout_fingerprint():
        return ATTACH_FINGERPRINT
    if copy.header.nbytes != attached.nbytes:
        return ATTACH_SIZE
    return 0 if copy.header.incarnation == incarnation and copy.header.serial == attached.serial else ATTACH_IDENTITY


cdef int read_whole(int fd, char* to, uint64_t nbytes, uint64_t offset) noexcept nogil:
    """Read exactly so many bytes: 0, ATTACH_SIZE (the file ends before) or -errno."""
    cdef int64_t got
    while nbytes:
        got = pread_again(fd, to, nbytes, offset)
        if got <= 0:
            return ATTACH_SIZE if got == 0 else <int>got
        to += got
        offset += got
        nbytes -= got
    return 0


cdef int write_whole(int fd, const char* from_, uint64_t nbytes, uint64_t offset) noexcept nogil:
    """Write exactly so many bytes: 0, ATTACH_SIZE (no room in the file) or -errno."""
    cdef int64_t put
    while nbytes:
        put = pwrite_again(fd, from_, nbytes, offset)
        if put <= 0:
            return ATTACH_SIZE if put == 0 else <int>put
        from_ += put
        offset += put
        nbytes -= put
    return 0


cdef int attach_segment(AttachedTable* table, const char* prefix, uint64_t incarnation, uint64_t serial, uint64_t nbytes,
                        Attached** found) noexcept nogil:
    """Map (or open) `<prefix><serial>`, once, and keep it. 0, ATTACH_* or -errno.

    The caller holds the link's lock: the table belongs to the link.
    """
    cdef char path[384]
    cdef uint64_t size = 0
    cdef int fd, status = 0
    cdef Attached made
    cdef SegmentHeader header
    if serial == 0:
        return ATTACH_IDENTITY      # no owner's: such an entry of the table would count as free, and the mapping be forgotten
    if table.count >= (DESCRIPTORS_KEPT if table.by_pread else MAPPINGS_KEPT):
        status = table_drop_oldest(table)
    elif (table.count + 1) * 2 > (<uint32_t>1 << table.log2):
        status = table_rebuild(table, table.log2 + 1, 0)
    if status != 0:
        return status
    snprintf(path, sizeof(path), b"%s%llx", prefix, <unsigned long long>serial)
    fd = open_segment(path, table.writable, &size)
    if fd < 0:
        return ATTACH_FOREIGN if errno == 0 else -errno
    if size != nbytes or nbytes < sizeof(SegmentHeader):
        close(fd)
        return ATTACH_SIZE
    made.serial, made.nbytes, made.generation, made.populated, made.address, made.fd = serial, nbytes, 0, 0, NULL, fd
    made.mapped = NULL
    if table.by_pread or is_sparse():
        made.populated = nbytes     # there are no pages to bring
    if not table.by_pread:
        made.fd = -1
        status = map_it(&made, fd, table.writable)
    if status == 0:
        status = check_header(&made, incarnation, &header)
        if status != 0:
            let_go(&made)
    if status == 0:
        table.tick += 1
        table.count += 1
        made.used = table.tick
        found[0] = table_slot(table, serial)
        found[0][0] = made
    return status


cdef int check_generation(Attached* attached, uint64_t incarnation, uint64_t generation) noexcept nogil:
    """Does this cache live in the segment? Looked at once per (mapping, generation)."""
    cdef SegmentHeader header
    cdef int status
    if attached.generation == generation:
        return 0
    status = check_header(attached, incarnation, &header)
    if status != 0:
        return status
    if header.generation != generation:
        return ATTACH_IDENTITY
    attached.generation = generation
    return 0


cdef int populate(Attached* attached, uint64_t step) noexcept nogil:
    """Make page-table entries for the next `step` bytes: 1 there is more to do, 0 all done, -errno (a truncated file)."""
    cdef uint64_t nbytes = attached.nbytes - attached.populated
    cdef int status
    if nbytes > step:
        nbytes = step
    if nbytes:
        status = populate_read(attached.address + attached.populated, nbytes)
        if status != 0 and status != -EINVAL:       # a kernel before 5.14: pages come one by one while copying
            return status
        attached.populated += nbytes
    return attached.populated < attached.nbytes


def layout_of(str path) -> str:
    """Layout version and fingerprint of a segment, against ours, for a message; "" if it cannot be read."""
    cdef Header copy
    try:
        region = Region.attach(path)
    except OSError:
        return ""
    if region.nbytes < sizeof(Header):
        return ""
    load_words(&copy, (<Region>region).address, sizeof(Header))
    return (f"layout version {copy.version} with fingerprint {copy.fingerprint:#010x}, expected {LAYOUT_VERSION} with "
            f"{layout_fingerprint():#010x}")


def describe(int status) -> str:
    """What an attach status means, for a message."""
    return {
        ATTACH_NOT_READY: "its creator has not finished it",
        ATTACH_FOREIGN: "it is not a regular file of this user with mode 0600",
        ATTACH_SIZE: "its size is not the one recorded",
        ATTACH_MAGIC: "its magic is not shmkv's",
        ATTACH_VERSION: "it has another layout version",
        ATTACH_FINGERPRINT: "it has another layout fingerprint",
        ATTACH_IDENTITY: "it belongs to another cluster or cache",
    }.get(status) or os.strerror(-status)
