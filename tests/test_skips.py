"""A skip that skips.txt does not account for fails the run; the list has no line for nothing."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import skips

TESTS = Path(__file__).resolve().parent
DEADLINE_S = 60
SKIPPING = '''
import pytest

@pytest.mark.skipif(True, reason="by a mark")
def test_of_a_mark(): pass

@pytest.mark.parametrize("what", ["this", "that"])
def test_by_itself(what): pytest.skip("by itself")

@pytest.fixture
def needed(): pytest.skip("by a fixture")

def test_of_a_fixture(needed): pass

@pytest.mark.xfail(reason="as expected")
def test_that_fails_as_expected(): assert False

def test_that_runs(): pass
'''


def _run(folder: Path, lines: str, tests: str = SKIPPING) -> tuple[set[str], str]:
    """A run of tests with the hook and a list of their own: the words of its last line, and all that it said."""
    for name in ("conftest.py", "skips.py"):
        (folder / name).write_text((TESTS / name).read_text())
    (folder / "skips.txt").write_text(lines)
    (folder / "test_it.py").write_text(tests)
    paths = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "-o", "timeout=50"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, str(folder)], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=DEADLINE_S, check=False)
    last = done.stdout.splitlines()[-1]
    return set(re.sub(r" in [\d.]+s.*", "", last).split(", ")), done.stdout + done.stderr


def test_an_unlisted_skip_fails_and_says_what_to_do(tmp_path: Path) -> None:
    counts, said = _run(tmp_path, "")
    assert counts == {"2 failed", "1 passed", "1 xfailed", "2 errors"}, said
    assert "test_it.py::test_by_itself[this] was skipped (Skipped: by itself) and is not listed" in said
    assert said.count(skips.TO_DO) >= 4


def test_a_listed_skip_is_one_where_its_probe_fails(tmp_path: Path) -> None:
    lines = "test_it.py::test_of_*  # false\ntest_it.py::test_by_itself  # test $1 = that\n"
    counts, said = _run(tmp_path, lines)
    assert counts == {"3 skipped", "1 failed", "1 passed", "1 xfailed"}, said
    assert "test_by_itself[that] was skipped (Skipped: by itself), but its probe" in said


@pytest.mark.parametrize(("lines", "counts"), [("", {"1 error"}), ("test_it.py  # false\n", {"1 skipped"})])
def test_a_module_that_skips_itself(tmp_path: Path, lines: str, counts: set[str]) -> None:
    found, said = _run(tmp_path, lines, "import pytest\npytest.importorskip('no_such_module')\n")
    assert found == counts, said


def test_every_line_of_the_list_is_of_a_test() -> None:
    tests = []
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS.parent).as_posix()
        tests += [f"{file}::{name}" for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]
    assert [entry.place for entry in skips.entries(skips.LIST) if not any(map(entry.covers, tests))] == []


def test_every_line_of_the_list_counts_for_something() -> None:
    """No line is hidden by one above it."""
    listed = skips.entries(skips.LIST)
    places = [entry.place for entry in listed]
    assert len(set(places)) == len(places)
    hidden = [later.place for n, later in enumerate(listed) if any(earlier.covers(later.place) for earlier in listed[:n])]
    assert hidden == []
