# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The owner's side of its caches in a directory: recorded, named by blocks keys, retired, released.

As `_directory`, which adds the keys of rows, all of it runs under the owner's manager lock.
"""
from libc.stdlib cimport free
from libc.string cimport memset

from shmkv._crash cimport crash_point
from shmkv._events cimport row_changed
from shmkv._futex cimport (
    exchange64_seq,
    fence_release,
    load32_acquire,
    load32_relaxed,
    load64_relaxed,
    store32_relaxed,
    store32_release,
    store64_relaxed,
    store_words,
)
from shmkv._layout cimport *
from shmkv._link_record cimport is_named
from shmkv._lookup cimport FoundRow, blocks_hash, find_blocks, id_hash
from shmkv._mapping cimport write_segment_header
from shmkv._plan cimport SHAPE_RECORD_NBYTES


cdef class CacheRecords:
    """The tables of caches, tensors and rows; a Directory has filled in what they stand on."""

    def __dealloc__(self):
        free(self.own)

    def insert(self, Region segment, owner, *, int64_t cache_id, uint64_t serial, tensors, uint32_t num_rows,
               uint32_t published, uint32_t kind=CACHE_CONTIGUOUS, blocks_model_id=None, uint64_t format=0,
               uint64_t base_address=0, uint64_t nbytes=0, bint remote_accessible=True):
        """Record a cache: (slot, generation). Its word says LIVE afterwards, its rows have no keys yet.

        `owner` (any object) stands in `owners` under the slot from then on, with no moment in between for a signal handler.

        `tensors`: a ShapeList, or one (offset, nbytes, outer, rows, inner, dtype) each, in bytes from the segment's start;
        `published`: tensors of a row readable at once; `format`: a hash of kv_tensor_format, 0 = none. Without an own
        segment: `base_address`, from which offsets count, and `nbytes` of the memory there, or of the segment in which it lies.
        MemoryError or OSError, nothing recorded, when a table cannot grow.
        """
        cdef ShapeList shapes = tensors if isinstance(tensors, ShapeList) else ShapeList(tensors)
        cdef uint32_t count = shapes.count, lines
        lines = (count + TENSORS_PER_WORD * WORDS_PER_LINE - 1) // (TENSORS_PER_WORD * WORDS_PER_LINE)
        self.index.make_room(num_rows + 2)
        taken = self.tables.take((1, count, num_rows, num_rows * lines))
        cdef uint32_t slot = taken[0], first_tensor = taken[1], first_row = taken[2], first_line = taken[3], i
        cdef CacheRecord* cache = cache_at(self.base, slot)
        cdef CacheRecord made
        cdef uint64_t generation = self.next_generation
        self.next_generation += 1
        self.own[slot] = OwnRecord(generation, cache_id, count, first_tensor, num_rows, first_row, first_line, lines,
                                   load32_acquire(&cache.consumed), blocks_model_id or 0, blocks_model_id is not None)
        if segment is not None:
            base_address, nbytes = <size_t>segment.address, segment.nbytes
        self.fill_tensors(first_tensor, shapes, base_address)
        for i in range(num_rows):
            self.fill_row(first_row + i, slot, i, published)
        if segment is not None:
            write_segment_header(segment, self.incarnation, serial, generation)
        made.cache_id = cache_id
        made.segment_serial = serial
        made.segment_nbytes = nbytes
        made.kind = kind
        made.blocks_model_id = blocks_model_id or 0
        made.blocks_bound = blocks_model_id is not None
        made.remote_accessible = remote_accessible
        made.num_tensors = count
        made.first_tensor = first_tensor
        made.num_rows = num_rows
        made.first_row = first_row
        made.first_coverage = first_line
        made.coverage_lines = lines
        # All between the word and the pullers' count.
        store_words(&cache.cache_id, &made.cache_id, <size_t>&made.consumed - <size_t>&made.cache_id)
        store64_relaxed(&cache.format, format)
        crash_point(b"cache-live")
        exchange64_seq(&cache.word, make_word(generation, CACHE_LIVE))
        self.index.insert(id_hash(cache_id), first_row)
        if blocks_model_id is not None:
            self.index.insert(blocks_hash(blocks_model_id), first_row)
        self.owners[slot] = owner
        return slot, generation

    cdef void fill_tensors(self, uint32_t first, ShapeList tensors, uint64_t base_address):
        """A record begins with the same five numbers as a Shape."""
        cdef TensorRecord* tensor
        cdef uint32_t i
        for i in range(tensors.count):
            tensor = tensor_at(self.base, first + i)
            store_words(tensor, &tensors.shapes[i], SHAPE_RECORD_NBYTES)
            store64_relaxed(&tensor.base_address, base_address + tensors.shapes[i].offset)
            store32_relaxed(&tensor.dtype, tensors.dtypes[i])

    cdef void fill_row(self, uint32_t index, uint32_t slot, uint32_t batch_index, uint32_t published):
        """An unbound row; the generation goes on where the record's last user left it."""
        cdef RowRecord* row = row_at(self.base, index)
        exchange64_seq(&row.word, make_word(word_generation(load64_relaxed(&row.word)) + 1, ROW_UNBOUND))
        crash_point(b"row-filling")
        store32_relaxed(&row.key_kind, KEY_NONE)
        store32_relaxed(&row.cache_slot, slot)
        store32_relaxed(&row.batch_index, batch_index)
        store32_release(&row.progress, published)

    def end_blocks_key(self, uint32_t slot):
        """Take the key of a blocks cache away; nothing happens to a cache without one."""
        self.check_slot(slot)
        cdef OwnRecord* own = &self.own[slot]
        if not own.blocks_bound:
            return
        own.blocks_bound = False
        store32_relaxed(&cache_at(self.base, slot).blocks_bound, 0)
        self.index.remove(blocks_hash(own.blocks_model_id), own.first_row)

    def find_blocks(self, uint64_t model_id):
        """The slot of the living blocks cache with this key, or None."""
        cdef FoundRow found
        cdef uint32_t slot
        if find_blocks(self.base, model_id, &found) != 0:
            return None
        slot = load32_relaxed(&row_at(self.base, found.copy.first_row).cache_slot)
        return slot if slot < CACHES_MAX and word_generation(found.cache_word) == self.own[slot].generation else None

    def retire(self, uint32_t slot):
        """LIVE -> RETIRED: no reader can pin the cache any more; look at `pinned` before its memory is used again."""
        self.check_slot(slot)
        crash_point(b"retiring")
        exchange64_seq(&cache_at(self.base, slot).word, make_word(self.own[slot].generation, CACHE_RETIRED))
        crash_point(b"retired")
        self.rows_changed(slot)

    cdef int rows_changed(self, uint32_t slot) except -1:
        """Whoever waits for a row of a cache looks again."""
        cdef uint32_t i
        for i in range(self.own[slot].num_rows):
            row_changed(row_at(self.base, self.own[slot].first_row + i))
        return 0

    def release(self, uint32_t slot):
        """RETIRED -> FREE: give the records back. The caller has seen that nothing pins the cache."""
        self.end_blocks_key(slot)
        cdef OwnRecord own = self.own[slot]
        self.index.remove(id_hash(own.cache_id), own.first_row)
        crash_point(b"freeing")
        exchange64_seq(&cache_at(self.base, slot).word, make_word(own.generation, CACHE_FREE))
        crash_point(b"freed")
        fence_release()             # the word before the first byte of the next cache: a reader's last look needs it
        self.own[slot].generation = 0
        self.owners.pop(slot, None)
        self.tables.give((slot, own.first_tensor, own.first_row, own.first_coverage),
                         (1, own.num_tensors, own.num_rows, own.num_rows * own.coverage_lines))

    cdef int check_slot(self, uint32_t slot) except -1:
        """IndexError unless a cache lives in the slot."""
        if slot >= CACHES_MAX or self.own[slot].generation == 0:
            raise IndexError(f"no cache in slot {slot}")
        return 0

    cdef RowRecord* row_of(self, uint32_t slot, uint32_t batch_index) except NULL:
        self.check_slot(slot)
        if batch_index >= self.own[slot].num_rows:
            raise IndexError(f"row {batch_index} of {self.own[slot].num_rows} in slot {slot}")
        return row_at(self.base, self.own[slot].first_row + batch_index)

    def row_number(self, uint32_t slot, uint32_t batch_index):
        """Number of a row's record."""
        self.row_of(slot, batch_index)
        return self.own[slot].first_row + batch_index

    cdef CacheRecord private_record(self, uint32_t slot):
        """For functions that readers use with their checked copies."""
        cdef CacheRecord record
        memset(&record, 0, sizeof(CacheRecord))
        record.num_tensors = self.own[slot].num_tensors
        record.first_coverage = self.own[slot].first_coverage
        record.coverage_lines = self.own[slot].coverage_lines
        return record

    def pinned(self, uint64_t generation, int life_fd, Region members, initiated):
        """Does a living reader name this cache? `initiated`: (directory, slot) of the link records that this cluster made in
        other directories. Scans what stands in shared memory and keeps no count that a killed reader could leave wrong."""
        return is_named(self.region, generation, life_fd, members, initiated)
