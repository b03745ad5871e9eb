"""Pushes: answers besides those of the steps, and what both kinds of push ask of their source."""
from libc.stdint cimport uint32_t

from shmkv._blocks cimport Blocks
from shmkv._local cimport Local


cdef enum:
    PUSH_ADDRESS = -1501            # an address that lies in no living tensor
    PUSH_ROOM = -1502               # a row, or a block, that does not fit between its address and the tensor's end
    PUSH_ROW = -1503                # the source has no such row
    PUSH_CLOSED = -1504             # its owner does not want that others write into the cache


cdef int check_source_rows(const Local* src, const Blocks* blocks, uint32_t row) noexcept nogil
