# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The reader's side of a directory. The algorithm is told at the head of `_layout.pxd`; this file is its code.

The key index is a hint: an entry leads to a row record, and only the record, copied between two equal loads of its word, counts.
A miss is final only if the index word is the same before and after.
"""
from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    exchange64_seq,
    fence_acquire,
    load32_acquire,
    load32_relaxed,
    load64_acquire,
    load64_seq,
    load_words,
    store64_relaxed,
    store64_release,
)
from shmkv._layout cimport (
    CACHE_FREE,
    CACHE_LIVE,
    CACHES_MAX,
    COVERAGE_LINES_MAX,
    ENDED_RING,
    INDEX_LOG2_MAX,
    INDEX_LOG2_MIN,
    KEY_BLOCKS,
    KEY_NONE,
    ROW_CONSUMED,
    ROW_CONSUMED_OUT,
    ROW_LIVE,
    ROW_REMOVED,
    ROW_UNBOUND,
    ROWS_MAX,
    TENSORS_MAX,
    TENSORS_PER_WORD,
    WORDS_PER_LINE,
    DirectoryHeader,
    EndedKey,
    TensorRecord,
    cache_at,
    directory_header,
    ended_at,
    index_part,
    row_at,
    tensor_at,
    word_generation,
    word_state,
)
from shmkv._mapping cimport Region


cdef enum:
    # How often a reader looks again because the owner changed something meanwhile. An owner does that now and then; a peer that
    # does it without end must not keep a reader for ever.
    ROW_LOOKS = 1000
    INDEX_LOOKS = 16


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    """A one-to-one scramble of 64 bits (the finaliser of splitmix64)."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9ULL
    x ^= x >> 27
    x *= 0x94D049BB133111EBULL
    return x ^ x >> 31


# Lowest bits of an entry's tag: the entry leads from a cache's id, or from a blocks key, to the first row of a cache; else from a
# key to its row.
cdef uint64_t CACHE_BIT = <uint64_t>1 << 32
cdef uint64_t BLOCKS_BIT = <uint64_t>1 << 33


cdef uint64_t key_hash(const Key* key) noexcept nogil:
    """Where a key's probing begins; never its identity: all four words are compared."""
    cdef uint64_t x = mix(key.kind + 0x9E3779B97F4A7C15ULL)
    x = mix(x ^ key.words[2])
    x = mix(x ^ key.words[1])
    return mix(x ^ key.words[0]) & ~CACHE_BIT


cdef uint64_t id_hash(int64_t cache_id) noexcept nogil:
    return (mix(<uint64_t>cache_id ^ 0xD1B54A32D192ED03ULL) | CACHE_BIT) & ~BLOCKS_BIT


cdef uint64_t blocks_hash(uint64_t model_id) noexcept nogil:
    return mix(model_id ^ 0xA24BAED4963EE407ULL) | CACHE_BIT | BLOCKS_BIT


cdef int copy_cache(char* base, uint32_t slot, FoundRow* found) noexcept nogil:
    """A checked private copy of a living cache record: 0, FIND_REMOVED or FIND_DAMAGED."""
    cdef DirectoryHeader* header = directory_header(base)
    cdef CacheRecord* shared
    cdef CacheRecord* copy = &found.copy
    if slot >= load32_acquire(&header.caches_reserved) or slot >= CACHES_MAX:
        return FIND_DAMAGED
    shared = cache_at(base, slot)
    found.cache = shared
    found.cache_word = load64_seq(&shared.word)
    load_words(copy, shared, sizeof(CacheRecord))
    fence_acquire()
    if word_state(found.cache_word) != CACHE_LIVE or load64_seq(&shared.word) != found.cache_word:
        return FIND_REMOVED
    if <uint64_t>copy.first_tensor + copy.num_tensors > TENSORS_MAX:
        return FIND_DAMAGED
    if <uint64_t>copy.first_row + copy.num_rows > ROWS_MAX:
        return FIND_DAMAGED
    if copy.first_coverage + <uint64_t>copy.num_rows * copy.coverage_lines > COVERAGE_LINES_MAX:
        return FIND_DAMAGED
    if <uint64_t>copy.coverage_lines * WORDS_PER_LINE * TENSORS_PER_WORD < copy.num_tensors:
        return FIND_DAMAGED
    return 0


cdef int compare_row(char* base, uint32_t index, const Key* key, FoundRow* found) noexcept nogil:
    """Is this row bound to the key? 0, FIND_NEVER (another key), FIND_CONSUMED, FIND_REMOVED or FIND_DAMAGED."""
    cdef RowRecord* row = row_at(base, index)
    cdef uint64_t words[4]
    cdef uint32_t kind, slot
    cdef int status, _look
    found.row = row
    for _look in range(ROW_LOOKS):
        found.row_word = load64_seq(&row.word)
        load_words(words, row.key, sizeof(words))
        kind = load32_relaxed(&row.key_kind)
        slot = load32_relaxed(&row.cache_slot)
        found.batch_index = load32_relaxed(&row.batch_index)
        fence_acquire()
        if load64_seq(&row.word) == found.row_word:
            break
    else:
        return FIND_DAMAGED
    if kind != key.kind or words[0] != key.words[0] or words[1] != key.words[1] or words[2] != key.words[2] \
            or words[3] != key.words[3]:
        return FIND_NEVER
    if word_state(found.row_word) == ROW_CONSUMED:
        return FIND_CONSUMED
    if word_state(found.row_word) != ROW_LIVE:
        return FIND_REMOVED if word_state(found.row_word) == ROW_REMOVED else FIND_NEVER    # out of the index: the ring knows
    status = copy_cache(base, slot, found)
    if status == 0 and (found.batch_index >= found.copy.num_rows or found.copy.first_row + found.batch_index != index):
        status = FIND_DAMAGED
    found.key_kind = kind
    return status


cdef int compare_id(char* base, uint32_t index, int64_t cache_id, FoundRow* found) noexcept nogil:
    """Is this the first row of the cache with that id? 0, FIND_NEVER or FIND_REMOVED."""
    cdef int status = copy_cache(base, load32_relaxed(&row_at(base, index).cache_slot), found)
    if status != 0:
        return FIND_NEVER if status == FIND_DAMAGED else status
    return 0 if found.copy.first_row == index and found.copy.cache_id == cache_id else FIND_NEVER


cdef int compare_blocks(char* base, uint32_t index, uint64_t model_id, FoundRow* found) noexcept nogil:
    """Is this the first row of the blocks cache with that key? 0, FIND_NEVER or FIND_REMOVED."""
    cdef int status = copy_cache(base, load32_relaxed(&row_at(base, index).cache_slot), found)
    if status != 0:
        return FIND_NEVER if status == FIND_DAMAGED else status
    return 0 if found.copy.first_row == index and found.copy.blocks_bound and found.copy.blocks_model_id == model_id \
        else FIND_NEVER


cdef int compare(char* base, uint32_t index, uint64_t hashed, const Key* key, uint64_t number, FoundRow* found) noexcept nogil:
    """Is the row that an entry leads to the one that is looked for?"""
    if key != NULL:
        return compare_row(base, index, key, found)
    if leads_to_blocks(hashed >> 32):
        return compare_blocks(base, index, number, found)
    return compare_id(base, index, <int64_t>number, found)


cdef int probe(char* base, uint64_t hashed, const Key* key, uint64_t number, FoundRow* found) noexcept nogil:
    """Walk the index for a key; for a cache id or the model id of a blocks key when `key` is NULL."""
    cdef DirectoryHeader* header = directory_header(base)
    cdef uint64_t index_word, entry
    cdef uint64_t* entries
    cdef uint32_t log2, mask, i, _step, row, tag = <uint32_t>(hashed >> 32)
    cdef int status, best, _look
    for _look in range(INDEX_LOOKS):
        index_word = load64_seq(&header.index_word)
        log2 = index_word & 0xFF
        if log2 < INDEX_LOG2_MIN or log2 > INDEX_LOG2_MAX:
            return FIND_DAMAGED
        entries = index_part(base, log2, index_word >> 8 & 1)
        mask = (<uint32_t>1 << log2) - 1
        i = <uint32_t>hashed & mask
        best = FIND_NEVER
        for _step in range(mask + 1):
            entry = load64_acquire(&entries[i])
            row = <uint32_t>entry
            if row == 0:
                break
            if row >= 2 and <uint32_t>(entry >> 32) == tag:
                row -= 2
                if row >= load32_acquire(&header.rows_reserved) or row >= ROWS_MAX:
                    return FIND_DAMAGED
                status = compare(base, row, hashed, key, number, found)
                if status == 0 or status == FIND_DAMAGED:
                    return status
                if status != FIND_NEVER:
                    best = status
            i = (i + 1) & mask
        if load64_seq(&header.index_word) == index_word:
            return best
    return FIND_DAMAGED


cdef int find_key(char* base, const Key* key, FoundRow* found) noexcept nogil:
    """The living row that a key names: 0 or FIND_*."""
    return probe(base, key_hash(key), key, 0, found)


cdef int find_row(char* base, int64_t cache_id, uint32_t batch_index, FoundRow* found) noexcept nogil:
    """The row of a living cache by the cache's id: 0 or FIND_*."""
    cdef int status
    if cache_id <= 0:
        return FIND_NEVER
    status = probe(base, id_hash(cache_id), NULL, <uint64_t>cache_id, found)
    if status != 0:
        return status
    if batch_index >= found.copy.num_rows:
        return FIND_NEVER
    found.row = row_at(base, found.copy.first_row + batch_index)
    found.row_word = load64_seq(&found.row.word)
    found.key_kind = load32_relaxed(&found.row.key_kind) if word_state(found.row_word) == ROW_LIVE else KEY_NONE
    found.batch_index = batch_index
    return 0


cdef int find_blocks(char* base, uint64_t model_id, FoundRow* found) noexcept nogil:
    """The living blocks cache that a blocks key names, without any row of it: 0 or FIND_*."""
    cdef int status = probe(base, blocks_hash(model_id), NULL, model_id, found)
    found.row = NULL
    return status


cdef int look_at_rows(char* base, const FoundRow* found, const uint32_t* rows, uint32_t count, uint64_t tensors,
                      uint64_t* seen) noexcept nogil:
    """Are `tensors` tensors of each of these rows published? `seen` gets their words, for `recheck_rows`. The cache is pinned and
    the numbers are below its num_rows. 0 or FIND_UNPUBLISHED."""
    cdef RowRecord* row
    cdef uint32_t i
    for i in range(count):
        row = row_at(base, found.copy.first_row + rows[i])
        seen[i] = load64_seq(&row.word)         # before the progress: who takes bytes back changes the progress first
        if load32_acquire(&row.progress) < tensors:     # consume: progress
            return FIND_UNPUBLISHED
    return 0


cdef bint pin(LinkSide* side, FoundRow* found) noexcept nogil:
    """Set the hazard, then look again: True if nothing changed meanwhile and the cache stays until unpin."""
    exchange64_seq(&side.hazard, word_generation(found.cache_word))
    crash_point(b"hazard-set")
    if load64_seq(&found.cache.word) == found.cache_word \
            and (found.row == NULL or load64_seq(&found.row.word) == found.row_word):
        return True
    unpin(side)
    return False


cdef void unpin(LinkSide* side) noexcept nogil:
    """Clear the hazard, after the last load of the cache's bytes."""
    crash_point(b"unpinning")
    store64_release(&side.hazard, 0)


cdef int recheck(FoundRow* found, bint by_key) noexcept nogil:
    """After the copy: were the bytes those of the row all the time? 0 or FIND_*.

    Another reader may have consumed the key meanwhile. A key that was removed or bound anew is gone: its owner may have begun
    to write other bytes into the row.
    """
    cdef uint64_t word
    fence_acquire()                 # after the last byte
    word = load64_seq(&found.row.word)
    if not is_still_there(found):
        return FIND_REMOVED
    return 0 if still_counts(found.row_word, word, by_key) else FIND_REMOVED


cdef int recheck_rows(char* base, const FoundRow* found, const uint32_t* rows, uint32_t count, const uint64_t* seen,
                      int64_t now_ns) noexcept nogil:
    """The same for the rows that `look_at_rows` saw, which no key is asked of."""
    cdef RowRecord* row
    cdef uint32_t i
    fence_acquire()                 # after the last byte
    for i in range(count):
        row = row_at(base, found.copy.first_row + rows[i])
        if not is_same_row(seen[i], load64_seq(&row.word)):
            return FIND_REMOVED
        store64_relaxed(&row.last_use_ns, <uint64_t>now_ns)
    return 0 if is_still_there(found) else FIND_REMOVED


cdef inline bint is_still_there(const FoundRow* found) noexcept nogil:
    """Retired meanwhile: the owner wants the memory and waits for our hazard. FREE or another generation: it has taken us for
    dead, so the bytes may be anybody's."""
    cdef uint64_t word = load64_seq(&found.cache.word)
    return word_generation(word) == word_generation(found.cache_word) and word_state(word) != CACHE_FREE


cdef bint still_counts(uint64_t seen, uint64_t word, bint by_key) noexcept nogil:
    """Does what was copied since a row's word was `seen` count? By key only if the key was not removed."""
    if by_key and word != seen and word_generation(word) == word_generation(seen):
        return word_state(word) in (ROW_CONSUMED, ROW_CONSUMED_OUT)
    return is_same_row(seen, word)


cdef bint recheck_written(LinkSide* side, const FoundRow* found) noexcept nogil:
    """After the last byte that was written into a pinned cache: was the memory the cache's until then?

    The hazard is stored once more, for nothing else keeps stores of bytes before a load: bytes that could be seen after this look
    might be another cache's.
    """
    crash_point(b"pushed")
    exchange64_seq(&side.hazard, word_generation(found.cache_word))
    return is_still_there(found)


cdef bint is_same_row(uint64_t seen, uint64_t word) noexcept nogil:
    """Has a row had the same bytes since its word was `seen`, whatever became of a key? One without a key that got its first is
    still the same row: binding moves the generation on by one, unbinding by two."""
    return word_generation(word) == word_generation(seen) \
        or (word_state(seen) == ROW_UNBOUND and word_generation(word) == word_generation(seen) + 1)


cdef int why_ended(char* base, const Key* key) noexcept nogil:
    """FIND_CONSUMED or FIND_REMOVED if the ring of ended keys remembers the key, else FIND_NEVER. A hint for a message."""
    cdef uint64_t count = load64_acquire(&directory_header(base).ended_count)
    cdef uint64_t number
    cdef EndedKey copy
    for number in range(ENDED_RING):
        if number >= count:
            break
        load_words(&copy, ended_at(base, count - 1 - number), sizeof(EndedKey))
        if copy.key_kind == key.kind and copy.key[0] == key.words[0] and copy.key[1] == key.words[1] \
                and copy.key[2] == key.words[2]:
            return FIND_CONSUMED if copy.why == ROW_CONSUMED else FIND_REMOVED
    return FIND_NEVER


cdef Key to_key(tuple words):
    """(kind, req_id, prefix_id, model_id) as the record holds it."""
    cdef Key key
    key.kind = words[0]
    key.words[0] = words[1]
    key.words[1] = words[2]
    key.words[2] = words[3]
    key.words[3] = 0
    return key


def hash_of_key(int kind, uint64_t req_id, uint64_t prefix_id, uint64_t model_id) -> int:
    """The index hash of a key (tests build collisions with it: each step is one-to-one)."""
    cdef Key key = to_key((kind, req_id, prefix_id, model_id))
    return key_hash(&key)


def is_published(Region directory, tuple words):
    """Does a key live, with all tensors of its row published? Without a lock: the next moment it may be otherwise."""
    cdef Key key = to_key(words)
    cdef FoundRow found
    if find_key(directory.address, &key, &found) != 0:
        return False
    return load32_acquire(&found.row.progress) >= found.copy.num_tensors


def describe(Region directory, tuple words, uint32_t batch_index):
    """(num_tensors, outer, rows, inner bytes, segment's serial) of the cache behind a key or cache id, or None; for messages.

    `words`: (kind, req_id, prefix_id, model_id), or (KEY_NONE, cache_id, 0, 0).
    """
    cdef Key key = to_key(words)
    cdef FoundRow found
    cdef TensorRecord tensor
    cdef int status
    if key.kind == KEY_NONE:
        status = find_row(directory.address, <int64_t>key.words[0], batch_index, &found)
    elif key.kind == KEY_BLOCKS:
        status = find_blocks(directory.address, key.words[2], &found)
    else:
        status = find_key(directory.address, &key, &found)
    if status != 0 or found.copy.num_tensors == 0:
        return None
    load_words(&tensor, tensor_at(directory.address, found.copy.first_tensor), sizeof(TensorRecord))
    return found.copy.num_tensors, tensor.outer, tensor.rows, tensor.inner, found.copy.segment_serial


NEVER = FIND_NEVER
CONSUMED = FIND_CONSUMED
REMOVED = FIND_REMOVED
UNPUBLISHED = FIND_UNPUBLISHED
DAMAGED = FIND_DAMAGED
MISSES = frozenset([FIND_NEVER, FIND_CONSUMED, FIND_REMOVED, FIND_UNPUBLISHED])
