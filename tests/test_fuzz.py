"""Tables and headers from an enemy, a short run of it: `make fuzz` is the long one. Scaled by SHMKV_ROUNDS.

Under AddressSanitizer and UndefinedBehaviorSanitizer, with pages that fault around whatever is mapped.
"""
from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import builds
import pytest
from fuzz import flips, mutants, run

SEED = 1
ENDS_BY_FAULT = "Segmentation fault", "AddressSanitizer", "runtime error", "were written by", "took over"
OUTSIDE = """
import ctypes, sys
from fuzz import guards
region = guards.memory(5000)
region.clear(0, 5000)
at = region.base + int(sys.argv[1])
print("inside", flush=True)
print("read", ctypes.c_ubyte.from_address(at).value)
"""

# A key whose row is another one each time that somebody looks; or the index, in which a key is not found.
NEVER_TWICE = """
import ctypes, sys
from fuzz import flips
flips.prepare()
import memory
from shmkv import _lookup
owner = memory.Owner()
slot, _, _ = owner.insert()
owner.directory.bind(slot, 0, memory.request(1))
word = memory.word(owner.region, sys.argv[1], 0, sys.argv[1], sys.argv[2])
with flips.always(ctypes.addressof(word), 8):
    assert owner.directory.why_ended(memory.request(int(sys.argv[3]))) == _lookup.DAMAGED
print(flips.count())
"""

# A wait for a key of an owner whose count of ended keys is another one at each look.
ENDS_WITHOUT_END = """
import ctypes, struct
from fuzz import flips
flips.prepare()
import memory
from shmkv import _await, _wait
pair = memory.Pair("none")
wait = _await.KeyWait(pair.handle, struct.pack("=6Q", 1, *memory.request(1), 0), 20_000)
count = memory.word(pair.owner.region, "DirectoryHeader", 0, "DirectoryHeader", "ended_count")
assert wait.run(_wait.LOOK_NS, True) == _wait.NOT_YET
with flips.always(ctypes.addressof(count), 8):
    assert wait.run(_wait.LOOK_NS, True) == _wait.NOT_YET
print(flips.count())
pair.close()
"""

pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]


def counted(outcome: run.Outcome) -> dict[str, Any]:
    """The counts of a run without any fault."""
    assert not outcome.fault, outcome.fault
    assert outcome.counts is not None
    return outcome.counts


@pytest.mark.parametrize(("offset", "reached"), [(0, True), (8191, True), (-1, False), (8192, False)])
def test_memory_of_the_fuzzer_ends_at_pages_that_fault(offset: int, reached: bool) -> None:
    folder = builds.build("address")
    done = subprocess.run([sys.executable, "-c", OUTSIDE, str(offset)], cwd=folder, env=run.environment(folder), text=True,
                          capture_output=True, timeout=60)
    assert done.stdout.startswith("inside")
    assert ("read 0" in done.stdout, done.returncode == 0) == (reached, reached)


def test_no_input_gets_outside_or_hangs(rounds: Callable[[int], int]) -> None:
    wanted = rounds(50_000)
    counts = counted(run.run(SEED, 0, wanted))
    assert counts["inputs"] == wanted
    assert counts["good_headers"] >= 0.3 * wanted, "pass magic, version, fingerprint and lengths"
    assert counts["copies"] >= 0.05 * wanted, "reach a copy"
    assert counts["guarded"] >= 0.9 * counts["mapped"] > 0, "a read beyond a segment faults"
    assert counts["owner_inputs"] >= 0.1 * wanted
    assert counts["pushes"] >= 0.02 * wanted, "the link that pushes is put back as all else is"
    assert counts["waits"] >= 0.1 * wanted


def test_a_word_that_changes_after_each_load_changes_nothing(rounds: Callable[[int], int]) -> None:
    wanted = rounds(6400)
    counts = counted(run.run(SEED, 0, wanted, flipping=True))
    assert counts["inputs"] == wanted
    assert counts["flips"] > 100 * wanted
    assert counts["copies"] >= 0.05 * wanted


@pytest.mark.parametrize(("table", "field", "key", "looks"), [("RowRecord", "word", 1, 1000),
                                                            ("DirectoryHeader", "index_word", 2, 16)])
def test_a_word_that_never_agrees_is_damage(table: str, field: str, key: int, looks: int) -> None:
    folder = flips.build()
    done = subprocess.run([sys.executable, "-c", NEVER_TWICE, table, field, str(key)], cwd=folder, env=run.environment(folder),
                          text=True, capture_output=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout) >= 2 * looks, "so often it looked"


def test_a_count_of_ended_keys_that_never_agrees_holds_nobody() -> None:
    folder = flips.build()
    done = subprocess.run([sys.executable, "-c", ENDS_WITHOUT_END], cwd=folder, env=run.environment(folder), text=True,
                          capture_output=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout) >= 1000, "so often it looked"


def test_a_peer_that_rewrites_tables_during_pulls(rounds: Callable[[int], int]) -> None:
    counts = counted(run.live(SEED, rounds(5)))
    assert counts["flips"] > 10_000, "the other process wrote all the time"
    assert counts["copies"] > 100
    assert counts["owner_inputs"] > 100


@pytest.mark.parametrize("name", ["tensor-beyond-segment", "block-beyond-cache"])
def test_an_unchecked_number_is_found_and_its_input_made_again(name: str) -> None:
    folder = builds.build_edited("address", f"unchecked-{name}", mutants.UNCHECKED[name])
    found = run.run(SEED, 0, 50_000, folder=folder)
    assert any(sign in found.fault for sign in ENDS_BY_FAULT)
    number = int(found.fault.split()[1])
    again = run.run(SEED, number, number + 1, folder=folder)
    assert again.fault.splitlines()[0] == found.fault.splitlines()[0]


@pytest.mark.parametrize(("name", "edits"), [("slot-of-side", mutants.READ_TWICE), ("looks-at-row", mutants.ENDLESS)],
                         ids=["read-twice", "endless"])
def test_flips_find_a_second_read_and_an_endless_look(name: str, edits: dict[str, list[builds.Edit]]) -> None:
    folder = builds.build_edited("address", f"flips-{name}", [*flips.edits(), *edits[name]], start=flips.build())
    found = run.run(SEED, 0, 12_800, flipping=True, folder=folder)
    assert any(sign in found.fault for sign in ENDS_BY_FAULT)
