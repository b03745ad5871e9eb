"""Each test is in one of the pieces that `make test` runs two at a time, and whatever a piece came to is told."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import memory
import pytest
import shares

INTERRUPTED = """
import shares, signal, sys
signal.signal(signal.SIGTERM, shares.interrupt)
code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(100)"
shares.run([[sys.executable, "-c", code, sys.argv[1]]] * 3)
"""


def test_each_test_is_in_one_piece() -> None:
    *pieces, last = shares.commands(["-q"])
    given = [path for piece in pieces for path in piece if path.startswith(str(shares.TESTS))]
    assert all(any(Path(folder).rglob("test_*.py")) for folder in given)
    assert len(set(given)) == len(given)
    assert set(last) - set(pieces[0]) == {f"--ignore={folder}" for folder in given} | {str(shares.TESTS)}


def ends_with(status: int, says: str = "") -> list[str]:
    return [sys.executable, "-c", f"import sys; print({says!r}); sys.exit({status})"]


@pytest.mark.parametrize(("statuses", "answer"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((0, 5), 0), ((5, 5), 5), ((5, 2), 2)])
def test_one_that_fails_is_enough(statuses: tuple[int, int], answer: int) -> None:
    assert shares.run([ends_with(status) for status in statuses]) == answer


def test_both_are_heard(capfd: pytest.CaptureFixture[str]) -> None:
    assert shares.run([ends_with(0, "one"), ends_with(3, "other")]) == 3
    assert sorted(capfd.readouterr().out.split()) == ["one", "other"]


def test_none_is_left_when_it_is_interrupted(tmp_path: Path) -> None:
    """SIGTERM, as a watchdog sends it to the program alone."""
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], cwd=shares.TESTS, stderr=subprocess.DEVNULL) as run:
        memory.wait_until(lambda: len(list(tmp_path.iterdir())) == shares.AT_ONCE, "all have begun that run at the same time")
        run.terminate()
        assert run.wait(20) != 0
    assert not any(Path(f"/proc/{inner.name}").exists() for inner in tmp_path.iterdir())
