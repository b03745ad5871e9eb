"""Each test is in one of the two shares that `make test` runs at once, and whatever a share came to is told."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import shares

INTERRUPTED = """
import shares, signal, sys
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
shares.run([[sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)"]] * 2)
"""


def test_each_test_is_in_one_share() -> None:
    first, second = shares.commands(["-q"])
    given = set(map(str, (shares.TESTS / name for name in shares.FIRST_SHARE)))
    assert all(any(Path(folder).rglob("test_*.py")) for folder in given)
    assert set(first) - set(second) == given
    assert set(second) - set(first) == {f"--ignore={folder}" for folder in given} | {str(shares.TESTS)}


def ends_with(status: int, says: str = "") -> list[str]:
    return [sys.executable, "-c", f"import sys; print({says!r}); sys.exit({status})"]


@pytest.mark.parametrize(("statuses", "answer"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((0, 5), 0), ((5, 5), 5), ((5, 2), 2)])
def test_one_that_fails_is_enough(statuses: tuple[int, int], answer: int) -> None:
    assert shares.run([ends_with(status) for status in statuses]) == answer


def test_both_are_heard(capfd: pytest.CaptureFixture[str]) -> None:
    assert shares.run([ends_with(0, "one"), ends_with(3, "other")]) == 3
    assert capfd.readouterr().out.split() == ["one", "other"]


def test_none_is_left_when_it_is_interrupted(tmp_path: Path) -> None:
    """SIGTERM, as a watchdog sends it to the program alone."""
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=shares.TESTS, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        inner = int(run.stdout.readline())
        run.terminate()
        assert run.wait(20) != 0
    assert not Path(f"/proc/{inner}").exists()
