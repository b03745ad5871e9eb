# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Mappings: our own segments (`Region`, writable) and those of others (`AttachedTable`, read-only, kept).

A mapping keeps no descriptor: an owner with ten thousand caches has as many mappings and no open file. That is why the
standard mmap module is not used here: it holds a duplicate of the descriptor for as long as the mapping lives.
"""
import os

from libc.errno cimport EAGAIN, EINVAL, ENOMEM, errno
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from shmkv._layout cimport MAGIC_SEGMENT, LAYOUT_VERSION, Header, SegmentHeader, layout_fingerprint
from shmkv._futex cimport load32_acquire, load32_relaxed, load64_acquire, load_words, store32_release, store64_release, store_words

cdef extern from *:
    """
    #define _GNU_SOURCE 1
    #include <errno.h>
    #include <fcntl.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/stat.h>
    #include <unistd.h>
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #endif

    /* Map a descriptor, keep the pages out of core dumps, close nothing. */
    static inline char *map_descriptor(int fd, uint64_t nbytes, int writable, int populate, int *status)
    {
        int protection = PROT_READ | (writable ? PROT_WRITE : 0);
        void *address = mmap(NULL, nbytes, protection, MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, 0);
        if (address == MAP_FAILED) { *status = -errno; return NULL; }
        madvise(address, nbytes, MADV_DONTDUMP);
        madvise(address, nbytes, MADV_HUGEPAGE);    /* where /dev/shm is mounted with huge=advise; refused elsewhere */
        *status = 0;
        return (char *)address;
    }

    /* Open a name in /dev/shm that another process of this user made. -1 with errno = 0: foreign. */
    static inline int open_segment(const char *path, int writable, uint64_t *nbytes)
    {
        struct stat found;
        int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0) return -1;
        if (fstat(fd, &found) != 0) { int e = errno; close(fd); errno = e; return -1; }
        if (!S_ISREG(found.st_mode) || found.st_uid != geteuid() || (found.st_mode & 07777) != 0600) {
            close(fd); errno = 0; return -1;
        }
        *nbytes = (uint64_t)found.st_size;
        return fd;
    }

    static inline int populate_read(char *address, uint64_t nbytes)
    {
        return madvise(address, nbytes, MADV_POPULATE_READ) == 0 ? 0 : -errno;
    }
    """
    char* map_descriptor(int fd, uint64_t nbytes, bint writable, bint populate, int* status) noexcept nogil
    int open_segment(const char* path, bint writable, uint64_t* nbytes) noexcept nogil
    int populate_read(char* address, uint64_t nbytes) noexcept nogil
    int munmap(void* address, size_t nbytes) noexcept nogil
    int close(int fd) noexcept nogil


cdef class Region:
    """Shared memory mapped into this process; unmapped when the last reference goes.

    `address` is an integer, `nbytes` the length; `exports` counts the views made over it that are still alive.
    """

    def __cinit__(self):
        self.address = NULL

    def __dealloc__(self):
        if self.address != NULL:
            munmap(self.address, self.nbytes)

    @staticmethod
    def map(int fd, uint64_t nbytes, *, bint writable=True, bint populate=True):
        """Map `nbytes` of a descriptor, which may be closed afterwards. OSError when the kernel refuses."""
        cdef Region region = Region.__new__(Region)
        cdef int status = 0
        cdef char* address
        with nogil:
            address = map_descriptor(fd, nbytes, writable, populate, &status)
        if status != 0:
            raise OSError(-status, f"cannot map {nbytes} bytes: {os.strerror(-status)}")
        region.address = address
        region.nbytes = nbytes
        region.writable = writable
        return region

    @staticmethod
    def attach(str path, *, bint writable=False):
        """Map a whole existing file of this user. FileNotFoundError, PermissionError (foreign), BlockingIOError (its creator
        has not sized it yet) or OSError."""
        cdef uint64_t nbytes = 0
        cdef bytes name = os.fsencode(path)
        cdef int fd = open_segment(name, writable, &nbytes)
        if fd < 0:
            if errno == 0:
                raise PermissionError(EINVAL, f"{path} is not a regular file of this user with mode 0600")
            raise OSError(errno, f"cannot open {path}: {os.strerror(errno)}")
        try:
            if nbytes == 0:
                raise BlockingIOError(EAGAIN, f"{path} is empty: its creator has not sized it yet")
            return Region.map(fd, nbytes, writable=writable, populate=False)
        finally:
            close(fd)

    def clear(self, uint64_t offset, uint64_t nbytes):
        """Write zeros over a range."""
        if not self.writable or offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError(f"{nbytes} bytes at {offset} are not writable memory of this region")
        with nogil:
            memset(self.address + offset, 0, nbytes)

    @property
    def base(self):
        """Address of the first byte in this process."""
        return <size_t>self.address

    @property
    def exports(self):
        """Views over this memory that are still alive."""
        return load32_acquire(&self.export_count)


# -- segments of others ----------------------------------------------------------------------------------------------

cdef int table_init(AttachedTable* table) noexcept nogil:
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
            munmap(table.entries[i].address, table.entries[i].nbytes)
    free(table.entries)
    table.entries = NULL


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
        munmap(gone.address, gone.nbytes)
    return status


cdef void write_segment_header(Region region, uint64_t incarnation, uint64_t serial, uint64_t generation):
    """Say whose segment this is and which cache lives in it; a kept segment gets another generation."""
    cdef SegmentHeader* header = <SegmentHeader*>region.address
    cdef Header made
    store64_release(&header.generation, generation)
    if load32_relaxed(&header.header.version):
        return
    memset(&made, 0, sizeof(Header))
    made.magic = MAGIC_SEGMENT
    made.fingerprint = layout_fingerprint()
    made.header_nbytes = sizeof(SegmentHeader)
    made.nbytes = region.nbytes
    made.incarnation = incarnation
    made.serial = serial
    publish_header(&header.header, &made)


cdef void publish_header(Header* shared, const Header* made) noexcept nogil:
    """Fill a header and make it valid: the version goes last."""
    store_words(shared, made, sizeof(Header))
    store32_release(&shared.version, LAYOUT_VERSION)      # publish: header


cdef int check_header(const Header* shared, uint64_t magic, uint64_t nbytes, uint64_t incarnation,
                      uint64_t serial) noexcept nogil:
    """Compare a header with what is recorded elsewhere; every field is read once, the version first (consume: header)."""
    cdef Header found
    cdef uint32_t version = load32_acquire(&shared.version)
    if version == 0:
        return ATTACH_NOT_READY
    load_words(&found, shared, sizeof(Header))
    if found.magic != magic:
        return ATTACH_MAGIC
    if version != LAYOUT_VERSION:
        return ATTACH_VERSION
    if found.fingerprint != layout_fingerprint():
        return ATTACH_FINGERPRINT
    if found.nbytes != nbytes:
        return ATTACH_SIZE
    return 0 if found.incarnation == incarnation and found.serial == serial else ATTACH_IDENTITY


cdef int attach_segment(AttachedTable* table, const char* prefix, uint64_t incarnation, uint64_t serial, uint64_t nbytes,
                        Attached** found) noexcept nogil:
    """Map `<prefix><serial>` read-only, once, and keep it. 0, ATTACH_* or -errno.

    The caller holds the link's lock: the table belongs to the link.
    """
    cdef char path[384]
    cdef uint64_t size = 0
    cdef int fd, status = 0
    cdef Attached* entry
    cdef char* address
    if serial == 0:
        return ATTACH_IDENTITY      # no owner's: such an entry of the table would count as free, and the mapping be forgotten
    if table.count >= MAPPINGS_KEPT:
        status = table_drop_oldest(table)
    elif (table.count + 1) * 2 > (<uint32_t>1 << table.log2):
        status = table_rebuild(table, table.log2 + 1, 0)
    if status != 0:
        return status
    snprintf(path, sizeof(path), b"%s%llx", prefix, <unsigned long long>serial)
    fd = open_segment(path, False, &size)
    if fd < 0:
        return ATTACH_FOREIGN if errno == 0 else -errno
    if size != nbytes or nbytes < sizeof(SegmentHeader):
        close(fd)
        return ATTACH_SIZE
    address = map_descriptor(fd, nbytes, False, False, &status)
    close(fd)
    if address == NULL:
        return status
    status = check_header(<const Header*>address, MAGIC_SEGMENT, nbytes, incarnation, serial)
    if status != 0:
        munmap(address, nbytes)
        return status
    entry = table_slot(table, serial)
    entry.serial = serial
    entry.generation = 0
    entry.nbytes = nbytes
    entry.populated = 0
    entry.address = address
    table.tick += 1
    entry.used = table.tick
    table.count += 1
    found[0] = entry
    return 0


cdef int check_generation(Attached* attached, uint64_t incarnation, uint64_t generation) noexcept nogil:
    """Does this cache live in the segment? Looked at once per (mapping, generation)."""
    cdef SegmentHeader* header = <SegmentHeader*>attached.address
    cdef int status
    if attached.generation == generation:
        return 0
    status = check_header(&header.header, MAGIC_SEGMENT, attached.nbytes, incarnation, attached.serial)
    if status != 0:
        return status
    if load64_acquire(&header.generation) != generation:
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
