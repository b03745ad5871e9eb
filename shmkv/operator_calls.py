"""What whoever runs the processes asks of a manager: keys that nobody fetches, what there is, peers that are lost."""
from __future__ import annotations

from collections.abc import Callable

from shmkv.checks import check_uint32, wrong_type
from shmkv.manager_base import ManagerBase


class OperatorCalls(ManagerBase):
    """The part of a manager that is beside llm_datadist's interface and moves no bytes."""

    def expire(self, older_than_ms: int) -> int:
        """Remove every key of this cluster, request or prefix, that was bound and last published at least `older_than_ms` ago (0:
        all of them), as `remove_cache_key` would: how many. A pull in progress answers as for a removed key, and memory goes when
        nobody reads it any more. Time is CLOCK_MONOTONIC: setting the clock makes no key older.

        Raises:
            TypeError, LLMParamError: `older_than_ms` is no int from 0 to 2**32 - 1.
        """
        self._cluster.check_usable()
        check_uint32("older_than_ms", older_than_ms)
        with self._cluster.lock:
            return self._cluster.caches.expire(older_than_ms)

    def stats(self) -> dict[str, int]:
        """What this cluster has now, and what expired since init.

        `caches` and `cache_bytes`: caches with memory, deallocated ones that a key or a reader keeps among them; `recycle_bytes`:
        freed memory that is kept for the next caches; `keys`: rows with a living key; `keys_expired_by_ttl`,
        `keys_expired_by_call`: keys that went by their `key_ttl_ms` and by `expire`; `prefix_hits`: pulls and views of rows with a
        prefix key; `prefix_evictions`: caches that went because of `set_prefix_capacity`; `control_bytes`: shared memory of the
        records of caches, rows, keys and of links that others made, which grows with them and goes at finalize.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_FAILED in a forked child.
        """
        self._cluster.check_usable()
        with self._cluster.lock:
            return {**self._cluster.caches.stats(), "control_bytes": self._cluster.control_nbytes()}

    def on_link_lost(self, callback: Callable[[int, str], object] | None) -> None:
        """Call `callback(remote_cluster_id, reason)` when a link is lost, whichever side made it; in place of the callback before,
        None for none. `reason` is "died", "finalized", "unlinked" (by the peer) or "broken" (its memory was written over).

        It runs on a thread of its own, which exists while there is a callback or a descriptor; what it raises is logged. Each
        lost link is told once; what this process unlinks itself is not, nor a peer that is only stopped (SIGSTOP).

        Raises:
            TypeError: neither None nor something that can be called.
            LLMException: LLM_FAILED when the process has no descriptor left for the thread.
        """
        self._cluster.check_usable()
        if callback is not None and not callable(callback):
            raise wrong_type("callback", callback, type(None))
        self._watch.set_callback(callback)

    def link_lost_fd(self) -> int:
        """A descriptor for select, poll, epoll or asyncio: readable while `lost_links` has something to tell. It belongs to the
        manager, which closes it at finalize; read it by `lost_links` only. The same one each time.

        Raises:
            LLMException: LLM_FAILED when the process has none left.
        """
        self._cluster.check_usable()
        return self._watch.descriptor()

    def lost_links(self) -> list[tuple[int, str]]:
        """(remote cluster id, reason as for `on_link_lost`) of each link lost since the last call; collected from the first
        `link_lost_fd` on.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_FAILED in a forked child.
        """
        self._cluster.check_usable()
        return self._watch.lost()
