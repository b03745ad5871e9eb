# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The owner's side of a directory: the whole of it when it is made and closed, and the keys of its rows.

Every method runs under the owner's manager lock; readers in other processes take no lock at all, so the order of the stores is
what keeps them right. The names of the transitions are those of `tests/model.py`. Knows nothing of segments' life or of links'
making; memory behind a growing table comes from the `reserve` callable it was given.
"""
from libc.stdlib cimport calloc
from libc.string cimport memset

from shmkv._cache_records cimport OwnRecord
from shmkv._coverage cimport consume, cover, is_full
from shmkv._crash cimport crash_point
from shmkv._events cimport keys_changed, memory_changed, row_changed
from shmkv._futex cimport (
    add32_relaxed,
    exchange32_seq,
    exchange64_seq,
    fence_release,
    load32_acquire,
    load32_relaxed,
    load64_acquire,
    load64_relaxed,
    load64_seq,
    load_words,
    store32_relaxed,
    store32_release,
    store64_relaxed,
    store64_release,
    store_words,
    swap64_seq,
)
from shmkv._index cimport KeyIndex
from shmkv._layout cimport *
from shmkv._lookup cimport (
    FIND_NEVER,
    FoundRow,
    Key,
    find_key,
    has_key,
    is_same_row,
    key_hash,
    still_counts,
    to_key,
    why_ended,
)
from shmkv._mapping cimport Region, publish_header
from shmkv._rings cimport note_ended, note_unlinked
from shmkv._tables cimport Tables


cdef class Directory(CacheRecords):
    """Tables of one cluster over a mapped, zeroed directory file."""

    def __init__(self, Region region, reserve, *, uint64_t incarnation, uint64_t cluster_id, uint32_t role):
        cdef DirectoryHeader* header = <DirectoryHeader*>region.address
        cdef Header made
        self.region = region
        self.base = region.address
        self.next_generation = 1
        self.incarnation = incarnation
        self.owners = {}
        self.own = <OwnRecord*>calloc(CACHES_MAX, sizeof(OwnRecord))
        if self.own == NULL:
            raise MemoryError("no memory for the owner's records")
        reserve(0, LINKS_OFFSET + LINKS_FIRST * sizeof(LinkRecord))
        store32_release(&header.links_reserved, LINKS_FIRST)
        self.tables = Tables(region, reserve)
        self.index = KeyIndex(region, reserve)
        store64_relaxed(&header.cluster_id, cluster_id)
        store32_relaxed(&header.role, role)
        store32_relaxed(&header.state, DIRECTORY_OPEN)
        memset(&made, 0, sizeof(Header))
        made.magic = MAGIC_DIRECTORY
        made.fingerprint = layout_fingerprint()
        made.header_nbytes = sizeof(DirectoryHeader)
        made.nbytes = DIRECTORY_NBYTES
        made.incarnation = incarnation
        publish_header(&header.header, &made, b"directory-header")

    # -- keys -------------------------------------------------------------------------------------------------------

    def find(self, tuple words):
        """(slot, batch_index) of the living row with this key, or None. `words`: (kind, req_id, prefix_id, model_id)."""
        cdef Key key = to_key(words)
        cdef FoundRow found
        if find_key(self.base, &key, &found) != 0:
            return None
        slot = load32_relaxed(&found.row.cache_slot)
        if slot >= CACHES_MAX or found.batch_index >= self.own[slot].num_rows \
                or word_generation(found.cache_word) != self.own[slot].generation:
            return None             # scribbled by another process
        return slot, found.batch_index

    def make_room(self, uint32_t keys):
        """Room in the index for so many more keys, or MemoryError / OSError."""
        self.index.make_room(keys)

    def why_ended(self, tuple words):
        """FIND_CONSUMED, FIND_REMOVED or FIND_NEVER for a key that does not live."""
        cdef Key key = to_key(words)
        cdef FoundRow found
        cdef int status = find_key(self.base, &key, &found)
        return status if status != 0 and status != FIND_NEVER else why_ended(self.base, &key)

    def bind(self, uint32_t slot, uint32_t batch_index, tuple words, published=None):
        """Name a row: coverage is reset to the new generation, then the row goes LIVE, with its first `published` tensors readable
        (None: as it was)."""
        cdef RowRecord* row = self.row_of(slot, batch_index)
        cdef OwnRecord own = self.own[slot]
        cdef uint64_t generation
        cdef uint64_t* words_of_row = coverage_at(self.base, own.first_coverage + batch_index * own.coverage_lines)
        cdef Key key = to_key(words)
        cdef uint32_t i
        self.index.make_room(1)
        self.end_key(slot, batch_index, ROW_REMOVED)
        generation = word_generation(load64_relaxed(&row.word)) + 1
        # Between the two exchanges the word differs from every older one, so a reader's copy of the key cannot be torn.
        exchange64_seq(&row.word, make_word(generation, ROW_UNBOUND))
        crash_point(b"key-unbound")
        fence_release()
        for i in range(own.coverage_lines * WORDS_PER_LINE):
            store64_release(&words_of_row[i], generation << 32)
        store_words(row.key, key.words, sizeof(key.words))
        store32_relaxed(&row.key_kind, key.kind)
        store32_relaxed(&row.hits, 0)
        if published is not None:
            exchange32_seq(&row.progress, published)
        crash_point(b"key-live")
        exchange64_seq(&row.word, make_word(generation, ROW_LIVE))
        self.index.insert(key_hash(&key), own.first_row + batch_index)
        row_changed(row)
        keys_changed(self.base)

    def unbind(self, uint32_t slot, uint32_t batch_index):
        """Take the name from a row, under a new generation: a reader that is in it answers "not there", and nobody gets in, by
        cache id either, before it is published again. Two generations on, so that a row without a name is not taken for one that
        got its first (`is_same_row`)."""
        cdef RowRecord* row = self.row_of(slot, batch_index)
        self.end_key(slot, batch_index, ROW_REMOVED)
        exchange32_seq(&row.progress, 0)
        crash_point(b"unbinding")
        exchange64_seq(&row.word, make_word(word_generation(load64_relaxed(&row.word)) + 2, ROW_UNBOUND))
        fence_release()             # the word before the next bytes of the row, which come with plain stores
        row_changed(row)
        keys_changed(self.base)

    def remove(self, uint32_t slot, uint32_t batch_index):
        """LIVE -> REMOVED by the same compare-and-swap as a reader's consume."""
        self.end_key(slot, batch_index, ROW_REMOVED)
        keys_changed(self.base)

    cdef int end_key(self, uint32_t slot, uint32_t batch_index, uint32_t state) except -1:
        """End a row's key, if it still lives with `state`; remember why, take it out of the index. The generation stays:
        the row is still the same bytes for a reader by cache id. Nothing happens to a row without a key."""
        cdef RowRecord* row = self.row_of(slot, batch_index)
        cdef uint64_t seen = load64_seq(&row.word)
        cdef uint32_t out
        cdef Key key
        if not has_key(seen):
            return 0
        if word_state(seen) == ROW_LIVE:
            swap64_seq(&row.word, seen, make_word(word_generation(seen), state))
            crash_point(b"key-ended")
            seen = load64_seq(&row.word)
        load_words(key.words, row.key, sizeof(key.words))
        key.kind = load32_relaxed(&row.key_kind)
        if key.kind == KEY_PREFIX:
            self.ended_prefix_hits += load32_relaxed(&row.hits)
        note_ended(self.base, &key, word_state(seen), self.own[slot].first_row + batch_index, word_generation(seen))
        self.index.remove(key_hash(&key), self.own[slot].first_row + batch_index)
        out = ROW_CONSUMED_OUT if word_state(seen) == ROW_CONSUMED else ROW_REMOVED_OUT
        crash_point(b"key-out")
        exchange64_seq(&row.word, make_word(word_generation(seen), out))
        row_changed(row)
        return 0

    def cache_added(self):
        """A cache can be found by its id or blocks key: those who wait for that look."""
        keys_changed(self.base)

    def memory_freed(self):
        """Whoever waits for memory of this cluster looks again. Called by what goes, also after the garbage collector has broken up
        a cluster that was given up."""
        if self.region is not None:
            memory_changed(self.base)

    def wake_all(self):
        """All who wait for anything here look again: for the whole directory, or a link to it, is over."""
        cdef uint32_t slot
        keys_changed(self.base)
        for slot in range(self.tables.cache_slots):
            if self.own[slot].generation:
                self.rows_changed(slot)

    def settle(self, uint32_t slot):
        """How many rows of a cache still have a living key. Rows consumed by readers leave the index here; rows whose last
        reader died between its last mark and its swap are consumed here."""
        self.check_slot(slot)
        cdef CacheRecord record = self.private_record(slot)
        cdef RowRecord* row
        cdef uint64_t word
        cdef uint32_t batch_index, living = 0
        for batch_index in range(self.own[slot].num_rows):
            row = row_at(self.base, self.own[slot].first_row + batch_index)
            word = load64_seq(&row.word)
            if not has_key(word):
                continue
            if word_state(word) == ROW_LIVE and load32_relaxed(&row.key_kind) == KEY_REQUEST \
                    and is_full(self.base, &record, batch_index, word_generation(word)):
                crash_point(b"settling")
                swap64_seq(&row.word, word, make_word(word_generation(word), ROW_CONSUMED))
            if word_state(load64_seq(&row.word)) == ROW_LIVE:
                living += 1
            else:
                self.end_key(slot, batch_index, ROW_CONSUMED)
        return living

    def publish(self, uint32_t slot, uint32_t batch_index, uint32_t tensors):
        """The first `tensors` tensors of a row hold their bytes; waiters are woken if there are any."""
        cdef RowRecord* row = self.row_of(slot, batch_index)
        crash_point(b"publishing")
        exchange32_seq(&row.progress, tensors)          # publish: progress; before the look at the waiters
        crash_point(b"published")
        row_changed(row)

    def noticed_slots(self):
        """Slots of the caches of which readers have consumed rows since the last call."""
        cdef uint32_t slot, consumed
        found = []
        for slot in range(self.tables.cache_slots):
            consumed = load32_acquire(&cache_at(self.base, slot).consumed)
            if consumed != self.own[slot].seen_consumed:
                self.own[slot].seen_consumed = consumed
                found.append(slot)
        return found

    @property
    def reaped_count(self):
        """How often somebody closed a dead reader's side: a change means that `settle` may find full rows anywhere."""
        return load64_acquire(&directory_header(self.base).reaped_count)

    def generation(self, uint32_t slot):
        """Of the cache that lives in a slot."""
        self.check_slot(slot)
        return self.own[slot].generation

    def row_generation(self, uint32_t slot, uint32_t batch_index):
        """Of the key binding that a row has now."""
        return word_generation(load64_seq(&self.row_of(slot, batch_index).word))

    def last_use_ns(self, uint32_t slot, uint32_t batch_index):
        """CLOCK_MONOTONIC of the last pull out of a row, 0 = never."""
        return load64_relaxed(&self.row_of(slot, batch_index).last_use_ns)

    def prefix_hits(self, uint32_t slot, uint32_t batch_index):
        """Pulls and views of a row since its prefix key was bound."""
        return load32_relaxed(&self.row_of(slot, batch_index).hits)

    def note_use(self, uint32_t slot, uint32_t batch_index, int64_t now_ns):
        """What a reader notes after its copy, for a pull out of the owner's own cache."""
        cdef RowRecord* row = self.row_of(slot, batch_index)
        store64_relaxed(&row.last_use_ns, <uint64_t>now_ns)
        if load32_relaxed(&row.key_kind) == KEY_PREFIX:
            add32_relaxed(&row.hits, 1)

    def row_words(self, uint32_t slot, rows):
        """What `are_same_rows` needs to know of rows before their bytes are read."""
        return [load64_seq(&self.row_of(slot, row).word) for row in rows]

    def are_same_rows(self, uint32_t slot, rows, words):
        """Have the rows had the same bytes since `row_words`, as far as keys tell?"""
        cdef uint64_t seen
        for row, seen in zip(rows, words):
            if not is_same_row(seen, load64_seq(&self.row_of(slot, row).word)):
                return False
        return True

    def still_counts(self, uint32_t slot, uint32_t batch_index, uint64_t seen, bint by_key):
        """As a reader's last look: does what was copied since a row's word was `seen` count?"""
        return still_counts(seen, load64_seq(&self.row_of(slot, batch_index).word), by_key)

    def row_key(self, uint32_t slot, uint32_t batch_index):
        """(kind, req_id, prefix_id, model_id) of a row's living key, or None."""
        cdef RowRecord* row = self.row_of(slot, batch_index)
        cdef uint64_t words[4]
        if word_state(load64_seq(&row.word)) != ROW_LIVE:
            return None
        load_words(words, row.key, sizeof(words))
        return load32_relaxed(&row.key_kind), words[0], words[1], words[2]

    def progress(self, uint32_t slot, uint32_t batch_index):
        """How many tensors of a row are published."""
        return load32_acquire(&self.row_of(slot, batch_index).progress)

    def mark_pulled(self, uint32_t slot, uint32_t batch_index, uint64_t generation, uint32_t first, uint32_t count):
        """What a reader does after its copy, for a pull out of the owner's own cache: coverage, then consume."""
        cdef FoundRow found
        found.row = self.row_of(slot, batch_index)
        found.cache = cache_at(self.base, slot)
        found.row_word = load64_seq(&found.row.word)
        found.batch_index = batch_index
        found.copy = self.private_record(slot)
        if found.row_word != make_word(generation, ROW_LIVE) or load32_relaxed(&found.row.key_kind) != KEY_REQUEST:
            return
        if cover(self.base, &found, first, count) and is_full(self.base, &found.copy, batch_index, generation):
            consume(&found)

    # -- the end ----------------------------------------------------------------------------------------------------

    def note_unlinked(self, uint64_t serial):
        """A segment's name is gone: readers that still map it let it go at their next call."""
        note_unlinked(self.base, serial)

    def set_role(self, uint32_t role):
        """The role that linkers ask for."""
        store32_relaxed(&directory_header(self.base).role, role)

    def close(self):
        """Say goodbye: every link to this directory is over."""
        crash_point(b"directory-closing")
        store32_release(&directory_header(self.base).state, DIRECTORY_CLOSED)
        self.wake_all()
