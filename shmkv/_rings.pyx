# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""What the owner of a directory leaves for readers to find: why a key ended, which segments are gone.

A ring keeps the newest entries; the count beside it says how many there ever were, so a reader knows what it has missed.
"""
import time

from libc.string cimport memcpy, memset

from shmkv._crash cimport crash_point
from shmkv._futex cimport fence_release, load64_relaxed, store64_relaxed, store64_release, store_words
from shmkv._layout cimport DirectoryHeader, EndedKey, directory_header, ended_at, unlinked_at


cdef void note_ended(char* base, const Key* key, uint32_t why, uint64_t row, uint64_t generation):
    """A key ended, ROW_CONSUMED or ROW_REMOVED; `row` and `generation` name the binding."""
    cdef DirectoryHeader* header = directory_header(base)
    cdef uint64_t count = load64_relaxed(&header.ended_count)
    cdef EndedKey made
    memset(&made, 0, sizeof(EndedKey))
    memcpy(made.key, key.words, sizeof(key.words))
    made.key_kind = key.kind
    made.why = why
    made.row = row
    made.generation = generation
    made.when_ns = time.time_ns()
    fence_release()                 # the count before the entry that takes the oldest one's place
    store_words(ended_at(base, count), &made, sizeof(EndedKey))
    crash_point(b"key-noting")
    store64_release(&header.ended_count, count + 1)


cdef void note_unlinked(char* base, uint64_t serial):
    """A segment's name is gone: readers that still map it let it go at their next call."""
    cdef DirectoryHeader* header = directory_header(base)
    cdef uint64_t count = load64_relaxed(&header.segments_unlinked)
    store64_relaxed(unlinked_at(base, count), serial)
    crash_point(b"unlink-noting")
    store64_release(&header.segments_unlinked, count + 1)
