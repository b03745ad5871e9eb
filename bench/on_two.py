"""A second decoder process that copies on two threads, where the process of the run has one; and its ways as contenders."""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import contenders as ways
from measure import Contender
from programs import Process

HELPER_ID = 3


@dataclass(frozen=True)
class Helper:
    """That process, and how many threads it had before its first pull."""

    process: Process
    threads_at_start: int

    def contenders(self, command: str, **target: object) -> list[Contender]:
        """The pull and the bare copy on two threads, each right behind another one, as all others are measured in a process that is
        awake; and the first pull after that process has slept. None if no thread is made. `command` gives it the target."""
        self.process.call(command, **target)
        self.process.call("run", way="pull", number=1)
        if self.process.call("threads") <= self.threads_at_start:
            return []
        check = partial(self.process.call, "check")
        return [Contender(ways.OURS_TWO, partial(self._run, "pull", 1), check, threads=2),
                Contender(ways.OURS_TWO_WOKEN, partial(self._run, "pull", 0), check, threads=2),
                Contender(ways.BARE_TWO, partial(self._run, "bare on two", 1), check, threads=2)]

    def _run(self, way: str, first: int, number: int) -> int:
        return int(self.process.call("run", way=way, number=number, first=first))
