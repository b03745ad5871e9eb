"""What time it is for a worker, and for how much of it the worker could not run: it was stopped, or waited for a processor.

The machine's share of a recovery is told from the library's by that. Waits for a processor are counted by the kernel, of the main
thread alone; stops by the referee.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from time import monotonic_ns

from torture.board import Board

DIGITS = 128


@dataclass(frozen=True)
class Moment:
    """`stalled_ns`: since the process began."""

    ns: int
    stalled_ns: int


class Clock:
    """A worker's own, or, with a pid, another's as the referee reads it."""

    def __init__(self, board: Board, number: int, pid: int | None = None) -> None:
        self._board, self._number = board, number
        self._fd = os.open(f"/proc/{pid or 'self'}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def now(self) -> Moment:
        now = monotonic_ns()
        _, waited_ns, _ = os.pread(self._fd, DIGITS, 0).split()
        return Moment(now, int(waited_ns) + self._board.stopped_ns(self._number, now))

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def lasted(begin: Moment, other_begin: Moment, end: Moment) -> tuple[int, int]:
    """From the later of two beginnings to an end: how long, and for how much of it the worker could run."""
    ns = end.ns - max(begin.ns, other_begin.ns)
    stalled_ns = end.stalled_ns - max(begin.stalled_ns, other_begin.stalled_ns)
    return ns, max(0, ns - stalled_ns)
