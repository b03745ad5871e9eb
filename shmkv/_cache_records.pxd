"""The owner's own records of its caches, and what it does with those in shared memory."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._index cimport KeyIndex
from shmkv._layout cimport CacheRecord, RowRecord
from shmkv._mapping cimport Region
from shmkv._plan cimport ShapeList
from shmkv._tables cimport Tables


cdef struct OwnRecord:
    # What the owner goes by: others map the directory writable, so its own tables are for them to read, not for it.
    uint64_t generation             # 0 = free
    int64_t cache_id
    uint32_t num_tensors
    uint32_t first_tensor
    uint32_t num_rows
    uint32_t first_row
    uint32_t first_coverage
    uint32_t coverage_lines
    uint32_t seen_consumed          # how much of CacheRecord.consumed the owner has noticed
    uint64_t blocks_model_id        # of a blocks key, if there is one
    bint blocks_bound


cdef class CacheRecords:
    cdef readonly Region region
    cdef char* base
    cdef Tables tables
    cdef readonly KeyIndex index
    cdef uint64_t next_generation
    cdef uint64_t incarnation
    cdef OwnRecord* own             # by cache slot
    cdef readonly dict owners       # slot -> what `insert` was given
    cdef void fill_tensors(self, uint32_t first, ShapeList tensors, uint64_t base_address)
    cdef void fill_row(self, uint32_t index, uint32_t slot, uint32_t batch_index, uint32_t published)
    cdef int check_slot(self, uint32_t slot) except -1
    cdef RowRecord* row_of(self, uint32_t slot, uint32_t batch_index) except NULL
    cdef int rows_changed(self, uint32_t slot) except -1
    cdef CacheRecord private_record(self, uint32_t slot)
