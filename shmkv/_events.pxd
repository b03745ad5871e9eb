"""Words that say: something changed, look again."""
from libc.stdint cimport uint32_t

from shmkv._layout cimport RowRecord


cdef void event_happens(uint32_t* event) noexcept nogil
cdef void keys_changed(char* base) noexcept nogil
cdef void row_changed(RowRecord* row) noexcept nogil
cdef void memory_changed(char* base) noexcept nogil
