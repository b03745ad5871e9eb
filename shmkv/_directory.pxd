"""The owner's side of its directory: insert, bind, publish, retire."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._index cimport KeyIndex
from shmkv._lookup cimport Key
from shmkv._mapping cimport Region


cdef class Directory:
    cdef readonly Region region
    cdef char* base
    cdef object reserve             # reserve(offset, nbytes): pages behind a range, or OSError
    cdef object caches              # RangeAllocator of each table
    cdef object tensors
    cdef object rows
    cdef object coverage
    cdef readonly KeyIndex index
    cdef uint64_t next_generation
    cdef uint64_t incarnation
    cdef uint32_t* seen_consumed     # by cache slot: how much of CacheRecord.consumed the owner has noticed
    cdef int grow(self, uint64_t table, uint32_t record_nbytes, uint64_t wanted, uint32_t* reserved,
                  uint64_t limit) except -1
    cdef tuple take_records(self, uint32_t tensors, uint32_t rows, uint32_t lines)
    cdef void fill_tensor(self, uint32_t index, tuple shape, uint64_t base_address)
    cdef void fill_row(self, uint32_t index, uint32_t slot, uint32_t batch_index, uint32_t published)
    cdef int end_key(self, uint32_t slot, uint32_t batch_index, uint32_t state) except -1
    cdef void remember(self, const Key* key, uint32_t why)
    cdef void key_changed(self)
