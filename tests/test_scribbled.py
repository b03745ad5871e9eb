"""A peer of the same user may write over everything in a directory that it maps: its owner neither crashes nor hangs.

Each case runs in a process of its own, since what it looks for would end this one.
"""
from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import run

PROGRAM = """
import faulthandler, sys
sys.path.insert(0, sys.argv[1])
import memory
from memory import Owner, request

faulthandler.dump_traceback_later(20, exit=True)
owner = Owner()
slot, generation, cache_id = owner.insert(2, 2)
owner.directory.bind(slot, 0, request(1))

def scribble(table, index, struct, name, value):
    memory.word(owner.region, table, index, struct, name).value = value

def entries(value):
    memory.content(owner.region, memory.TABLES["index entry"][1], 2048).view("u8")[:] = value

exec(sys.argv[2])
for call in (lambda: owner.directory.find(request(1)), lambda: owner.directory.settle(slot),
             lambda: owner.directory.bind(slot, 1, request(2)), lambda: owner.directory.unbind(slot, 0),
             lambda: owner.directory.publish(slot, 1, 1), lambda: owner.insert(1, 300),
             lambda: (owner.directory.retire(slot), owner.directory.release(slot)), lambda: owner.insert(1, 1)):
    try:
        call()
    except (ValueError, MemoryError, OSError, RuntimeError) as error:
        print(type(error).__name__, error)
print("survived")
"""

CACHE = 'scribble("CacheRecord", slot, "CacheRecord", "{}", {})'
DIRECTORY = 'scribble("DirectoryHeader", 0, "DirectoryHeader", "{}", {})'
ROW = 'scribble("RowRecord", 0, "RowRecord", "{}", {})'
TOP = 2**32 - 1

CASES = [
    CACHE.format("first_row", 2**31), CACHE.format("num_rows", TOP), CACHE.format("first_coverage", TOP),
    CACHE.format("coverage_lines", TOP), CACHE.format("first_tensor", TOP), CACHE.format("num_tensors", TOP),
    CACHE.format("cache_id", 77), CACHE.format("word", 0),
    DIRECTORY.format("index_word", 1 << 16 | 60), DIRECTORY.format("index_word", 0),
    DIRECTORY.format("caches_reserved", TOP), DIRECTORY.format("rows_reserved", 0), DIRECTORY.format("links_reserved", TOP),
    DIRECTORY.format("ended_count", 2**64 - 1), DIRECTORY.format("segments_unlinked", 2**64 - 1),
    ROW.format("cache_slot", TOP), ROW.format("batch_index", TOP), ROW.format("word", 2**64 - 1), ROW.format("key_kind", 9),
    "entries(1 << 40 | 5)", "entries(1)", "entries(1 << 40 | 0xF0000000)", "entries(1 << 32 | 0xF0000000)", "entries(0)",
]


@pytest.mark.parametrize("scribble", CASES, ids=lambda code: re.sub(r"\W+", "-", code.partition(", \"")[2] or code).strip("-"))
def test_owner_survives_a_scribbled_directory(scribble: str) -> None:
    said = run(PROGRAM, Path(__file__).parent, scribble)
    assert said.endswith("survived\n")
