"""The layout as compiled: pinned, complete, explained, and with the words of different writers apart."""
from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from shmkv import _layout

PXD = Path(_layout.__file__).parent / "_layout.pxd"
if not PXD.exists():
    PXD = Path(__file__).resolve().parent.parent / "shmkv" / "_layout.pxd"

FINGERPRINTS = {1: 0x48194055, 2: 0xcac52857}
LINE = 128
PAGE = 4096

STRUCT = re.compile(r"^cdef struct (\w+):\n((?:[ \t]+[^\n]*\n|\n(?=[ \t]))+)", re.MULTILINE)
FIELD = re.compile(r"^    (?P<type>\w+) (?P<name>\w+)(?:\[(?P<count>\w+)\])?\s*(?:#\s*(?P<comment>.*))?$")

# Fields of which each group has its own 128 bytes: what different processes write while others read.
APART = {
    "DirectoryHeader": [{"index_word"}, {"key_event"}, {"key_waiters"}, {"segments_unlinked", "ended_count"}, {"reaped_count"},
                        {"links_reserved", "caches_reserved", "tensors_reserved", "rows_reserved", "coverage_reserved"},
                        {"cluster_id", "role", "state", "memory_waiters"}, {"memory_event"}],
    "RowRecord": [{"key", "key_kind", "cache_slot", "batch_index", "progress"},
                  {"word", "last_use_ns", "progress_waiters", "event", "hits"}],
    "LinkRecord": [{"state"}, {"word"}, {"sides"}],
    "LinkSide": [{"open", "slot", "incarnation", "cluster_id"}, {"hazard"}, {"counters"}, {"leases"}],
}
# Written by several processes and yet beside other words, because it is written once in a cache's or member's life.
COLD = {("CacheRecord", "consumed"), ("LinkSide", "open"), ("MembersHeader", "joins"), ("DirectoryHeader", "links_reserved")}
SEVERAL = ("pullers", "waiters", "owner and waiters", "owner and waiters, pullers",
           "linkers", "both sides", "owner and pullers", "linker, both sides")
WRITERS = ("creator", "owner", "joiner", "linker", "linkers", "initiator", "this side", "both sides", "pullers", "waiters",
           "owner and pullers", "owner and waiters", "owner and waiters, pullers", "linker, both sides")


@dataclass(frozen=True)
class Field:
    type: str
    name: str
    comment: str

    @property
    def is_filler(self) -> bool:
        return self.name.startswith(("pad", "reserved")) and not self.name.endswith("_reserved")

    @property
    def writer(self) -> str:
        return self.comment.partition(";")[0] if ";" in self.comment else ""


def parse(text: str) -> dict[str, list[Field]]:
    """The structs as declared; a comment that goes on over following lines is not needed here."""
    return {name: [Field(found["type"], found["name"], found["comment"] or "")
                   for found in map(FIELD.match, body.splitlines()) if found] for name, body in STRUCT.findall(text)}


STRUCTS = parse(PXD.read_text())


def test_fingerprint_is_pinned() -> None:
    assert FINGERPRINTS.get(_layout.VERSION) == _layout.FINGERPRINT, (
        f"the layout changed: bump VERSION and pin {_layout.FINGERPRINT:#010x} here in the same commit")


def test_structs_are_found() -> None:
    assert {"Header", "MembersHeader", "MemberRecord", "DirectoryHeader", "EndedKey", "CacheRecord", "TensorRecord", "RowRecord",
            "LinkSide", "LinkRecord", "SegmentHeader"} == set(STRUCTS)
    assert sum(len(fields) for fields in STRUCTS.values()) > 90


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_declared_field_is_in_the_fingerprint(struct: str) -> None:
    declared = [field.name for field in STRUCTS[struct] if not field.is_filler and field.type != "Header"]
    assert declared == [name for owner, name, _, _ in _layout.fields() if owner == struct]


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_field_names_its_writer(struct: str) -> None:
    all_below = ""
    silent = []
    for field in STRUCTS[struct]:
        if field.is_filler or field.type in STRUCTS:
            continue
        if field.writer not in WRITERS and not all_below:
            silent.append(f"{struct}.{field.name}: {field.comment!r}")
        all_below = all_below or field.writer * ("so are all below" in field.comment)
    assert silent == []


def test_what_several_processes_write_is_known() -> None:
    several = {(struct, field.name) for struct, fields in STRUCTS.items() for field in fields if field.writer in SEVERAL}
    apart = {(struct, name) for struct, groups in APART.items() for group in groups for name in group}
    assert several <= apart | COLD
    assert ("LinkRecord", "word") in several


@pytest.mark.parametrize("struct", APART)
def test_words_of_different_writers_stand_128_bytes_apart(struct: str) -> None:
    spans = {name: (offset, offset + width) for owner, name, offset, width in _layout.fields() if owner == struct}
    groups = APART[struct]
    assert set().union(*groups) == set(spans)
    for number, group in enumerate(groups):
        for other in groups[number + 1:]:
            near = [(a, b) for a in group for b in other
                    if spans[a][0] // LINE <= (spans[b][1] - 1) // LINE and spans[b][0] // LINE <= (spans[a][1] - 1) // LINE]
            assert near == []


def test_sizes_of_records() -> None:
    sizes = {name: nbytes for name, nbytes, _, _ in _layout.tables()}
    assert sizes["RowRecord"] == 256
    assert sizes["LinkRecord"] == PAGE
    assert sizes["MembersHeader"] == sizes["DirectoryHeader"] == PAGE
    assert (sizes["MemberRecord"], sizes["CacheRecord"], sizes["EndedKey"], sizes["TensorRecord"]) == (128, 128, 64, 64)
    assert sizes["coverage line"] == LINE
    assert _layout.SEGMENT_DATA % PAGE == 0


def test_both_sides_of_a_link_begin_on_a_line() -> None:
    (offset, nbytes), = [(at, width) for struct, name, at, width in _layout.fields() if (struct, name) == ("LinkRecord", "sides")]
    assert offset % LINE == 0
    assert nbytes // 2 % LINE == 0
    assert offset + nbytes <= PAGE


def test_first_bytes_of_a_member_never_change() -> None:
    first = [row[1:] for row in _layout.fields() if row[0] == "MemberRecord"][:3]
    assert first == [("incarnation", 0, 8), ("cluster_id", 8, 8), ("pid", 16, 4)]


def test_tables_of_a_directory_follow_each_other() -> None:
    tables = [(offset, nbytes * count) for name, nbytes, count, offset in _layout.tables() if not name.startswith("Member")]
    ends = [offset + nbytes for offset, nbytes in tables]
    assert all(end <= offset for end, (offset, _) in zip(ends, tables[1:], strict=False))
    assert ends[-1] == _layout.DIRECTORY_SIZE
    assert all(offset % LINE == 0 for offset, _ in tables)


def test_members_table_has_room_for_all_slots() -> None:
    sizes = {name: (nbytes, count, offset) for name, nbytes, count, offset in _layout.tables()}
    nbytes, count, offset = sizes["MemberRecord"]
    assert count == _layout.MEMBERS_LIMIT == 1024
    assert offset + nbytes * count == _layout.MEMBERS_SIZE


def test_no_field_overlaps_the_next_one() -> None:
    for struct in STRUCTS:
        rows = [(offset, width) for owner, _, offset, width in _layout.fields() if owner == struct]
        assert all(offset + width <= after for (offset, width), (after, _) in pairwise(rows)), struct
