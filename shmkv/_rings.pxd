"""The two rings of a directory: keys that ended, segments that lost their name. The owner writes, `_lookup` and `_core` read."""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._lookup cimport Key


cdef void note_ended(char* base, const Key* key, uint32_t why, uint64_t row, uint64_t generation)
cdef void note_unlinked(char* base, uint64_t serial)
