# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The key index: open addressing in shared memory, written by the owner alone, read by everybody without a lock.

An entry is (upper half of the hash << 32 | row + 2); 0 is empty and 1 a tombstone. The table grows by building the next one in
another part of the sparse directory and switching one word, so a reader walks either the old or the new one. Readers: `_lookup`.
"""
from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    clear_words,
    exchange64_seq,
    fence_release,
    load32_acquire,
    load32_relaxed,
    load32_seq,
    load64_relaxed,
    load_words,
    store64_relaxed,
    store64_release,
)
from shmkv._layout cimport (
    CACHES_MAX,
    INDEX_LOG2_MAX,
    INDEX_LOG2_MIN,
    LINKS_MAX,
    PAGE,
    ROWS_MAX,
    SIDE_INITIATOR,
    LinkRecord,
    RowRecord,
    cache_at,
    directory_header,
    index_part,
    index_part_offset,
    link_at,
    row_at,
)
from shmkv._link_record cimport side_lives
from shmkv._lookup cimport Key, blocks_hash, id_hash, key_hash, leads_to_blocks

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void* address, size_t nbytes, int advice)
    int MADV_REMOVE


cdef inline uint64_t make_entry(uint64_t hashed, uint32_t row):
    return hashed >> 32 << 32 | (row + 2)


cdef class KeyIndex:
    """Over the index range of a directory that is being made."""

    def __init__(self, Region region, reserve):
        self.region = region
        self.base = region.address
        self.reserve = reserve
        self.old_parts = []
        reserve(index_part_offset(INDEX_LOG2_MIN, 0), 8 << INDEX_LOG2_MIN)
        self.word = 1 << 16 | INDEX_LOG2_MIN
        exchange64_seq(&directory_header(self.base).index_word, self.word)

    cdef int insert(self, uint64_t hashed, uint32_t row) except -1:
        """There is room: make_room came before. RuntimeError if another process has overwritten the table."""
        cdef uint64_t* entries = index_part(self.base, self.word & 0xFF, self.word >> 8 & 1)
        cdef uint32_t mask = (<uint32_t>1 << (self.word & 0xFF)) - 1
        cdef uint32_t i, step, row_of_entry
        for step in range(mask + 1):
            i = (<uint32_t>hashed + step) & mask
            row_of_entry = <uint32_t>load64_relaxed(&entries[i])
            if row_of_entry < 2:
                self.used += row_of_entry == 0
                self.living += 1
                crash_point(b"index-inserting")
                store64_release(&entries[i], make_entry(hashed, row))
                return 0
        raise RuntimeError("another process has overwritten the key index of this cluster's directory")

    cdef void remove(self, uint64_t hashed, uint32_t row):
        cdef uint64_t* entries = index_part(self.base, self.word & 0xFF, self.word >> 8 & 1)
        cdef uint32_t mask = (<uint32_t>1 << (self.word & 0xFF)) - 1
        cdef uint32_t i, step
        cdef uint64_t entry
        for step in range(mask + 1):
            i = (<uint32_t>hashed + step) & mask
            entry = load64_relaxed(&entries[i])
            if entry == make_entry(hashed, row):
                crash_point(b"index-removing")
                store64_release(&entries[i], 1)         # a tombstone: probing goes on behind it
                self.living -= 1
                return
            if <uint32_t>entry == 0:
                return

    cdef int make_room(self, uint32_t more) except -1:
        """Keep the index at most half full: build the next table in another part, then switch one word."""
        cdef uint32_t log2 = self.word & 0xFF, part = self.word >> 8 & 1, next_log2 = INDEX_LOG2_MIN
        cdef uint64_t* entries
        if (<uint64_t>self.used + more) * 2 <= <uint64_t>1 << log2:
            return 0
        while (<uint64_t>self.living + more) * 4 > <uint64_t>1 << next_log2:
            next_log2 += 1
        if next_log2 > INDEX_LOG2_MAX:
            raise MemoryError(f"the key index is at its maximum of {1 << INDEX_LOG2_MAX} entries")
        self.reserve(index_part_offset(next_log2, part ^ 1), 8 << next_log2)
        entries = index_part(self.base, next_log2, part ^ 1)
        fence_release()             # the switch away from this part before its first entry changes: whoever is in it looks again
        clear_words(entries, 8 << next_log2)
        self.refill(index_part(self.base, log2, part), log2, entries, next_log2)
        self.word = ((self.word >> 16) + 1) << 16 | (part ^ 1) << 8 | next_log2
        crash_point(b"index-switching")
        exchange64_seq(&directory_header(self.base).index_word, self.word)
        self.old_parts = [old for old in self.old_parts if old != (next_log2, part ^ 1)] + [(log2, part)]
        return 0

    cdef void refill(self, uint64_t* old, uint32_t log2, uint64_t* entries, uint32_t next_log2):
        """Copy the living entries to their places."""
        cdef uint32_t i, place, step, mask = (<uint32_t>1 << next_log2) - 1
        cdef uint64_t entry
        self.used = 0
        for i in range(<uint32_t>1 << log2):
            entry = load64_relaxed(&old[i])
            if <uint32_t>entry < 2 or <uint32_t>entry - 2 >= ROWS_MAX or self.used > mask // 2:
                continue            # empty, or scribbled by another process
            place = <uint32_t>self.hash_of_entry(entry)
            for step in range(mask + 1):    # another process may fill the new table meanwhile
                if not load64_relaxed(&entries[(place + step) & mask]):
                    store64_relaxed(&entries[(place + step) & mask], entry)
                    self.used += 1
                    break
        self.living = self.used

    cdef uint64_t hash_of_entry(self, uint64_t entry):
        """The lower half of the hash is not in the entry; it follows from the record. The tag's lowest bits tell what leads
        there: a cache's id, a blocks key, a key."""
        cdef RowRecord* row = row_at(self.base, <uint32_t>entry - 2)
        cdef uint32_t slot = load32_relaxed(&row.cache_slot)
        cdef Key key
        if entry >> 32 & 1 and slot >= CACHES_MAX:
            return 0                # scribbled by another process
        if leads_to_blocks(entry >> 32):
            return blocks_hash(load64_relaxed(&cache_at(self.base, slot).blocks_model_id))
        if entry >> 32 & 1:
            return id_hash(load64_relaxed(<const uint64_t*>&cache_at(self.base, slot).cache_id))
        load_words(key.words, row.key, sizeof(key.words))
        key.kind = load32_relaxed(&row.key_kind)
        return key_hash(&key)

    cdef bint reader_inside(self, int life_fd, Region members):
        """May some reader still walk a replaced table? A reader is between taking a link's word and giving it back."""
        cdef uint32_t slot, count = min(load32_acquire(&directory_header(self.base).links_reserved), LINKS_MAX)
        cdef LinkRecord* link
        for slot in range(count):
            link = link_at(self.base, slot)
            # seq_cst, as the switch of the index word before it and a reader's take of the word: one of the two sees the other.
            if load32_seq(&link.word) and side_lives(&link.sides[SIDE_INITIATOR], life_fd, members.address):
                return True
        return False

    def give_back_old_parts(self, int life_fd, Region members):
        """Punch the pages out of tables that were replaced, once no reader can be in them."""
        if not self.old_parts or self.reader_inside(life_fd, members):
            return
        for log2, part in self.old_parts:
            offset = index_part_offset(log2, part)
            begin, end = (offset + PAGE - 1) // PAGE * PAGE, (offset + (8 << log2)) // PAGE * PAGE
            if end > begin:
                crash_point(b"index-punching")
                madvise(self.base + <uint64_t>begin, end - begin, MADV_REMOVE)
        self.old_parts = []

    @property
    def capacity(self):
        """Entries of the table in use."""
        return 1 << (self.word & 0xFF)
