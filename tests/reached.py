"""Which lines of the copy kernel, the lock and the directory the tests reach: make coverage.

The sources are built once more with line tracing (`SHMKV_COVERAGE=1`), the tests run in it with `SHMKV_COPY_THREADS=1`, in this
process and in those that they start, and the lines that none of them came by are printed. Exit 1 if there are any that
`unreached.txt` does not explain. The C loops, which no line tracing can follow, are run whole by `tests/c/kernels_test.c`.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import builds
from coverage import CoverageData
from coverage.exceptions import DataError

TESTS = Path(__file__).resolve().parent
EXPLAINED = TESTS / "unreached.txt"
FILES = ("_copy", "_plan", "_core", "_pull", "_futex", "_link", "_link_handle", "_link_record", "_acceptor", "_attached", "_lookup",
         "_directory", "_index", "_tables", "_rings")
WANTED = ("test_core.py", "test_copy.py", "test_plan.py", "test_pull_calls.py", "test_futex.py", "test_thread_queue.py",
          "test_link_record.py", "test_lookup.py", "test_directory.py", "test_index.py", "test_tables.py", "test_mapping.py",
          "test_scribbled.py", "test_caches.py", "test_link_handle.py", "test_changes_during_pull.py", "contract",
          "processes/test_prepared_pull.py", "processes/test_steady_state.py", "processes/test_publish.py",
          "processes/test_link_end.py", "cases/test_hostile.py", "cases/test_links.py", "cases/test_lock_words.py",
          "crash/test_truncated.py")
UNTRACEABLE = "test_exception_of_a_signal_handler_comes_out"         # tracing swallows the exception
SETTINGS = """
[run]
plugins = Cython.Coverage
source = {source}
data_file = {data}
parallel = true
concurrency = thread
"""
# What a process does that was started by a test.
STARTED = "import coverage\ncoverage.process_startup()\n"


@dataclass(frozen=True)
class Unreached:
    """A line that no test came by."""

    file: str
    line: int
    text: str


def run_tests(folder: Path, where: Path, tests: tuple[str, ...]) -> int:
    """Run the tests in the traced build; each process leaves its data in `where`."""
    settings = where / "settings"
    settings.write_text(SETTINGS.format(source=folder / "shmkv", data=where / "data"))
    (where / "sitecustomize.py").write_text(STARTED)
    env = {**os.environ, **builds.environment("coverage", folder), "COVERAGE_PROCESS_START": str(settings),
           "SHMKV_COPY_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(where), env["PYTHONPATH"]])
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", "--rootdir", str(builds.ROOT),
              "-c", str(builds.ROOT / "pyproject.toml"), "-k", f"not {UNTRACEABLE}"]
    done = subprocess.run([*pytest, *(str(TESTS / test) for test in tests)], cwd=folder, env=env)
    combine(where)
    report = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(where / "found.json"), "--rcfile", str(settings)]
    subprocess.run(report, cwd=folder, check=True)
    return done.returncode


def combine(where: Path) -> None:
    """One file of data out of those of all processes. (`coverage combine` refuses what a process left that was ended early.)"""
    lines: dict[str, set[int]] = {}
    for path in where.glob("data.*"):
        found = CoverageData(str(path))
        try:
            found.read()
        except DataError:
            continue                    # of a process that was killed while it wrote
        for file in found.measured_files():
            if file.endswith(".pyx"):
                lines.setdefault(file, set()).update(found.lines(file) or ())
    whole = CoverageData(str(where / "data"))
    whole.add_lines(lines)
    whole.add_file_tracers(dict.fromkeys(lines, "Cython.Coverage.Plugin"))
    whole.write()


def unreached(folder: Path, found: dict[str, object]) -> list[Unreached]:
    """From the report of `coverage json`."""
    lines = []
    for name, report in found["files"].items():     # type: ignore[attr-defined]
        path = folder / name
        if path.suffix == ".pyx" and path.stem in FILES:
            text = path.read_text().splitlines()
            lines += [Unreached(path.name, number, text[number - 1].strip()) for number in report["missing_lines"]]
    return lines


def explained() -> dict[tuple[str, str], str]:
    """(file, text of the line) -> why no test comes by."""
    found = {}
    for line in EXPLAINED.read_text().splitlines():
        if line and not line.startswith("#"):
            place, _, why = line.rpartition(" | ")          # the text of a line may have one, too
            file, _, text = place.partition(" | ")
            found[file, text] = why
    return found


def main(tests: tuple[str, ...]) -> int:
    folder = builds.build("coverage")
    where = builds.BUILDS / "reached"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    status = run_tests(folder, where, tests or WANTED)
    found = json.loads((where / "found.json").read_text())
    missing, reasons = unreached(folder, found), explained()
    for each in missing:
        print(f"{each.file}:{each.line}: {each.text}  # {reasons.get((each.file, each.text), 'NOT EXPLAINED')}")
    for file, report in sorted(found["files"].items()):
        if re.search(rf"/({'|'.join(FILES)})\.pyx$", file):
            total = report["summary"]
            print(f"{file:<32} {total['covered_lines']} of {total['num_statements']} lines")
    surplus = set(reasons) - {(each.file, each.text) for each in missing}
    for file, text in sorted(surplus):
        print(f"{file}: {text}  # was reached this time")
    return int(status != 0 or any((each.file, each.text) not in reasons for each in missing))


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
