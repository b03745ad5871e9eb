# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""What the owner of a directory leaves for readers to find: why a key ended, which segments are gone.

A ring keeps the newest entries; the count beside it says how many there ever were, so a reader knows what it has missed.
"""
import time

from libc.string cimport memcpy

from shmkv._crash cimport crash_point
from shmkv._futex cimport store64_release
from shmkv._layout cimport DirectoryHeader, EndedKey, directory_header, ended_at, unlinked_at


cdef void note_ended(char* base, const Key* key, uint32_t why):
    """A key ended: ROW_CONSUMED or ROW_REMOVED."""
    cdef DirectoryHeader* header = directory_header(base)
    cdef EndedKey* ended = ended_at(base, header.ended_count)
    memcpy(ended.key, key.words, sizeof(key.words))
    ended.key_kind = key.kind
    ended.why = why
    ended.when_ns = time.time_ns()
    crash_point(b"key-noting")
    store64_release(&header.ended_count, header.ended_count + 1)


cdef void note_unlinked(char* base, uint64_t serial):
    """A segment's name is gone: readers that still map it let it go at their next call."""
    cdef DirectoryHeader* header = directory_header(base)
    unlinked_at(base, header.segments_unlinked)[0] = serial
    crash_point(b"unlink-noting")
    store64_release(&header.segments_unlinked, header.segments_unlinked + 1)
