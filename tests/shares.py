"""The tests in two processes of pytest at once, which take half as long as one: what `make test` runs.

`python tests/shares.py [arguments of pytest]`. One share has the folders of FIRST_SHARE, in which about half of the minutes are,
and prints as it goes on; the other one has everything else, and what it prints comes when both have ended.
"""
from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent
FIRST_SHARE = ("crash", "nth_call", "cases")
PYTEST = (sys.executable, "-m", "pytest")
NOTHING_TO_RUN = 5                  # of pytest: no test of this share was wanted
END_S = 60.0                        # for a share that is told to end


def commands(arguments: Sequence[str]) -> list[list[str]]:
    """Of both shares: each test is in one of them."""
    first = [str(TESTS / name) for name in FIRST_SHARE]
    return [[*PYTEST, *arguments, *first], [*PYTEST, *arguments, *(f"--ignore={path}" for path in first), str(TESTS)]]


def run(programs: Sequence[Sequence[str]], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """Run all at the same time. 0 if each ended well: with 0, or without anything to do as long as another one had something."""
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in programs[1:]]
        with started(programs, [None, *outputs], cwd, env) as processes:
            statuses = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
    wanted = [status for status in statuses if status != NOTHING_TO_RUN]
    return max(wanted, key=abs) if wanted else NOTHING_TO_RUN


@contextmanager
def started(programs: Sequence[Sequence[str]], outputs: Sequence[IO[bytes] | None], cwd: Path | None,
            env: Mapping[str, str] | None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """None of them is left, however this ends."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for program, output in zip(programs, outputs, strict=True):
            processes.append(subprocess.Popen(program, cwd=cwd, env=env, stdout=output,
                                              stderr=subprocess.STDOUT if output else None))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait(END_S)


def interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(f"signal {number}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(run(commands(sys.argv[1:])))
