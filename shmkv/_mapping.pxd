"""Files in /dev/shm mapped whole, and the headers of our own."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._layout cimport Header


cdef extern from *:
    """
    #define _GNU_SOURCE 1
    #include <errno.h>
    #include <fcntl.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/stat.h>
    #include <unistd.h>

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
    """
    char* map_descriptor(int fd, uint64_t nbytes, bint writable, bint populate, int* status) noexcept nogil
    int open_segment(const char* path, bint writable, uint64_t* nbytes) noexcept nogil
    int munmap(void* address, size_t nbytes) noexcept nogil
    int close(int fd) noexcept nogil


cdef class Region:
    """A mapping that lives as long as anything refers to it; `exports` counts the views that somebody holds."""
    cdef char* address
    cdef readonly uint64_t nbytes
    cdef readonly bint writable
    cdef uint32_t export_count


cdef void write_segment_header(Region region, uint64_t incarnation, uint64_t serial, uint64_t generation)
cdef void publish_header(Header* shared, const Header* made, const char* point) noexcept nogil
