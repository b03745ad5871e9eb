"""Every store to shared memory stands beside a crash point, or in tests/shared_stores.txt with the reason why it needs none.

What has an order of its own (release, exchange, compare-and-swap, add) needs a point directly before or after it. Plain stores
need none of their own between two of those: nobody is told of them before the next ordered store.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "shmkv"
EXEMPTIONS = Path(__file__).with_name("shared_stores.txt")
FUNCTION = re.compile(r"^\s*(?:def|cdef|cpdef)\b[^=]*?(?P<name>\w+)\(")
ORDERED = re.compile(r"\b(?:store(?:32|64)_(?!relaxed)\w+|exchange(?:32|64)_\w+|swap(?:32|64)_\w+|add(?:32|64)_\w+)\("
                     r"|\bmadvise\(.*\bMADV_REMOVE\b")       # whole pages of zeros, all at once
RECORDS = "header|cache|row|link|side|member|ended|tensor|entries|words_of_row"
PLAIN = re.compile(rf"^\s*(?:(?:{RECORDS})(?:\.|\[)[\w.\[\]]*\s*[+|&]?=[^=]|(?:memcpy|memset)\((?:{RECORDS})\b)"
                   r"|\b(?:store(?:32|64)_relaxed|store_words|clear_words)\(")
POINT = re.compile(r"\bcrash_point\(|\bpublish_header\(.*, b\"")      # which has one inside


@dataclass(frozen=True)
class Line:
    """A line of a function's code: "ordered" or "plain" store, "point", or "" for anything else."""

    function: str
    text: str
    kind: str


def code_lines(text: str) -> Iterator[tuple[str, str]]:
    """(function, line) without docstrings, comments and blank lines."""
    function = ""
    for line in re.sub(r'"""[\s\S]*?"""', "", text).splitlines():
        bare = re.sub(r"\s+#.*$|^#.*$", "", line)
        found = FUNCTION.match(bare)
        if found and not bare.startswith("        "):
            function = found["name"]
        if bare.strip():
            yield function, bare


def lines_of(text: str) -> list[Line]:
    def kind(line: str) -> str:
        if POINT.search(line):
            return "point"
        return "ordered" if ORDERED.search(line) else "plain" if PLAIN.search(line) else ""

    return [Line(function, line.strip(), kind(line)) for function, line in code_lines(text)]


def bare_stores(text: str) -> list[Line]:
    """The ordered stores without a point, and the plain ones that neither a point nor an ordered store follows or precedes."""
    lines = [line for line in lines_of(text) if line.kind]
    found = []
    for place, line in enumerate(lines):
        if line.kind == "point":
            continue
        around = []
        for step in (-1, 1):
            at = place + step
            while 0 <= at < len(lines) and lines[at].function == line.function and lines[at].kind == "plain":
                at += step
            if 0 <= at < len(lines) and lines[at].function == line.function:
                around.append(lines[at].kind)
        if "point" not in around and (line.kind == "ordered" or not around):
            found.append(line)
    return found


@dataclass(frozen=True)
class Exemption:
    place: str
    part: str
    reason: str

    def covers(self, file: str, line: Line) -> bool:
        return self.place in (file, f"{file}:{line.function}") and self.part in line.text


def exemptions() -> list[Exemption]:
    found = []
    for line in EXEMPTIONS.read_text().splitlines():
        if line and not line.startswith("#"):
            place, part, reason = (piece.strip() for piece in line.split("|"))
            found.append(Exemption(place, part, reason))
    return found


def sources() -> list[Path]:
    """With the inline functions of the .pxd files."""
    return sorted(path for path in PACKAGE.iterdir() if path.suffix in (".pyx", ".pxd"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_each_shared_store_has_a_crash_point_or_a_reason(path: Path) -> None:
    missing = [f"{line.function}: {line.text}" for line in bare_stores(path.read_text())
               if not any(exemption.covers(path.name, line) for exemption in exemptions())]
    assert missing == []


def test_no_exemption_is_out_of_date() -> None:
    bare = [(path.name, line) for path in sources() for line in bare_stores(path.read_text())]
    unused = [exemption.place for exemption in exemptions() if not any(exemption.covers(*each) for each in bare)]
    assert unused == []
    assert all(exemption.reason for exemption in exemptions())


@pytest.mark.parametrize(("text", "missing"), [
    ("cdef f():\n    store32_release(&a.b, 1)\n", ["store32_release(&a.b, 1)"]),
    ("cdef f():\n    crash_point(b'x')\n    store32_release(&a.b, 1)\n", []),
    ("cdef f():\n    crash_point(b'x')\n    header.a = 1\n    store32_release(&a.b, 1)\n    crash_point(b'y')\n", []),
    ("cdef f():\n    crash_point(b'x')\n    store32_release(&a.b, 1)\n    swap64_seq(&a.c, 1, 2)\n", ["swap64_seq(&a.c, 1, 2)"]),
    ("cdef f():\n    row.key_kind = 1\n", ["row.key_kind = 1"]),
    ("cdef f():\n    row.key_kind = 1\n    store32_release(&a, 1)\n    crash_point(b'x')\n", []),
    ("cdef f():\n    crash_point(b'x')\n\n\ncdef g():\n    exchange64_seq(&a, 1)\n", ["exchange64_seq(&a, 1)"]),
    ("cdef f():\n    madvise(p, n, MADV_REMOVE)\n", ["madvise(p, n, MADV_REMOVE)"]),
    ("cdef f():\n    crash_point(b'x')\n    madvise(p, n, MADV_REMOVE)\n", []),
    ("cdef f():\n    if row.a == 1 and load32_acquire(&b):\n        return 0\n", []),
])
def test_the_rule_finds_what_it_should(text: str, missing: list[str]) -> None:
    assert [line.text for line in bare_stores(text)] == missing
