"""Which lines and branches of the copy kernel, the lock and the directory the tests reach: make coverage.

The sources are built once more so that gcov counts in them, and the tests run in that build with `SHMKV_COPY_THREADS=1` (those
of the crew choose their own number): in this process, in those that they start or fork, in helper threads and signal handlers. What
is killed from outside loses its counts. Printed are the lines that nothing came by; exit 1 if `unreached.txt` does not explain one.
The conditions that went one way only are written to `build/instrumented/branches.txt`.

`python tests/reached.py FILE ...` runs these tests alone; with `--go-on` first, the counts of the runs before it are kept.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import builds
import line_counts
import shares
from fuzz import run as fuzz_run

from shmkv import _copy

TESTS = Path(__file__).resolve().parent
EXPLAINED = TESTS / "unreached.txt"
BRANCHES = builds.BUILDS / "branches.txt"
# Every .pyx stands here once: those that are looked at by what they do, then the others with the reason.
LOOKED_AT = {
    "moves bytes of caches": (
        "_copy", "_crew", "_carry", "_within", "_peer_memory", "_plan", "_kept_plans", "_blocks", "_core", "_pull", "_lend",
        "_push", "_push_key", "_flow", "_local"),
    "waits for words and ends waits": ("_futex", "_mutex", "_cold", "_life", "_link", "_events", "_wait", "_wait_any", "_await"),
    "reads or writes records of a directory, of links or of members": (
        "_directory", "_cache_records", "_index", "_tables", "_ranges", "_rings", "_lookup", "_coverage", "_lease", "_drop",
        "_addresses", "_link_record", "_link_handle", "_acceptor", "_members"),
    "maps shared memory and checks its headers": ("_mapping", "_attached"),
}
NOT_LOOKED_AT = {
    "_crash": "only a test build has it",
    "_layout": "declares the shared bytes and lists them for `shmkv info`; its loops run at import",
    "_inspect": "copies records for `shmkv ls` to show, with no lock, no hazard and no store; tests/cli and the fuzzer have it",
    "_imported": "asks a caller's object where its memory is, by Python's protocols; copies no byte and knows no shared memory",
    "_view": "shows memory to whoever asks, by Python's protocols: what the branches ask about are Python's objects",
}
STEMS = tuple(stem for stems in LOOKED_AT.values() for stem in stems)
KERNELS = "_kernels.h"
GO_ON = "--go-on"
ERRORS = "gcov-errors"
KIND, FLIPS = "coverage", "coverage-flips"  # the second with a word changed after each load: test_fuzz.py
RACING = "racing.py"
WANTED = ("test_core.py", "test_copy.py", "test_crew.py", "test_plan.py", "test_pull_calls.py", "test_futex.py",
          "test_thread_queue.py", "test_link_record.py", "test_lookup.py", "test_directory.py", "test_index.py", "test_tables.py",
          "test_mapping.py", "test_scribbled.py", "test_caches.py", "test_link_handle.py", "test_changes_during_pull.py",
          "contract", "processes/test_prepared_pull.py", "processes/test_steady_state.py", "processes/test_publish.py",
          "processes/test_link_end.py", "cases/test_hostile.py", "cases/test_links.py", "cases/test_lock_words.py",
          "cases/test_interrupts.py", "cases/test_forks.py", "cases/test_imports.py", "cases/test_waits.py", "test_acceptor.py",
          "test_handlers_in_waits.py", "test_kernels.py", "crash/test_truncated.py", "crash/test_lost_life.py",
          "crash/test_moments.py", "crash/test_cancelled.py", "test_fuzz.py::test_no_input_gets_outside_or_hangs",
          "test_fuzz.py::test_a_word_that_never_agrees_is_damage", "nth_call", "test_block_lists.py", "test_lease.py",
          "test_lend.py", "test_flow.py", "test_push_core.py", "test_heads.py", "crash/test_pushes.py", "cases/test_formats.py",
          "cases/test_keys_asked_for.py", "processes/test_blocks.py", "processes/test_blocks_during_a_pull.py",
          "processes/test_prefix_cache.py", "processes/test_views.py", "processes/test_view_ends.py",
          "processes/test_view_refusals.py", "processes/test_view_lives.py", "processes/test_forks_of_caches.py",
          "processes/test_push.py", "processes/test_push_ends.py", "processes/test_waiting.py", "processes/test_waits_that_fail.py",
          "processes/test_waiting_for_memory.py", "processes/test_streaming.py", "processes/test_async.py", "test_peer_memory.py",
          "test_peer_access.py", "crash/test_peer_memory.py", "processes/test_registered.py", "processes/test_registered_life.py",
          "processes/test_waiting_pulls_of_many.py", "processes/test_drain.py",
          "test_cold.py", "test_mutex.py", "test_life.py", "test_members.py",
          "test_membership.py", "test_membership_losses.py", "test_ranges.py", "test_push_key.py",
          "test_wait_any.py", "test_drop.py", RACING)
# Of what the extensions call: in a counting build they call what gcov needs, too.
GCOV_CALLS_MORE = "tests/nth_call/test_nth_call.py::test_every_call_of_the_extensions_is_made_to_fail_or_cannot"
SECOND_SHARE = ("nth_call", "crash", "cases", "test_fuzz")
PYTHONS_OWN = ("def ", "cpdef ", "cdef class ", "class ", "@", "#")
RACES = (("lock", 20_000), ("coverage", 20))
RACE_DEADLINE_S = 600
# A process that ends by _exit would take its counts with it. Counts that cannot be written (no descriptor left, no room) are lost.
STARTED = '''
import os

end_at_once = os._exit


def write_counts_and_end(status):
    import ctypes
    import sys
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith({builds!r}) and path.endswith(".so"):
            ctypes.CDLL(path).shmkv_dump_counts()
    end_at_once(status)


os._exit = write_counts_and_end
'''


@dataclass(frozen=True)
class Place:
    """A line of a source."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def environment(folder: Path, where: Path) -> dict[str, str]:
    """Of every process here: the counting build in the place of any other."""
    (where / "sitecustomize.py").write_text(STARTED.format(builds=str(folder)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(where), str(folder), str(TESTS)]), "SHMKV_COPY_THREADS": "1",
            "SHMKV_BUILD_INSTEAD": KIND, "GCOV_ERROR_FILE": str(where / ERRORS)}


def run_tests(folder: Path, env: dict[str, str], tests: tuple[str, ...]) -> int:
    """In two processes: gcov locks a file of counts while it adds to it."""
    pytest = [*shares.PYTEST, "-q", "-p", "no:cacheprovider", "--timeout=600", "--rootdir", str(builds.ROOT),
              "-c", str(builds.ROOT / "pyproject.toml"), "--deselect", GCOV_CALLS_MORE]
    second = [test for test in tests if test.startswith(SECOND_SHARE)]
    both = [share for share in ([test for test in tests if test not in second], second) if share]
    return shares.run([[*pytest, *(str(TESTS / test) for test in share)] for share in both], folder, env)


def run_races(folder: Path, env: dict[str, str]) -> int:
    """Threads that meet at the lock word and at coverage; test_thread_sanitizer.py runs the same under a sanitizer."""
    status = 0
    for scenario, rounds in RACES:
        prefix = fuzz_run.namespace()
        try:
            status |= subprocess.run([sys.executable, str(TESTS / "racing.py"), scenario, str(rounds), prefix], cwd=folder, env=env,
                                     stdout=subprocess.DEVNULL, timeout=RACE_DEADLINE_S).returncode
        finally:
            fuzz_run.clean(prefix)
    return status


def run_kernels(where: Path, found: line_counts.Lines) -> None:
    """The C loops at every length and alignment, in a program without Python; and on a processor that has no more than any."""
    for name, macros in (("kernels", []), ("kernels-of-any", ["-D__builtin_cpu_supports(name)=0"])):
        folder = where / name
        folder.mkdir()
        subprocess.run(["cc", "-std=c11", "-O0", "-g", "--coverage", *macros, f"-I{builds.ROOT / 'shmkv'}",
                        str(TESTS / "c" / "kernels_test.c"), "-o", "program"], cwd=folder, check=True, timeout=RACE_DEADLINE_S)
        subprocess.run(["./program"], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=RACE_DEADLINE_S)
        for notes in folder.glob("*.gcno"):
            line_counts.read_program(notes, KERNELS, found)


def files(found: line_counts.Lines) -> Iterator[str]:
    """The names of the files that are looked at: sources, what they declare for others, and the C loops."""
    for name in sorted(found):
        if name == KERNELS or Path(name).stem in STEMS:
            yield name


def places(folder: Path, name: str) -> list[Place]:
    """All lines of a file, by their number."""
    text = (folder / "shmkv" / name).read_text().splitlines()
    return [Place(name, number, line.strip()) for number, line in enumerate(["", *text])]


def unreached(folder: Path, found: line_counts.Lines) -> list[Place]:
    return [place for name in files(found) for place, line in zip_lines(folder, name, found) if line.count == 0]


@dataclass(frozen=True)
class Condition:
    """One of a line's conditions, and how often each way out of it was taken: with two, the one into the body comes first."""

    line: Place
    place: int
    ways: tuple[int, ...]

    def __str__(self) -> str:
        never = [way for way, taken in enumerate(self.ways) if taken == 0]
        said = f"ways {never} of {len(self.ways)} never" if len(self.ways) != 2 else f"never {'false' if never == [1] else 'true'}"
        return f"{self.line}  # condition {self.place + 1}: {said}"


def conditions(folder: Path, found: line_counts.Lines) -> list[Condition]:
    """All of lines that were reached; but not how Python passes arguments and makes modules."""
    return [Condition(place, number, tuple(ways)) for name in files(found) for place, line in zip_lines(folder, name, found)
            if line.count and not place.text.startswith(PYTHONS_OWN) for number, ways in sorted(line.branches.items())]


def zip_lines(folder: Path, name: str, found: line_counts.Lines) -> list[tuple[Place, line_counts.Line]]:
    text = places(folder, name)
    return [(text[number], line) for number, line in sorted(found[name].items())]


def explained() -> dict[tuple[str, str], str]:
    """(file, text of the line) -> why no test comes by."""
    found = {}
    for line in EXPLAINED.read_text().splitlines():
        if line and not line.startswith("#"):
            place, _, why = line.rpartition(" | ")          # the text of a line may have one, too
            file, _, text = place.partition(" | ")
            found[file, text] = why
    return found


def beyond_processor(folder: Path) -> set[Place]:
    """Lines of the loops for instructions that this processor does not have."""
    found, family = set(), ""
    for place, text in zip(places(folder, KERNELS), ["", *(folder / "shmkv" / KERNELS).read_text().splitlines()], strict=True):
        if begins := re.match(r"SHMKV_(AVX\w+) ", text):
            family = begins[1].lower()
        if family and family not in _copy.supported_kernels():
            found.add(place)
        if text == "}":
            family = ""
    return found


def report(folder: Path, found: line_counts.Lines) -> bool:
    """Print it; is every line that this processor can run reached or explained?"""
    beyond, reasons = beyond_processor(folder), explained()
    missing = [each for each in unreached(folder, found) if each not in beyond]
    for each in missing:
        print(f"{each}  # {reasons.get((each.file, each.text), 'NOT EXPLAINED')}")
    if beyond:
        print(f"{KERNELS}: {len(beyond)} lines are for another processor")
    for name in files(found):
        lines = found[name].values()
        print(f"{name:<20} {sum(line.count > 0 for line in lines):>4} of {len(lines):>4} lines")
    for file, text in sorted(set(reasons) - {(each.file, each.text) for each in missing}):
        print(f"{file}: {text}  # was reached this time")
    asked = conditions(folder, found)
    one_way = [each for each in asked if 0 in each.ways]
    BRANCHES.write_text("".join(f"{each}\n" for each in one_way))
    every = [line for name in files(found) for line in found[name].values()]
    print(f"{sum(line.count > 0 for line in every)} of {len(every)} lines reached")
    ways = [way for each in asked for way in each.ways]
    print(f"{sum(way > 0 for way in ways)} of {len(ways)} branches in them taken")
    print(f"{len(one_way)} of {len(asked)} conditions went one way only: {BRANCHES}")
    return all((each.file, each.text) in reasons for each in missing)


def check_rooms() -> None:
    """Is every .pyx either looked at or left out for a reason?"""
    rooms = sorted(path.stem for path in (builds.ROOT / "shmkv").glob("*.pyx"))
    named = sorted([*STEMS, *NOT_LOOKED_AT])
    assert rooms == named, f"reached.py does not say once what it does with {sorted(set(rooms) ^ set(named)) or named}"


def main(tests: tuple[str, ...], *, goes_on: bool) -> int:
    check_rooms()
    folder = builds.build(KIND)
    for counts in () if goes_on else builds.BUILDS.glob(f"{KIND}*/build/**/*.gcda"):
        counts.unlink()
    where = builds.FIRST
    shutil.rmtree(where, ignore_errors=True)
    # Some tests have processes of other users, whose counts count as well.
    os.umask(0)
    where.mkdir()
    (where / ERRORS).touch()
    env = environment(folder, where)
    with_pytest = tuple(test for test in tests if test != RACING)
    status = run_tests(folder, env, with_pytest) if with_pytest else 0
    status |= run_races(folder, env) if RACING in tests else 0
    found = line_counts.read(folder)
    if (builds.BUILDS / FLIPS).exists():
        line_counts.read(builds.BUILDS / FLIPS, found, without="_futex.pxd")
    run_kernels(where, found)
    return int(not report(folder, found) or status != 0)


if __name__ == "__main__":
    goes_on = GO_ON in sys.argv[1:]
    sys.exit(main(tuple(test for test in sys.argv[1:] if test != GO_ON) or WANTED, goes_on=goes_on))
