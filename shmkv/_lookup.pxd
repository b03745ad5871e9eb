"""What a reader does in a directory: find a row, pin its cache, cover and consume its key. No lock of the owner's, no GIL."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._layout cimport ROW_CONSUMED, ROW_LIVE, ROW_REMOVED, CacheRecord, LinkSide, RowRecord, word_state


cdef enum:
    # Answers besides 0 and -errno.
    FIND_NEVER = -1101              # no such key or cache as far as the directory remembers
    FIND_CONSUMED = -1102           # the key was consumed
    FIND_REMOVED = -1103            # the key was removed, or the cache freed
    FIND_UNPUBLISHED = -1104        # bound, but its bytes are not published yet
    FIND_DAMAGED = -1105            # a number that no owner writes


cdef struct Key:
    uint64_t words[4]               # req_id, prefix_id, model_id, 0
    uint32_t kind                   # KEY_*


cdef struct FoundRow:
    RowRecord* row
    CacheRecord* cache
    uint64_t row_word
    uint64_t cache_word
    CacheRecord copy                # private, checked against the table sizes
    uint32_t batch_index
    uint32_t key_kind               # of the key bound to the row, whatever it was found by


cdef uint64_t key_hash(const Key* key) noexcept nogil
cdef uint64_t id_hash(int64_t cache_id) noexcept nogil
cdef int find_key(char* base, const Key* key, FoundRow* found) noexcept nogil
cdef int find_row(char* base, int64_t cache_id, uint32_t batch_index, FoundRow* found) noexcept nogil
cdef bint pin(LinkSide* side, FoundRow* found) noexcept nogil
cdef void unpin(LinkSide* side) noexcept nogil
cdef int recheck(FoundRow* found, bint by_key) noexcept nogil
cdef bint cover(char* base, FoundRow* found, uint32_t first, uint32_t count) noexcept nogil
cdef bint is_full(char* base, const CacheRecord* cache, uint32_t batch_index, uint64_t row_generation) noexcept nogil
cdef bint consume(FoundRow* found) noexcept nogil
cdef int why_ended(char* base, const Key* key) noexcept nogil
cdef Key to_key(tuple words)


cdef inline bint has_key(uint64_t row_word):
    """Is the row's key in the index: alive, or ended by a reader and not yet noticed by the owner?"""
    return word_state(row_word) in (ROW_LIVE, ROW_CONSUMED, ROW_REMOVED)
