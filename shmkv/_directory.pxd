"""The owner's side of its directory: bind, publish, settle, close."""
from libc.stdint cimport uint32_t

from shmkv._cache_records cimport CacheRecords


cdef class Directory(CacheRecords):
    cdef int end_key(self, uint32_t slot, uint32_t batch_index, uint32_t state) except -1
