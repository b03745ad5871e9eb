# cython: language_level=3, freethreading_compatible=True
"""The layout read back from the compiled structs: names, offsets, sizes, and their fingerprint.

Owns nothing shared and must not know who uses a field. `fields()` is what `shmkv info --layout` prints.
"""
import zlib

from shmkv._layout cimport *


cdef list _describe():
    """(struct, field, offset, nbytes) of every field, in the order of `_layout.pxd`."""
    cdef Header* h = NULL
    cdef MembersHeader* mh = NULL
    cdef MemberRecord* m = NULL
    cdef DirectoryHeader* d = NULL
    cdef SegmentHeader* s = NULL
    return [
        ("Header", "magic", <size_t>&h.magic, sizeof(h.magic)),
        ("Header", "version", <size_t>&h.version, sizeof(h.version)),
        ("Header", "fingerprint", <size_t>&h.fingerprint, sizeof(h.fingerprint)),
        ("Header", "header_nbytes", <size_t>&h.header_nbytes, sizeof(h.header_nbytes)),
        ("Header", "nbytes", <size_t>&h.nbytes, sizeof(h.nbytes)),
        ("Header", "incarnation", <size_t>&h.incarnation, sizeof(h.incarnation)),
        ("Header", "serial", <size_t>&h.serial, sizeof(h.serial)),
        ("MembersHeader", "slots", <size_t>&mh.slots, sizeof(mh.slots)),
        ("MembersHeader", "record_nbytes", <size_t>&mh.record_nbytes, sizeof(mh.record_nbytes)),
        ("MembersHeader", "joins", <size_t>&mh.joins, sizeof(mh.joins)),
        ("MemberRecord", "incarnation", <size_t>&m.incarnation, sizeof(m.incarnation)),
        ("MemberRecord", "cluster_id", <size_t>&m.cluster_id, sizeof(m.cluster_id)),
        ("MemberRecord", "pid", <size_t>&m.pid, sizeof(m.pid)),
        ("MemberRecord", "role", <size_t>&m.role, sizeof(m.role)),
        ("MemberRecord", "start_time", <size_t>&m.start_time, sizeof(m.start_time)),
        ("MemberRecord", "layout_version", <size_t>&m.layout_version, sizeof(m.layout_version)),
        ("MemberRecord", "directory", <size_t>&m.directory, sizeof(m.directory)),
        ("DirectoryHeader", "cluster_id", <size_t>&d.cluster_id, sizeof(d.cluster_id)),
        ("DirectoryHeader", "role", <size_t>&d.role, sizeof(d.role)),
        ("DirectoryHeader", "state", <size_t>&d.state, sizeof(d.state)),
        ("DirectoryHeader", "links_reserved", <size_t>&d.links_reserved, sizeof(d.links_reserved)),
        ("DirectoryHeader", "caches_reserved", <size_t>&d.caches_reserved, sizeof(d.caches_reserved)),
        ("DirectoryHeader", "tensors_reserved", <size_t>&d.tensors_reserved, sizeof(d.tensors_reserved)),
        ("DirectoryHeader", "rows_reserved", <size_t>&d.rows_reserved, sizeof(d.rows_reserved)),
        ("DirectoryHeader", "coverage_reserved", <size_t>&d.coverage_reserved, sizeof(d.coverage_reserved)),
        ("DirectoryHeader", "index_word", <size_t>&d.index_word, sizeof(d.index_word)),
        ("DirectoryHeader", "key_event", <size_t>&d.key_event, sizeof(d.key_event)),
        ("DirectoryHeader", "key_waiters", <size_t>&d.key_waiters, sizeof(d.key_waiters)),
        ("DirectoryHeader", "segments_unlinked", <size_t>&d.segments_unlinked, sizeof(d.segments_unlinked)),
        ("DirectoryHeader", "ended_count", <size_t>&d.ended_count, sizeof(d.ended_count)),
        ("DirectoryHeader", "reaped_count", <size_t>&d.reaped_count, sizeof(d.reaped_count)),
        ("SegmentHeader", "generation", <size_t>&s.generation, sizeof(s.generation)),
    ] + _describe_records()


cdef list _describe_records():
    cdef EndedKey* e = NULL
    cdef CacheRecord* c = NULL
    cdef TensorRecord* t = NULL
    cdef RowRecord* r = NULL
    cdef LinkSide* ls = NULL
    cdef LinkRecord* lr = NULL
    return [
        ("EndedKey", "key", <size_t>&e.key, sizeof(e.key)),
        ("EndedKey", "key_kind", <size_t>&e.key_kind, sizeof(e.key_kind)),
        ("EndedKey", "why", <size_t>&e.why, sizeof(e.why)),
        ("EndedKey", "when_ns", <size_t>&e.when_ns, sizeof(e.when_ns)),
        ("CacheRecord", "word", <size_t>&c.word, sizeof(c.word)),
        ("CacheRecord", "cache_id", <size_t>&c.cache_id, sizeof(c.cache_id)),
        ("CacheRecord", "segment_serial", <size_t>&c.segment_serial, sizeof(c.segment_serial)),
        ("CacheRecord", "segment_nbytes", <size_t>&c.segment_nbytes, sizeof(c.segment_nbytes)),
        ("CacheRecord", "kind", <size_t>&c.kind, sizeof(c.kind)),
        ("CacheRecord", "remote_accessible", <size_t>&c.remote_accessible, sizeof(c.remote_accessible)),
        ("CacheRecord", "num_tensors", <size_t>&c.num_tensors, sizeof(c.num_tensors)),
        ("CacheRecord", "first_tensor", <size_t>&c.first_tensor, sizeof(c.first_tensor)),
        ("CacheRecord", "num_rows", <size_t>&c.num_rows, sizeof(c.num_rows)),
        ("CacheRecord", "first_row", <size_t>&c.first_row, sizeof(c.first_row)),
        ("CacheRecord", "first_coverage", <size_t>&c.first_coverage, sizeof(c.first_coverage)),
        ("CacheRecord", "coverage_lines", <size_t>&c.coverage_lines, sizeof(c.coverage_lines)),
        ("CacheRecord", "blocks_model_id", <size_t>&c.blocks_model_id, sizeof(c.blocks_model_id)),
        ("CacheRecord", "blocks_bound", <size_t>&c.blocks_bound, sizeof(c.blocks_bound)),
        ("CacheRecord", "consumed", <size_t>&c.consumed, sizeof(c.consumed)),
        ("TensorRecord", "offset", <size_t>&t.offset, sizeof(t.offset)),
        ("TensorRecord", "nbytes", <size_t>&t.nbytes, sizeof(t.nbytes)),
        ("TensorRecord", "outer", <size_t>&t.outer, sizeof(t.outer)),
        ("TensorRecord", "rows", <size_t>&t.rows, sizeof(t.rows)),
        ("TensorRecord", "inner", <size_t>&t.inner, sizeof(t.inner)),
        ("TensorRecord", "base_address", <size_t>&t.base_address, sizeof(t.base_address)),
        ("TensorRecord", "dtype", <size_t>&t.dtype, sizeof(t.dtype)),
        ("RowRecord", "key", <size_t>&r.key, sizeof(r.key)),
        ("RowRecord", "key_kind", <size_t>&r.key_kind, sizeof(r.key_kind)),
        ("RowRecord", "cache_slot", <size_t>&r.cache_slot, sizeof(r.cache_slot)),
        ("RowRecord", "batch_index", <size_t>&r.batch_index, sizeof(r.batch_index)),
        ("RowRecord", "progress", <size_t>&r.progress, sizeof(r.progress)),
        ("RowRecord", "word", <size_t>&r.word, sizeof(r.word)),
        ("RowRecord", "last_use_ns", <size_t>&r.last_use_ns, sizeof(r.last_use_ns)),
        ("RowRecord", "progress_waiters", <size_t>&r.progress_waiters, sizeof(r.progress_waiters)),
        ("LinkSide", "open", <size_t>&ls.open, sizeof(ls.open)),
        ("LinkSide", "slot", <size_t>&ls.slot, sizeof(ls.slot)),
        ("LinkSide", "incarnation", <size_t>&ls.incarnation, sizeof(ls.incarnation)),
        ("LinkSide", "cluster_id", <size_t>&ls.cluster_id, sizeof(ls.cluster_id)),
        ("LinkSide", "hazard", <size_t>&ls.hazard, sizeof(ls.hazard)),
        ("LinkSide", "counters", <size_t>&ls.counters, sizeof(ls.counters)),
        ("LinkSide", "leases", <size_t>&ls.leases, sizeof(ls.leases)),
        ("LinkRecord", "state", <size_t>&lr.state, sizeof(lr.state)),
        ("LinkRecord", "word", <size_t>&lr.word, sizeof(lr.word)),
        ("LinkRecord", "sides", <size_t>&lr.sides, sizeof(lr.sides)),
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
