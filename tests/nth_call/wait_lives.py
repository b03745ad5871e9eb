"""Steps of a life that waits for rows of its peer; one of them is there, the others never come."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lives import PEER_ID, SMALL, Life, _expected

import shmkv

ROW = 1
WAIT_MS = 30
THERE = shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], ROW)
MISSING = [shmkv.CacheKey(PEER_ID, 7000 + number, 0) for number in range(3)]


@dataclass
class WaitLife(Life):
    """A wait for what does not come ends by its deadline; whatever fails in it, the row that is there can be pulled."""

    def wait_for_key(self) -> None:
        self._in_vain(lambda: self.dist.kv_cache_manager.wait_for_key(MISSING[0], WAIT_MS))

    def waiting_pull(self) -> None:
        manager = self.dist.kv_cache_manager
        manager.pull_cache(THERE, self.caches["small"], ROW, wait=True, timeout_ms=5000)
        self._compare("small", _expected(SMALL), row=ROW)
        self._in_vain(lambda: manager.pull_cache(MISSING[0], self.caches["small"], 0, wait=True, timeout_ms=WAIT_MS))

    def waiting_pulls(self) -> None:
        """One sleep for all that are not there. On a machine so slow that the deadline comes first, once more with a longer one."""
        requests = [shmkv.PullRequest(THERE, self.caches["small"], ROW)]
        requests += [shmkv.PullRequest(key, self.caches["small"], 0) for key in MISSING]
        pull_many = self.dist.kv_cache_manager.pull_many
        error = self._in_vain(lambda: pull_many(requests, wait=True, timeout_ms=WAIT_MS))
        if error is not None and not error.done_requests:
            self._in_vain(lambda: pull_many(requests, wait=True, timeout_ms=100 * WAIT_MS))
        self._compare("small", _expected(SMALL), row=ROW)

    def pull_layers(self) -> None:
        layers = list(self.dist.kv_cache_manager.pull_layers(THERE, self.caches["small"], ROW, timeout_ms=5000))
        if layers != list(range(SMALL[1] // 2)):
            self.faults.append(f"layers {layers}")
        self._compare("small", _expected(SMALL), row=ROW)

    def _in_vain(self, wait: Callable[[], Any]) -> shmkv.LLMException | None:
        """How it ended: by its deadline, else that is a fault."""
        try:
            wait()
        except shmkv.LLMException as error:
            if error.status_code != shmkv.LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT:
                raise
            return error
        self.faults.append("what never comes came")
        return None
