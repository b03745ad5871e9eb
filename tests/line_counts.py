"""What gcov counted, told by the lines of the .pyx, .pxd and .h files.

gcov knows the C that Cython made. Before what belongs to a line of Cython stands a comment that names it; what a `cdef extern`
block holds stands in the C as it was written; a header is itself. A line counts as reached when the first C line of one of its
pieces was run, and a branch as taken when one of its copies was.
"""
from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARKER = re.compile(r'^\s*/\* "(?:.*/)?([^/"]+\.p(?:yx|xd))":(\d+)$')
CONDITION = re.compile(r"^(?:\} else )?(?:if|for|while|switch) \(|[^?]\?[^?]|^return .*(?:==|!=|<|>|&&|\|\|)")
# What generated code asks about Python's objects and errors: no branch of ours.
PYTHONS_OWN = re.compile(r"__PYX_ERR|goto __pyx_L\d+_error|\bPy[A-Z_]|__Pyx_|PyErr|CYTHON_|__pyx_t_\d+ < 0\)\)")
GCOV_DEADLINE_S = 120


@dataclass
class Line:
    """How often a line was run, and its branches: place among the line's conditions -> how often each way was taken."""

    count: int = 0
    branches: dict[int, list[int]] = field(default_factory=dict)

    def add(self, count: int, branches: dict[int, list[int]]) -> None:
        self.count += count
        for place, taken in branches.items():
            have = self.branches.setdefault(place, [0] * len(taken))
            self.branches[place] = [a + b for a, b in zip(have, taken, strict=False)]


@dataclass(frozen=True)
class CLine:
    """A line that gcov knows: how often, and how often each way out of it."""

    count: int
    ways: tuple[int, ...]


Lines = dict[str, dict[int, Line]]


def read(folder: Path, found: Lines | None = None, *, without: str = "") -> Lines:
    """All lines of a build's sources, by file name and number, added to those that were found before. `without`: of a file that is
    another one in this build."""
    before: Lines = {} if found is None else found
    found = {}
    for notes in sorted(folder.glob("build/temp.*/shmkv/*.gcno")):
        for name, lines in _gcov(notes, folder).items():
            if name == f"shmkv/{notes.stem}.c":
                _add_cython(found, folder / name, lines)
                _add_written_c(found, folder, folder / name, lines)
            elif name.startswith("shmkv/"):
                _add_header(found, folder / name, lines)
    found.pop(without, None)
    for file, numbers in found.items():
        for number, line in numbers.items():
            before.setdefault(file, {}).setdefault(number, Line()).add(line.count, line.branches)
    return before


def read_program(notes: Path, header: str, found: Lines) -> None:
    """The lines of a header in a C program of its own."""
    for name, lines in _gcov(notes, notes.parent).items():
        if Path(name).name == header:
            _add_header(found, Path(name), lines)


def _gcov(notes: Path, folder: Path) -> dict[str, dict[int, CLine]]:
    """What gcov has for each file of an object; a header's functions can be there once a copy."""
    done = subprocess.run(["gcov", "--json-format", "--branch-probabilities", "--stdout", str(notes)], cwd=folder, check=True,
                          capture_output=True, timeout=GCOV_DEADLINE_S)
    files: dict[str, dict[int, CLine]] = {}
    for each in json.loads(done.stdout)["files"]:
        into = files.setdefault(each["file"], {})
        for line in each["lines"]:
            into[line["line_number"]] = _sum(into.get(line["line_number"]), line)
    return files


def _sum(before: CLine | None, line: dict[str, Any]) -> CLine:
    ways = tuple(int(way["count"]) for way in line["branches"])
    if before is None:
        return CLine(line["count"], ways)
    if len(before.ways) == len(ways):
        ways = tuple(a + b for a, b in zip(before.ways, ways, strict=True))
    return CLine(before.count + line["count"], ways)


def _branches(lines: dict[int, CLine], numbers: list[int], text: list[str]) -> dict[int, list[int]]:
    """The ways out of each condition among these C lines, in their order."""
    asked = [lines[number].ways for number in numbers if _asks(text[number - 1]) and lines[number].ways]
    return {place: list(ways) for place, ways in enumerate(asked)}


def _asks(text: str) -> bool:
    """Is this C line a condition of the source?"""
    return CONDITION.search(text.strip()) is not None and PYTHONS_OWN.search(text) is None


def _add_cython(found: Lines, path: Path, lines: dict[int, CLine]) -> None:
    text = path.read_text().splitlines()
    for file, number, begin, end in _pieces(text):
        known = [at for at in range(begin, end) if at in lines]
        if known:
            line = found.setdefault(file, {}).setdefault(number, Line())
            line.add(lines[known[0]].count, _branches(lines, known, text))


def _pieces(text: list[str]) -> Iterator[tuple[str, int, int, int]]:
    """(file, line, first C line, C line behind the last) of each piece; a piece ends with its function at the latest."""
    place: tuple[str, int] | None = None
    begin = 0
    for number, line in enumerate(text, 1):
        marked = MARKER.match(line)
        if place and (marked or line.startswith("}")):
            yield (*place, begin, number)
            place = None
        if marked:
            place, begin = (marked[1], int(marked[2])), number + 1


def _add_written_c(found: Lines, folder: Path, path: Path, lines: dict[int, CLine]) -> None:
    """The C that stands in `cdef extern` blocks, of this file or of those that it imports."""
    text = path.read_text().splitlines()
    places: dict[str, list[int]] = {}
    for number, line in enumerate(text, 1):
        places.setdefault(line.strip(), []).append(number)
    for source in (folder / "shmkv").glob("*.p[yx][xd]"):
        for first, block in _blocks(source):
            at = _find(block, text, places)
            for offset in range(len(block)) if at else ():
                if at + offset in lines:
                    known = found.setdefault(source.name, {}).setdefault(first + offset, Line())
                    known.add(lines[at + offset].count, _branches(lines, [at + offset], text))


def _blocks(source: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, stripped lines) of the C of each block."""
    for block in re.finditer(r'^cdef extern from \*.*:\n    """\n(.*?)\n    """', source.read_text(), re.MULTILINE | re.DOTALL):
        first = source.read_text()[:block.start(1)].count("\n") + 1
        yield first, [line.strip() for line in block[1].split("\n")]


def _find(block: list[str], text: list[str], places: dict[str, list[int]]) -> int:
    """Where a block stands in the C, 0 if it does not."""
    for at in places.get(block[0], ()):
        if [line.strip() for line in text[at - 1:at - 1 + len(block)]] == block:
            return at
    return 0


def _add_header(found: Lines, path: Path, lines: dict[int, CLine]) -> None:
    text = path.read_text().splitlines()
    for number, line in lines.items():
        found.setdefault(path.name, {}).setdefault(number, Line()).add(line.count, _branches(lines, [number], text))
