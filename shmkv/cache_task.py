"""CacheTask: what a caller holds of a transfer that runs on a thread of its own."""
from __future__ import annotations

from shmkv.checks import ApiObject, check_uint32
from shmkv.errors import LLMStatusCode
from shmkv.push import PushTask


class CacheTask(ApiObject):
    """The results of one `transfer_cache_async`, one for each config: a status, or None for a config that another one's failure
    left unfinished. Calls are safe from any thread, as often as wanted; dropping a task does not end it."""

    def __init__(self, task: PushTask) -> None:
        self._task = task

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait up to `timeout_in_millis` ms (uint32; None: for ever) for the end: the first result that is neither success nor
        None, else success. LLM_WAIT_PROCESS_TIMEOUT if it still runs then; it goes on.

        Raises:
            TypeError, LLMParamError: the timeout.
        """
        results = self._wait(timeout_in_millis)
        if results is None:
            return self._task.timeout_status
        return next((result for result in results if result), LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait up to `timeout_in_millis` ms (uint32; None: for ever) for the end: one result for each config, in order. If it still
        runs then, LLM_WAIT_PROCESS_TIMEOUT for each of them.

        Raises:
            TypeError, LLMParamError: the timeout.
        """
        results = self._wait(timeout_in_millis)
        return [self._task.timeout_status] * self._task.number if results is None else results

    def _wait(self, timeout_in_millis: int | None) -> list[LLMStatusCode | None] | None:
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
        return self._task.results(timeout_in_millis)
