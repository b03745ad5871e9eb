"""Crash points: an ordinary build has none, a test build dies or stops where and when it was told."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import builds
import pytest

from shmkv import _crash

DEADLINE_S = 60
REACH = """
from shmkv import _crash
for number in range(3):
    _crash.reach("here")
    print(number, flush=True)
"""


def test_an_ordinary_build_passes_every_point() -> None:
    assert not _crash.is_built()
    _crash.arm("here")
    _crash.reach("here")
    _crash.arm("")


@pytest.mark.parametrize("point", ["here:0", "here:-1", "here:x", "h" * 64])
def test_what_is_no_point_is_refused(point: str) -> None:
    with pytest.raises(ValueError, match="a crash point is written"):
        _crash.arm(point)


@pytest.fixture(scope="module")
def crash_build() -> Path:
    return builds.build("crash")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("point", "printed"), [("here", ""), ("here:1", ""), ("here:3", "0\n1\n"), ("there", "0\n1\n2\n")])
def test_the_process_dies_when_it_comes_by_for_the_nth_time(crash_build: Path, point: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", REACH], cwd=crash_build, capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, **builds.environment("crash", crash_build), "SHMKV_CRASH_AT": point})
    assert (done.stdout, done.stderr) == (printed, "")
    assert done.returncode == (0 if point == "there" else -signal.SIGKILL)


@pytest.mark.timeout(600)
def test_told_to_stop_it_goes_on_when_it_is_continued(crash_build: Path) -> None:
    variables = {"SHMKV_CRASH_AT": "here:2", "SHMKV_CRASH_HOW": "stop"}
    with subprocess.Popen([sys.executable, "-c", REACH], cwd=crash_build, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **builds.environment("crash", crash_build), **variables}) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        try:
            assert os.WIFSTOPPED(status)
            process.send_signal(signal.SIGCONT)
            printed, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (printed, process.returncode) == ("0\n1\n2\n", 0)
