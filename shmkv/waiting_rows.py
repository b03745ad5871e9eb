"""Several pulls that wait under one deadline, on one thread that sleeps for all of them at once."""
from __future__ import annotations

import time
from collections.abc import Sequence

from shmkv import _link, _wait
from shmkv.errors import LLMException
from shmkv.transfer import PullArguments
from shmkv.waiting import Waiting, Waits


class WaitingRows:
    """Each pull goes on when there is something for it, whatever its place; the first that fails ends all."""

    def __init__(self, waits: Waits, timeout_ms: int) -> None:
        self._waits = waits
        self._timeout_ms = timeout_ms
        self._deadline_ns = time.monotonic_ns() + timeout_ms * 1_000_000
        self._open: dict[int, Waiting] = {}         # by place
        self._done: list[int] = []
        self._place = 0                             # of the one that is looked at

    def run(self, pulls: Sequence[PullArguments]) -> None:
        """Carry them out. All destinations are checked before the first byte. The exception of the one that fails has its place in
        `failed_request`, and the places of those that were done in `done_requests`."""
        try:
            for place, (key, dst, desc, select, consumes) in enumerate(pulls):
                self._place = place
                self._open[place] = self._waits.for_row(key, dst, desc, select, consumes, self._timeout_ms)
            self._look(at_all=True)
            while self._open:
                self._look(at_all=not self._sleep())
        except LLMException as error:
            error.failed_request = self._place
            error.done_requests = tuple(self._done)
            raise
        finally:
            for waiting in self._open.values():
                waiting.wait.count_out()
                waiting.close()

    def _look(self, at_all: bool) -> None:
        """A turn for each that has something to look at, or for all."""
        for place, waiting in list(self._open.items()):
            self._place = place
            if (at_all or waiting.wait.has_news) and waiting.step(_wait.ARM_NS) == 0:
                del self._open[place]
                self._done.append(place)

    def _sleep(self) -> bool:
        """Until there is something to look at: does each tell what has?"""
        status, do_tell = self._waits.sleep(list(self._open.values()), self._deadline_ns)
        if status == _link.TIMEOUT:
            self._place, waiting = next(iter(self._open.items()))
            raise self._waits.failure(status, waiting)
        return do_tell
