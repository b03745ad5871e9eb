# cython: language_level=3, freethreading_compatible=True
"""The layout read back from the compiled structs: names, offsets, sizes, and their fingerprint.

Owns nothing shared and must not know who uses a field. `fields()` is what `shmkv info --layout` prints.
"""
import zlib

from shmkv._layout cimport *


cdef list _describe():
    """(struct, field, offset, nbytes) of every field, in the order of `_layout.pxd`."""
    # Records to measure, never filled: a field of no record at all is not an address that C knows.
    cdef Header any_h
    cdef MembersHeader any_mh
    cdef MemberRecord any_m
    cdef DirectoryHeader any_d
    cdef SegmentHeader any_s
    cdef Header* h = &any_h
    cdef MembersHeader* mh = &any_mh
    cdef MemberRecord* m = &any_m
    cdef DirectoryHeader* d = &any_d
    cdef SegmentHeader* s = &any_s
    return [
        ("Header", "magic", <size_t>&h.magic - <size_t>h, sizeof(h.magic)),
        ("Header", "version", <size_t>&h.version - <size_t>h, sizeof(h.version)),
        ("Header", "fingerprint", <size_t>&h.fingerprint - <size_t>h, sizeof(h.fingerprint)),
        ("Header", "header_nbytes", <size_t>&h.header_nbytes - <size_t>h, sizeof(h.header_nbytes)),
        ("Header", "nbytes", <size_t>&h.nbytes - <size_t>h, sizeof(h.nbytes)),
        ("Header", "incarnation", <size_t>&h.incarnation - <size_t>h, sizeof(h.incarnation)),
        ("Header", "serial", <size_t>&h.serial - <size_t>h, sizeof(h.serial)),
        ("MembersHeader", "slots", <size_t>&mh.slots - <size_t>mh, sizeof(mh.slots)),
        ("MembersHeader", "record_nbytes", <size_t>&mh.record_nbytes - <size_t>mh, sizeof(mh.record_nbytes)),
        ("MembersHeader", "joins", <size_t>&mh.joins - <size_t>mh, sizeof(mh.joins)),
        ("MemberRecord", "incarnation", <size_t>&m.incarnation - <size_t>m, sizeof(m.incarnation)),
        ("MemberRecord", "cluster_id", <size_t>&m.cluster_id - <size_t>m, sizeof(m.cluster_id)),
        ("MemberRecord", "pid", <size_t>&m.pid - <size_t>m, sizeof(m.pid)),
        ("MemberRecord", "role", <size_t>&m.role - <size_t>m, sizeof(m.role)),
        ("MemberRecord", "start_time", <size_t>&m.start_time - <size_t>m, sizeof(m.start_time)),
        ("MemberRecord", "layout_version", <size_t>&m.layout_version - <size_t>m, sizeof(m.layout_version)),
        ("MemberRecord", "directory", <size_t>&m.directory - <size_t>m, sizeof(m.directory)),
        ("DirectoryHeader", "cluster_id", <size_t>&d.cluster_id - <size_t>d, sizeof(d.cluster_id)),
        ("DirectoryHeader", "role", <size_t>&d.role - <size_t>d, sizeof(d.role)),
        ("DirectoryHeader", "state", <size_t>&d.state - <size_t>d, sizeof(d.state)),
        ("DirectoryHeader", "memory_waiters", <size_t>&d.memory_waiters - <size_t>d, sizeof(d.memory_waiters)),
        ("DirectoryHeader", "links_reserved", <size_t>&d.links_reserved - <size_t>d, sizeof(d.links_reserved)),
        ("DirectoryHeader", "caches_reserved", <size_t>&d.caches_reserved - <size_t>d, sizeof(d.caches_reserved)),
        ("DirectoryHeader", "tensors_reserved", <size_t>&d.tensors_reserved - <size_t>d, sizeof(d.tensors_reserved)),
        ("DirectoryHeader", "rows_reserved", <size_t>&d.rows_reserved - <size_t>d, sizeof(d.rows_reserved)),
        ("DirectoryHeader", "coverage_reserved", <size_t>&d.coverage_reserved - <size_t>d, sizeof(d.coverage_reserved)),
        ("DirectoryHeader", "index_word", <size_t>&d.index_word - <size_t>d, sizeof(d.index_word)),
        ("DirectoryHeader", "key_event", <size_t>&d.key_event - <size_t>d, sizeof(d.key_event)),
        ("DirectoryHeader", "key_waiters", <size_t>&d.key_waiters - <size_t>d, sizeof(d.key_waiters)),
        ("DirectoryHeader", "segments_unlinked", <size_t>&d.segments_unlinked - <size_t>d, sizeof(d.segments_unlinked)),
        ("DirectoryHeader", "ended_count", <size_t>&d.ended_count - <size_t>d, sizeof(d.ended_count)),
        ("DirectoryHeader", "reaped_count", <size_t>&d.reaped_count - <size_t>d, sizeof(d.reaped_count)),
        ("DirectoryHeader", "memory_event", <size_t>&d.memory_event - <size_t>d, sizeof(d.memory_event)),
        ("SegmentHeader", "generation", <size_t>&s.generation - <size_t>s, sizeof(s.generation)),
    ] + _describe_records()


cdef list _describe_records():
    cdef EndedKey any_e
    cdef CacheRecord any_c
    cdef TensorRecord any_t
    cdef RowRecord any_r
    cdef LinkSide any_ls
    cdef LinkRecord any_lr
    cdef EndedKey* e = &any_e
    cdef CacheRecord* c = &any_c
    cdef TensorRecord* t = &any_t
    cdef RowRecord* r = &any_r
    cdef LinkSide* ls = &any_ls
    cdef LinkRecord* lr = &any_lr
    return [
        ("EndedKey", "key", <size_t>&e.key - <size_t>e, sizeof(e.key)),
        ("EndedKey", "key_kind", <size_t>&e.key_kind - <size_t>e, sizeof(e.key_kind)),
        ("EndedKey", "why", <size_t>&e.why - <size_t>e, sizeof(e.why)),
        ("EndedKey", "when_ns", <size_t>&e.when_ns - <size_t>e, sizeof(e.when_ns)),
        ("EndedKey", "generation", <size_t>&e.generation - <size_t>e, sizeof(e.generation)),
        ("EndedKey", "row", <size_t>&e.row - <size_t>e, sizeof(e.row)),
        ("CacheRecord", "word", <size_t>&c.word - <size_t>c, sizeof(c.word)),
        ("CacheRecord", "cache_id", <size_t>&c.cache_id - <size_t>c, sizeof(c.cache_id)),
        ("CacheRecord", "segment_serial", <size_t>&c.segment_serial - <size_t>c, sizeof(c.segment_serial)),
        ("CacheRecord", "segment_nbytes", <size_t>&c.segment_nbytes - <size_t>c, sizeof(c.segment_nbytes)),
        ("CacheRecord", "kind", <size_t>&c.kind - <size_t>c, sizeof(c.kind)),
        ("CacheRecord", "remote_accessible", <size_t>&c.remote_accessible - <size_t>c, sizeof(c.remote_accessible)),
        ("CacheRecord", "num_tensors", <size_t>&c.num_tensors - <size_t>c, sizeof(c.num_tensors)),
        ("CacheRecord", "first_tensor", <size_t>&c.first_tensor - <size_t>c, sizeof(c.first_tensor)),
        ("CacheRecord", "num_rows", <size_t>&c.num_rows - <size_t>c, sizeof(c.num_rows)),
        ("CacheRecord", "first_row", <size_t>&c.first_row - <size_t>c, sizeof(c.first_row)),
        ("CacheRecord", "first_coverage", <size_t>&c.first_coverage - <size_t>c, sizeof(c.first_coverage)),
        ("CacheRecord", "coverage_lines", <size_t>&c.coverage_lines - <size_t>c, sizeof(c.coverage_lines)),
        ("CacheRecord", "blocks_model_id", <size_t>&c.blocks_model_id - <size_t>c, sizeof(c.blocks_model_id)),
        ("CacheRecord", "blocks_bound", <size_t>&c.blocks_bound - <size_t>c, sizeof(c.blocks_bound)),
        ("CacheRecord", "consumed", <size_t>&c.consumed - <size_t>c, sizeof(c.consumed)),
        ("CacheRecord", "format", <size_t>&c.format - <size_t>c, sizeof(c.format)),
        ("TensorRecord", "offset", <size_t>&t.offset - <size_t>t, sizeof(t.offset)),
        ("TensorRecord", "nbytes", <size_t>&t.nbytes - <size_t>t, sizeof(t.nbytes)),
        ("TensorRecord", "outer", <size_t>&t.outer - <size_t>t, sizeof(t.outer)),
        ("TensorRecord", "rows", <size_t>&t.rows - <size_t>t, sizeof(t.rows)),
        ("TensorRecord", "inner", <size_t>&t.inner - <size_t>t, sizeof(t.inner)),
        ("TensorRecord", "base_address", <size_t>&t.base_address - <size_t>t, sizeof(t.base_address)),
        ("TensorRecord", "dtype", <size_t>&t.dtype - <size_t>t, sizeof(t.dtype)),
        ("RowRecord", "key", <size_t>&r.key - <size_t>r, sizeof(r.key)),
        ("RowRecord", "key_kind", <size_t>&r.key_kind - <size_t>r, sizeof(r.key_kind)),
        ("RowRecord", "cache_slot", <size_t>&r.cache_slot - <size_t>r, sizeof(r.cache_slot)),
        ("RowRecord", "batch_index", <size_t>&r.batch_index - <size_t>r, sizeof(r.batch_index)),
        ("RowRecord", "progress", <size_t>&r.progress - <size_t>r, sizeof(r.progress)),
        ("RowRecord", "word", <size_t>&r.word - <size_t>r, sizeof(r.word)),
        ("RowRecord", "last_use_ns", <size_t>&r.last_use_ns - <size_t>r, sizeof(r.last_use_ns)),
        ("RowRecord", "progress_waiters", <size_t>&r.progress_waiters - <size_t>r, sizeof(r.progress_waiters)),
        ("RowRecord", "event", <size_t>&r.event - <size_t>r, sizeof(r.event)),
        ("RowRecord", "hits", <size_t>&r.hits - <size_t>r, sizeof(r.hits)),
        ("LinkSide", "open", <size_t>&ls.open - <size_t>ls, sizeof(ls.open)),
        ("LinkSide", "slot", <size_t>&ls.slot - <size_t>ls, sizeof(ls.slot)),
        ("LinkSide", "incarnation", <size_t>&ls.incarnation - <size_t>ls, sizeof(ls.incarnation)),
        ("LinkSide", "cluster_id", <size_t>&ls.cluster_id - <size_t>ls, sizeof(ls.cluster_id)),
        ("LinkSide", "hazard", <size_t>&ls.hazard - <size_t>ls, sizeof(ls.hazard)),
        ("LinkSide", "counters", <size_t>&ls.counters - <size_t>ls, sizeof(ls.counters)),
        ("LinkSide", "leases", <size_t>&ls.leases - <size_t>ls, sizeof(ls.leases)),
        ("LinkRecord", "state", <size_t>&lr.state - <size_t>lr, sizeof(lr.state)),
        ("LinkRecord", "word", <size_t>&lr.word - <size_t>lr, sizeof(lr.word)),
        ("LinkRecord", "sides", <size_t>&lr.sides - <size_t>lr, sizeof(lr.sides)),
    ]


cdef tuple _FIELDS = tuple(_describe())
cdef tuple _TABLES = (
    ("MembersHeader", sizeof(MembersHeader), 1, 0),
    ("MemberRecord", sizeof(MemberRecord), MEMBERS_MAX, sizeof(MembersHeader)),
    ("DirectoryHeader", sizeof(DirectoryHeader), 1, 0),
    ("EndedKey", sizeof(EndedKey), ENDED_RING, ENDED_OFFSET),
    ("LinkRecord", sizeof(LinkRecord), LINKS_MAX, LINKS_OFFSET),
    ("CacheRecord", sizeof(CacheRecord), CACHES_MAX, CACHES_OFFSET),
    ("TensorRecord", sizeof(TensorRecord), TENSORS_MAX, TENSORS_OFFSET),
    ("RowRecord", sizeof(RowRecord), ROWS_MAX, ROWS_OFFSET),
    ("coverage line", LINE, COVERAGE_LINES_MAX, COVERAGE_OFFSET),
    ("index entry", 8, 2 * ((1 << (INDEX_LOG2_MAX + 1)) - (1 << INDEX_LOG2_MIN)), INDEX_OFFSET),
)
cdef uint32_t _fingerprint = zlib.crc32(repr((_FIELDS, _TABLES)).encode())


cdef uint32_t layout_fingerprint() noexcept nogil:
    return _fingerprint


def fields() -> tuple:
    """(struct, field, offset, nbytes) of every shared field, as compiled."""
    return _FIELDS


def tables() -> tuple:
    """(record, nbytes of one, how many at most, offset in the file) of every table, as compiled."""
    return _TABLES


VERSION = LAYOUT_VERSION
FINGERPRINT = _fingerprint
DIRECTORY_SIZE = DIRECTORY_NBYTES
MEMBERS_SIZE = sizeof(MembersHeader) + MEMBERS_MAX * sizeof(MemberRecord)
SEGMENT_DATA = SEGMENT_DATA_OFFSET
ALIGNMENT = TENSOR_ALIGN
MEMBERS_LIMIT = MEMBERS_MAX
LINKS_LIMIT = LINKS_MAX
KIND_CONTIGUOUS = CACHE_CONTIGUOUS
KIND_BLOCKS = CACHE_BLOCKS
KIND_HOST = CACHE_HOST
KIND_REGISTERED = CACHE_REGISTERED
