# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Mappings of whole files in /dev/shm, and the headers of our own.

A mapping keeps no descriptor: an owner with ten thousand caches has as many mappings and no open file. That is why the
standard mmap module is not used here: it holds a duplicate of the descriptor for as long as the mapping lives.
"""
import os

from libc.errno cimport EAGAIN, EINVAL, errno
from libc.string cimport memset

from shmkv._crash cimport crash_point
from shmkv._futex cimport load32_acquire, load32_relaxed, store32_release, store64_release, store_words
from shmkv._layout cimport MAGIC_SEGMENT, LAYOUT_VERSION, Header, SegmentHeader, layout_fingerprint


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


def close_all(list opened) -> None:
    """Close the descriptors of a list and empty it, with no moment in between for a signal handler."""
    while opened:
        close(opened.pop())


cdef void write_segment_header(Region region, uint64_t incarnation, uint64_t serial, uint64_t generation):
    """Say whose segment this is and which cache lives in it; a kept segment gets another generation."""
    cdef SegmentHeader* header = <SegmentHeader*>region.address
    cdef Header made
    crash_point(b"segment-naming")
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
    publish_header(&header.header, &made, b"segment-header")


cdef void publish_header(Header* shared, const Header* made, const char* point) noexcept nogil:
    """Fill a header and make it valid: the version goes last."""
    store_words(shared, made, sizeof(Header))
    crash_point(point)
    store32_release(&shared.version, LAYOUT_VERSION)      # publish: header
