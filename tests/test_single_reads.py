"""What another process can change is read once: by a function of `_futex.pxd` into a local, and nowhere by a plain load.

A plain load of a shared field could be made again by the compiler, after the check of the first value. So no expression may name a
field through a pointer into shared memory unless it takes the address, for one of the functions that load and store.
"""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmkv import _layout

PACKAGE = Path(__file__).resolve().parent.parent / "shmkv"
SOURCES = sorted(path for path in PACKAGE.iterdir() if path.suffix in (".pyx", ".pxd"))
# LinkRecord.sides is an array of records: naming it is address arithmetic.
RECORDS = sorted({struct for struct, _, _, _ in _layout.fields()})
PLACES = "link_at|member_at|ended_at|cache_at|tensor_at|row_at|directory_header"
# Pointers to private copies: (file, name of the variable).
PRIVATE = {
    ("_lookup.pyx", "copy"), ("_inspect.pyx", "copy"), ("_mapping.pyx", "made"), ("_attached.pyx", "copy"),
    ("_peer_memory.pyx", "copy"),
    ("_lookup.pyx", "cache"), ("_coverage.pyx", "cache"), ("_coverage.pxd", "cache"), ("_core.pyx", "cache"), ("_layout.pyx", ""),
    ("_lend.pyx", "t"), ("_lend.pyx", "one"), ("_lend.pyx", "other"), ("_peer_memory.pyx", "copy"),
}
# Fields that lead into shared memory from a private struct.
POINTERS = {"record": "LinkRecord", "mine": "LinkSide", "row": "RowRecord", "cache": "CacheRecord"}
# The words of the index, and the rings and coverage words, are reached by pointers to numbers.
ARRAYS = "entries|words_of_row|counters|old"
RAW = {
    ("_members.pyx", "memcpy(words, region.address + at, 16)"),         # each of its two words is used once
    ("_view.pyx", "memcpy(tensor.data, view.region.address + view.offset, view.nbytes)"),       # bytes of a cache, not a record
}


def code_of(path: Path) -> str:
    """A source without docstrings, strings of messages and comments."""
    text = re.sub(r'"""[\s\S]*?"""', '""', path.read_text())
    return re.sub(r"#[^\n]*", "", text)


def shared_variables(path: Path, code: str) -> set[str]:
    """Names of variables and parameters that point to a record, but for those that point to a private one."""
    pattern = rf"(?:const )?(?:{'|'.join(RECORDS)})\*\s*(\w+)"
    return {name for name in re.findall(pattern, code) if (path.name, name) not in PRIVATE}


def plain_uses(path: Path) -> list[str]:
    """Places that load or store a shared field without the functions for it."""
    code = code_of(path)
    names = shared_variables(path, code)
    starts = [rf"(?:{PLACES})\([^\n]*?\)"] + [rf"\b{name}" for name in sorted(names)]
    starts += [rf"\b(?:found|link)\.{name}" for name in POINTERS]
    field = rf"(?<![\w.&])(?P<start>{'|'.join(starts)})(?:\.sides\[\w+\])?\.(?!sides\b|segment_path)\w+"
    found = []
    for line in code.splitlines():
        for use in re.finditer(field, line):
            before = line[:use.start()]
            if not before.rstrip().endswith("&") and not re.search(r"&\(?<\w+\*\??>$", before) and not is_array(line, use.end()):
                found.append(f"{path.name}: {line.strip()}")
        for use in re.finditer(rf"(?<![\w.&])(?:{ARRAYS})\[", line):
            if not line[:use.start()].endswith("&"):
                found.append(f"{path.name}: {line.strip()}")
    return found


def is_array(line: str, end: int) -> bool:
    """Is it the key words, leases or counters of a record as a whole, which is their address?"""
    return re.search(r"\b(?:key|leases|counters)$", line[:end]) is not None and not line[end:].startswith("[")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_shared_field_is_named_but_by_its_address(path: Path) -> None:
    if path.name.startswith("_layout"):
        assert "struct CacheRecord" in path.read_text() or "any_c" in path.read_text(), "declares and measures, reads nothing"
        return
    assert plain_uses(path) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_record_is_copied_by_memcpy(path: Path) -> None:
    """memcpy, memset and memcmp are for private memory; whole records go by load_words and store_words."""
    calls = re.findall(r"mem(?:cpy|set|cmp)\([^\n]*\)", code_of(path))
    shared = rf"\b(?:{PLACES}|unlinked_at|coverage_at)\(|region\.address|\b(?:row|side|link|member|ended|header|cache|shared)\."
    assert [call for call in calls if re.search(shared, call) and (path.name, call) not in RAW] == []


def test_the_check_sees_what_it_is_for(tmp_path: Path) -> None:
    source = tmp_path / "_x.pyx"
    lines = ["cdef void f(RowRecord* row, const LinkSide* side):", "a = row.cache_slot", "b = load64_seq(&row.word)",
             "c = side.slot", "load_words(words, row.key, 32)", "d = row.key[0]", "e = cache_at(base, 1).cache_id",
             "f = found.row.key_kind", "g = entries[i]", "h = load64_relaxed(&entries[i])"]
    source.write_text("\n    ".join(lines))
    assert [line.split(": ")[1][0] for line in plain_uses(source)] == list("acdefg")
