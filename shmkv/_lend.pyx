# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Lend a row of a peer's cache: find it as a pull does, take a lease instead of copying, mark what a pull would mark.

The mapping is the one that pulls use, held by whoever looks into it: a peer's segment is mapped once, and it stays mapped until the
last array over it is gone, whatever becomes of link, lease and peer.
"""
import os

cimport cython
from libc.errno cimport EINVAL, ENOMEM, errno
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from shmkv._attached cimport Attached, mapped_give, mapped_hold
from shmkv._carry cimport CARRY_PRIVATE, PeerEnd, attach
from shmkv._core cimport count, drop_unlinked, enter_counted, find, finish
from shmkv._crash cimport crash_point
from shmkv._events cimport memory_changed
from shmkv._futex cimport load64_relaxed, load_words
from shmkv._layout cimport tensor_at, word_generation
from shmkv._lease cimport lease_give, lease_take
from shmkv._life cimport process_epoch
from shmkv._link cimport is_forked, link_leave
from shmkv._lookup cimport FoundRow, unpin
from shmkv._mapping cimport close, open_segment
from shmkv._plan cimport PLAN_DAMAGED, PLAN_DIVISOR, PLAN_SRC_RANGE, PLAN_SRC_WINDOW, Shape, check_shape, row_nbytes


cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <sys/mman.h>

    /* Copy-on-write pages of a file; none is brought before it is touched. */
    static inline char *map_private(int fd, uint64_t nbytes, int *status)
    {
        void *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
        if (address == MAP_FAILED) { *status = -errno; return NULL; }
        madvise(address, nbytes, MADV_DONTDUMP);
        return (char *)address;
    }
    """
    char* map_private(int fd, uint64_t nbytes, int* status) noexcept nogil


cdef int lend_now(Link* link, Request* want, uint32_t limit, Lent* lent) noexcept nogil:
    """0, or the answer of the first step that did not pass; `limit`: leases that this side may have."""
    cdef int status
    memset(lent, 0, sizeof(Lent))
    lent.lease = -1
    status = enter_counted(link, &want.wait)
    if status == 0:
        status = lend_locked(link, want, limit, lent)
        link_leave(link)
    return status


cdef int lend_locked(Link* link, Request* want, uint32_t limit, Lent* lent) noexcept nogil:
    cdef FoundRow found
    cdef PeerEnd src
    cdef int status
    drop_unlinked(link)
    status = find(link, want, &found)
    if status != 0:
        return status
    status = attach(link, &found, &src)
    if status == 0:
        status = check_mapped(&src)
    if status == 0:
        status = copy_tensors(link, want, &found, src.nbytes, lent)
    if status == 0:
        status = lease_take(link.mine, word_generation(found.cache_word), limit)
    if status >= 0:
        lent.lease = status
        hold(lent, src.segment, &found)
        want.nbytes = 0
        status = finish(link, want, &found)
    if is_forked(link):
        return status               # a signal handler forked: hazard and lease are the parent's
    if status != 0:
        take_back(link, lent)
    unpin(link.mine)
    count(link, &want.wait, want.nbytes, status)
    return status


cdef int check_mapped(const PeerEnd* src) noexcept nogil:
    """Is there memory to look at? 0, CARRY_PRIVATE or LEND_UNMAPPED."""
    if src.segment == NULL:
        return CARRY_PRIVATE
    return 0 if src.segment.mapped != NULL else LEND_UNMAPPED


cdef void hold(Lent* lent, Attached* segment, const FoundRow* found) noexcept nogil:
    """What is lent stays mapped."""
    lent.mapped = segment.mapped
    mapped_hold(segment.mapped)
    lent.generation = word_generation(found.cache_word)
    lent.serial = found.copy.segment_serial
    lent.row = found.batch_index


cdef void take_back(Link* link, Lent* lent) noexcept nogil:
    """The end of a loan: lease, mapping, copies. Done twice it does nothing more."""
    if lent.lease >= 0:
        give_back(link, lent.lease)
        lent.lease = -1
    if lent.mapped != NULL:
        mapped_give(lent.mapped)
        lent.mapped = NULL
    free(lent.tensors)
    lent.tensors = NULL


cdef void give_back(Link* link, int lease) noexcept nogil:
    """The end of a lease, told to an owner that waits for memory."""
    # Nobody uses a record again that a living side holds a lease in; but this side may have been taken for dead.
    if word_generation(load64_relaxed(&link.record.state)) == link.serial:
        lease_give(link.mine, lease)
        memory_changed(link.directory)


cdef int copy_tensors(Link* link, Request* want, const FoundRow* found, uint64_t nbytes, Lent* lent) noexcept nogil:
    """Private copies of the selected tensors' records, each checked, and the window against each row: 0, PLAN_* or -ENOMEM."""
    cdef uint32_t i, first = want.select.src_first, tensors = found.copy.num_tensors
    cdef uint64_t wanted = want.select.src_count if want.select.src_count >= 0 else tensors
    cdef Shape* shape
    if want.select.divisor and tensors % want.select.divisor:
        return PLAN_DIVISOR
    if wanted == 0 or first + wanted > tensors:
        return PLAN_SRC_RANGE
    lent.tensors = <TensorRecord*>calloc(wanted, sizeof(TensorRecord))
    if lent.tensors == NULL:
        return -ENOMEM
    lent.count = <uint32_t>wanted
    want.select.dst_count = <int64_t>wanted
    for i in range(lent.count):
        load_words(&lent.tensors[i], tensor_at(link.directory, found.copy.first_tensor + first + i), sizeof(TensorRecord))
        shape = <Shape*>&lent.tensors[i]        # a record begins with the numbers of a Shape
        if i and is_alike(&lent.tensors[0], &lent.tensors[i]) and shape.nbytes == lent.tensors[0].nbytes:
            if shape.offset > nbytes - shape.nbytes:        # all else was found out for the first one
                return PLAN_DAMAGED
            continue
        if check_shape(shape, nbytes) != 0 or shape.rows != found.copy.num_rows:
            return PLAN_DAMAGED
        if not fits(row_nbytes(shape), want.select.src_offset, want.select.size):
            return PLAN_SRC_WINDOW
    return 0


cdef inline bint is_alike(const TensorRecord* one, const TensorRecord* other) noexcept nogil:
    return one.outer == other.outer and one.rows == other.rows and one.inner == other.inner and one.dtype == other.dtype


cdef inline bint fits(uint64_t stride, uint64_t offset, int64_t size) noexcept nogil:
    """Is there anything behind `offset`, and `size` bytes if that is not -1?"""
    return offset < stride and (size < 0 or <uint64_t>size <= stride - offset)


cdef class LentRegion(Region):
    def __dealloc__(self):
        # Before the base class unmaps: this mapping is not its own.
        self.address = NULL
        if self.mapped != NULL:
            mapped_give(self.mapped)


cdef Region lent_region(Mapped* mapped):
    cdef LentRegion region = LentRegion.__new__(LentRegion)
    mapped_hold(mapped)
    region.mapped = mapped
    region.address = mapped.address
    region.nbytes = mapped.nbytes
    region.writable = False
    return region


@cython.no_gc_clear                # the lease is given back by __dealloc__, in a cycle too
cdef class Loan:
    """Made by `_pull.lend`. `tensors`: (offset, nbytes, outer, rows, inner, dtype) each, in bytes from the start of `region`;
    `row`: the row of them that is lent. Given back by `close`, when it goes, or when its process dies."""

    def __cinit__(self):
        self.lent.lease = -1            # nothing is lent yet

    def __dealloc__(self):
        self.end()

    cdef void end(self):
        if self.handle is not None and self.handle.link.epoch == process_epoch():
            crash_point(b"loan-ending")
            take_back(&self.handle.link, &self.lent)

    def close(self):
        """Give the lease back; twice is no error. What was made of `region` stays mapped, its bytes may become another cache's."""
        self.end()
        self.region = None

    @property
    def is_open(self):
        """Is the lease held?"""
        return self.lent.lease >= 0

    @property
    def row(self):
        """The row that is lent."""
        return self.lent.row

    @property
    def serial(self):
        """Number of the segment in which it is."""
        return self.lent.serial

    @property
    def generation(self):
        """Of the cache that is lent."""
        return self.lent.generation

    @property
    def are_alike(self):
        """Do all of the selected tensors have rows of one form, of one element type?"""
        cdef uint32_t i
        for i in range(1, self.lent.count if self.lent.tensors != NULL else 0):
            if not is_alike(&self.lent.tensors[0], &self.lent.tensors[i]):
                return False
        return True

    @property
    def count(self):
        """Number of selected tensors."""
        return self.lent.count

    @property
    def tensors(self):
        """The selected tensors."""
        cdef uint32_t i
        return [numbers_of(&self.lent.tensors[i]) for i in range(self.lent.count if self.lent.tensors != NULL else 0)]

    def tensor(self, uint32_t place):
        """One of them."""
        if self.lent.tensors == NULL:
            raise IndexError("nothing is lent any more")
        if place >= self.lent.count:
            raise IndexError(f"there are {self.lent.count} tensors, got place {place}")
        return numbers_of(&self.lent.tensors[place])


cdef class ForkedRegion(Region):
    """A private, writable mapping of a lent segment: pages are the owner's until they are written. Keeps the loan."""


def fork_segment(loan, str path, uint64_t nbytes):
    """Map a whole segment privately. `loan`: whatever keeps its cache from being freed. OSError when it cannot be opened or has
    another size."""
    cdef uint64_t found = 0
    cdef int status = 0
    cdef bytes name = os.fsencode(path)
    cdef ForkedRegion region = ForkedRegion.__new__(ForkedRegion)
    cdef int fd = open_segment(name, False, &found)
    if fd < 0:
        raise OSError(errno or EINVAL, f"cannot open {path}: {os.strerror(errno) if errno else 'not a segment of this user'}")
    if found == nbytes:
        region.address = map_private(fd, nbytes, &status)
    close(fd)
    if found != nbytes:
        raise OSError(EINVAL, f"{path} has {found} bytes, expected {nbytes}")
    if status != 0:
        raise OSError(-status, f"cannot map {nbytes} bytes: {os.strerror(-status)}")
    region.nbytes, region.writable, region.loan = nbytes, True, loan
    return region


cdef inline tuple numbers_of(const TensorRecord* t):
    return t.offset, t.nbytes, t.outer, t.rows, t.inner, t.dtype


cdef Loan loan_of(LinkHandle handle, Lent* lent):
    """An object for what was lent. MemoryError: it was taken back."""
    cdef Loan loan
    try:
        loan = Loan.__new__(Loan)
        loan.region = lent_region(lent.mapped)
    except MemoryError:
        take_back(&handle.link, lent)
        raise
    loan.handle = handle
    loan.lent = lent[0]
    return loan


UNMAPPED = LEND_UNMAPPED
