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
    RowRecord* row                  # NULL when a whole blocks cache was found
    CacheRecord* cache
    uint64_t row_word
    uint64_t cache_word
    CacheRecord copy                # private, checked against the table sizes
    uint32_t batch_index
    uint32_t key_kind               # of the key bound to the row, whatever it was found by


cdef uint64_t key_hash(const Key* key) noexcept nogil
cdef uint64_t id_hash(int64_t cache_id) noexcept nogil
cdef uint64_t blocks_hash(uint64_t model_id) noexcept nogil
cdef inline bint leads_to_blocks(uint64_t tag) noexcept nogil:
    """Is this the tag of a blocks key's entry?"""
    return tag & 3 == 3


cdef int copy_cache(char* base, uint32_t slot, FoundRow* found) noexcept nogil
cdef int find_key(char* base, const Key* key, FoundRow* found) noexcept nogil
cdef int find_row(char* base, int64_t cache_id, uint32_t batch_index, FoundRow* found) noexcept nogil
cdef int find_blocks(char* base, uint64_t model_id, FoundRow* found) noexcept nogil
cdef int look_at_rows(char* base, const FoundRow* found, const uint32_t* rows, uint32_t count, uint64_t tensors,
                      uint64_t* seen) noexcept nogil
cdef bint recheck_written(LinkSide* side, const FoundRow* found) noexcept nogil
cdef int recheck_rows(char* base, const FoundRow* found, const uint32_t* rows, uint32_t count, const uint64_t* seen,
                      int64_t now_ns) noexcept nogil
cdef bint pin(LinkSide* side, FoundRow* found) noexcept nogil
cdef void unpin(LinkSide* side) noexcept nogil
cdef int recheck(FoundRow* found, bint by_key) noexcept nogil
cdef bint still_counts(uint64_t seen, uint64_t word, bint by_key) noexcept nogil
cdef bint is_same_row(uint64_t seen, uint64_t word) noexcept nogil
cdef int why_ended(char* base, const Key* key) noexcept nogil
cdef Key to_key(tuple words)


cdef inline bint has_key(uint64_t row_word):
    """Is the row's key in the index: alive, or ended by a reader and not yet noticed by the owner?"""
    return word_state(row_word) in (ROW_LIVE, ROW_CONSUMED, ROW_REMOVED)
