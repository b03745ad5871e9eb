"""The owner's side of its directory: bind, publish, settle, close."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmkv._cache_records cimport CacheRecords


cdef class Directory(CacheRecords):
    cdef readonly uint64_t ended_prefix_hits    # of prefix keys that are gone
    cdef int end_key(self, uint32_t slot, uint32_t batch_index, uint32_t state) except -1
