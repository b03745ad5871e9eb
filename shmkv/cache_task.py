"""CacheTask: the future of a transfer that runs on a thread of its own."""
from __future__ import annotations

import threading
from collections.abc import Sequence

from shmkv.checks import check_uint32
from shmkv.errors import LLMStatusCode


class CacheTask:
    """Results of one asynchronous transfer, one entry a config: a status, or None for a config that another one's failure left
    unfinished. `timeout_status` is what a wait that is too short answers; the task goes on then."""

    def __init__(self, num_configs: int, timeout_status: LLMStatusCode) -> None:
        self._num_configs = num_configs
        self._timeout_status = timeout_status
        self._done = threading.Event()
        self._results: list[LLMStatusCode | None] = []

    def _finish(self, results: Sequence[LLMStatusCode | None]) -> None:
        """For the thread that runs the transfer: its results, once."""
        self._results = list(results)
        self._done.set()

    def _wait(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is None:
            return self._done.wait()
        return self._done.wait(check_uint32("timeout_in_millis", timeout_in_millis) / 1000)

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait up to `timeout_in_millis` ms (None: for ever): the first result that is neither success nor None, else success."""
        if not self._wait(timeout_in_millis):
            return self._timeout_status
        failed = (result for result in self._results if result not in (None, LLMStatusCode.LLM_SUCCESS))
        return next((result for result in failed if result is not None), LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait likewise: one result a config, in order; while it runs, the timeout status for each."""
        if not self._wait(timeout_in_millis):
            return [self._timeout_status] * self._num_configs
        return list(self._results)
