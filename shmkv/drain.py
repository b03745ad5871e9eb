"""Waiting for what others still want of a cluster before it ends."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shmkv import _link_record
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMStatusCode
from shmkv.keys import CacheKey, KeyWords
from shmkv.link import Links

# Readers consume keys and clear hazards without a wake, so that a pull costs its owner nothing: there is no event to wait for.
POLL_S = 0.005
SHOWN = 8

log = logging.getLogger("shmkv")


def drain(cluster: Cluster, links: Links, is_pulling: Callable[[], bool], drain_ms: int) -> list[CacheKey]:
    """Refuse new calls of this process and wait until all request keys that can be fetched were, and no pull runs in any of this
    cluster's caches, or out of it; `drain_ms` at most. `is_pulling()`: has a pull of this process begun that sleeps now, between
    two looks or pieces? Returns the request keys that nobody has fetched."""
    deadline = time.monotonic() + drain_ms / 1000
    cluster.refuse_new_calls()
    links.refuse_new_pulls()
    waited_for: list[tuple[KeyWords, bool]] = []
    try:
        while True:
            with cluster.lock:
                waited_for = cluster.caches.waited_for()
            is_busy = _is_pulled(cluster, links) or is_pulling()
            if not is_busy and not any(published for _, published in waited_for):
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    except LLMException as error:
        if error.status_code != LLMStatusCode.LLM_ENGINE_FINALIZED:     # by another thread, which did not want to wait
            raise
    return _left(cluster, [words for words, _ in waited_for])


def _is_pulled(cluster: Cluster, links: Links) -> bool:
    """Does a pull run now, of a living process out of our caches, or of this one?"""
    if links.are_used() or any(cache.local.uses for cache in cluster.caches):
        return True
    region, namespace = cluster.directory.region, cluster.namespace
    return any(_link_record.initiator_lives(region, slot, namespace.life_fd, namespace.table)
               for slot in _link_record.busy(region))


def _left(cluster: Cluster, left: list[KeyWords]) -> list[CacheKey]:
    keys = [CacheKey(cluster.cluster_id, req_id, model_id) for _, req_id, _, model_id in left]
    if keys:
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        log.warning("cluster %d ends with %d request keys that nobody fetched: %s%s", cluster.cluster_id, len(keys),
                    ", ".join(f"req_id {key.req_id} (model_id {key.model_id})" for key in keys[:SHOWN]), more)
    return keys
