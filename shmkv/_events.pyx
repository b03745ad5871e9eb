# cython: language_level=3, freethreading_compatible=True
"""Who changed what others may wait for tells them, if there are any. The change comes first and is seq_cst; see `_layout`."""
from shmkv._crash cimport crash_point
from shmkv._futex cimport add32_seq, futex_wake_all, load32_seq
from shmkv._layout cimport DirectoryHeader, directory_header


cdef void event_happens(uint32_t* event) noexcept nogil:
    """Whoever sleeps on a word, in whatever process, looks again."""
    crash_point(b"event")
    add32_seq(event, 1)
    crash_point(b"waking")
    futex_wake_all(event, True)


cdef void keys_changed(char* base) noexcept nogil:
    """Keys or caches of a directory."""
    cdef DirectoryHeader* header = directory_header(base)
    crash_point(b"key-event")
    add32_seq(&header.key_event, 1)
    if load32_seq(&header.key_waiters):
        futex_wake_all(&header.key_event, True)


cdef void row_changed(RowRecord* row) noexcept nogil:
    """A row's progress or key, or the state of its cache."""
    if load32_seq(&row.progress_waiters):
        event_happens(&row.event)


cdef void memory_changed(char* base) noexcept nogil:
    """The owner of a directory may have memory to free, or has freed some."""
    cdef DirectoryHeader* header = directory_header(base)
    if load32_seq(&header.memory_waiters):
        event_happens(&header.memory_event)
