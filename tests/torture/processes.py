"""Start, stop, kill and reap one process of a run."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torture.arguments import Plan
from torture.board import Board
from torture.zygote import BOARD, FAULTS, PLAN

TESTS = Path(__file__).resolve().parent.parent
COPY_THREADS = 2
RECYCLE_NBYTES = 64 << 20
ANSWER_S = 20.0


def environment(plan: Plan, board: Board, faults: Path) -> dict[str, str]:
    """Of every process of the run. The library is the one that this process would import."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SHMKV_NAMESPACE": plan.namespace, PLAN: plan.as_json(),
            "SHMKV_RECYCLE_BYTES": str(RECYCLE_NBYTES), "SHMKV_COPY_THREADS": str(COPY_THREADS), "OPENBLAS_NUM_THREADS": "1",
            BOARD: str(board.fd), FAULTS: str(faults)}


class Starter:
    """Starts processes apart, and holds the one that forks."""

    def __init__(self, plan: Plan, board: Board, workdir: Path) -> None:
        self._environment = environment(plan, board, workdir / "faults")
        self._board_fd = board.fd
        self.complaints = workdir / "stderr"
        self._stderr = self.complaints.open("ab")
        self._zygote = self._popen([], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _popen(self, arguments: list[str], stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "torture.zygote", *arguments], env=self._environment, stdin=stdin,
                                stdout=stdout, stderr=self._stderr, pass_fds=[self._board_fd])

    @property
    def pid(self) -> int:
        """Of the process that forks."""
        return self._zygote.pid

    def start(self, number: int, *, apart: bool) -> Life:
        if apart:
            process = self._popen([str(number)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            return Life(number, process.pid, self, process)
        return Life(number, self.ask(f"fork {number}"), self, None)

    def ask(self, line: str) -> int:
        """What the process that forks answers to a line."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(line.encode() + b"\n")
        self._zygote.stdin.flush()
        return int(self._zygote.stdout.readline())

    def close(self) -> None:
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._zygote.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        self._stderr.close()


class Life:
    """One process. Its pid stays its own until `reap`, since a child that nobody waited for keeps it."""

    def __init__(self, number: int, pid: int, starter: Starter, process: subprocess.Popen[bytes] | None) -> None:
        self.number = number
        self.pid = pid
        self._starter = starter
        self._process = process
        self.began_ns = time.monotonic_ns()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_dead(self) -> bool:
        """Has the kernel finished with it? Its locks are gone then, too."""
        return "Z" in Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def reap(self) -> int:
        """The status of a dead one, as waitpid gives it."""
        if self._process is None:
            return self._starter.ask(f"reap {self.pid}")
        status = self._process.wait()
        return -status if status < 0 else status << 8

    def set_cores(self, cores: set[int]) -> None:
        set_cores(self.pid, cores)


def set_cores(pid: int, cores: set[int]) -> None:
    """For all threads of a process; one that has just ended is no error."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)
    except (ProcessLookupError, FileNotFoundError):
        return
