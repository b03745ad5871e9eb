"""The tests in two processes of pytest at once, which take half as long as one: what `make test` runs.

`python tests/shares.py [arguments of pytest]`. The tests are dealt in pieces, the long ones first: whichever of the two is
through with one takes the next. What a piece prints comes when it has ended.
"""
from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PIECES = (("crash",), ("contract",), ("processes",), ("cases",), ("nth_call",), ("torture", "integrations", "cli"))
PYTEST = (sys.executable, "-m", "pytest")
AT_ONCE = 2
NOTHING_TO_RUN = 5                  # of pytest: no test of this piece was wanted
END_S = 60.0                        # for a piece that is told to end


def commands(arguments: Sequence[str]) -> list[list[str]]:
    """Of all pieces, and at last of what is in none of them: each test is in one."""
    pieces = [[str(TESTS / name) for name in piece] for piece in PIECES]
    others = [f"--ignore={path}" for piece in pieces for path in piece]
    return [[*PYTEST, *arguments, *piece] for piece in pieces] + [[*PYTEST, *arguments, *others, str(TESTS)]]


class Runner:
    """Runs programs, AT_ONCE of them at the same time."""

    def __init__(self, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._cwd, self._env = cwd, env
        self._lock = threading.Lock()           # of what follows, and of the output
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_over = False

    def run(self, programs: Sequence[Sequence[str]]) -> list[int]:
        """How each ended. None is left, however this ends."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            try:
                return list(threads.map(self._run_one, programs))
            finally:
                self._end()

    def _run_one(self, program: Sequence[str]) -> int:
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._is_over:
                    return -signal.SIGTERM
                process = subprocess.Popen(program, cwd=self._cwd, env=self._env, stdout=output, stderr=subprocess.STDOUT)
                self._running.append(process)
            status = process.wait()
            with self._lock:
                self._running.remove(process)
                output.seek(0)
                shutil.copyfileobj(output, sys.stdout.buffer)
                sys.stdout.flush()
        return status

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            left = list(self._running)
        for process in left:
            process.terminate()
        for process in left:
            process.wait(END_S)


def run(programs: Sequence[Sequence[str]], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """0 if each ended well: with 0, or without anything to do as long as another one had something."""
    wanted = [status for status in Runner(cwd, env).run(programs) if status != NOTHING_TO_RUN]
    return max(wanted, key=abs) if wanted else NOTHING_TO_RUN


def interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(f"signal {number}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(run(commands(sys.argv[1:])))
