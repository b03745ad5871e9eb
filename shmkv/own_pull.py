"""Pulls out of the own cluster: no link, no hazard; the source is counted in while it is read."""
from __future__ import annotations

from dataclasses import dataclass

from shmkv import _flow, _lookup, _plan, _pull
from shmkv._blocks import BlockLists
from shmkv._local import LocalCache
from shmkv._wait import Ending
from shmkv.caches import OwnCaches
from shmkv.cluster import Cluster
from shmkv.keys import BlocksCacheKey, CacheKey
from shmkv.own_cache import OwnCache
from shmkv.pull_failure import PullKey, Select, SourceKey


@dataclass(frozen=True)
class Limit:
    """The wait that a pull of a row is a part of, which ends it when it is cancelled; its deadline (CLOCK_MONOTONIC)."""

    ending: Ending
    deadline_ns: int


def pull_own(cluster: Cluster, key: SourceKey, dst: LocalCache, select: Select, consumes: bool, lists: BlockLists | None,
             limit: Limit | None = None) -> int:
    """The pull that `transfer.pull` describes: 0 or the number that a pull over a link would give. It takes no longer than
    sync_kv_timeout, or, with `limit`, as that says."""
    status = int(_pull.check(dst, select, lists=lists))
    if status:
        return status
    if isinstance(key, BlocksCacheKey):
        assert lists is not None
        return _pull_blocks(cluster, key, dst, select, lists)
    return _pull_row(cluster, key, dst, select, consumes, lists, limit)


def _pull_row(cluster: Cluster, key: PullKey, dst: LocalCache, select: Select, consumes: bool, lists: BlockLists | None,
              limit: Limit | None) -> int:
    with cluster.lock:
        found = find_own(cluster.caches, key)
        if isinstance(found, int):
            return found
        source, row, word = found
        if _is_refused(source, dst, select):
            return int(_plan.FORMAT)
        if not cluster.caches.sources.is_published(source, row, select[5], select[6]):
            return int(_lookup.UNPUBLISHED)
        source.local.count_in()
    try:
        status = _copy(cluster, source, dst, (*select[:3], row, *select[4:]), lists, limit)
        if status == 0:
            with cluster.lock:
                status = cluster.caches.sources.finish(source, row, word, by_key=isinstance(key, CacheKey), consumes=consumes,
                                                       first=select[5], count=select[6])
    finally:
        source.local.leave()
    return status


def _pull_blocks(cluster: Cluster, key: BlocksCacheKey, dst: LocalCache, select: Select, lists: BlockLists) -> int:
    """As a reader over a link does: each block published, and still the same after the copy."""
    blocks = lists.looked
    with cluster.lock:
        source = cluster.caches.sources.by_blocks_key(key.model_id)
        if source is None:
            return int(_lookup.NEVER)
        if _is_refused(source, dst, select):
            return int(_plan.FORMAT)
        if max(blocks) >= source.desc.batch_size:
            return int(_plan.SRC_BLOCK)
        if not all(cluster.caches.sources.is_published(source, block, select[5], select[6]) for block in blocks):
            return int(_lookup.UNPUBLISHED)
        words = cluster.caches.sources.row_words(source, blocks)
        source.local.count_in()
    try:
        status = _copy(cluster, source, dst, select, lists)
        if status == 0:
            with cluster.lock:
                status = 0 if cluster.caches.sources.are_same_rows(source, blocks, words) else int(_lookup.REMOVED)
    finally:
        source.local.leave()
    return status


def _is_refused(source: OwnCache, dst: LocalCache, select: Select) -> bool:
    """Were both given a kv_tensor_format, not the same, and is that not to be?"""
    return len(select) > 10 and bool(select[-1]) and 0 not in (source.local.format, dst.format) \
        and source.local.format != dst.format


def _copy(cluster: Cluster, source: OwnCache, dst: LocalCache, select: Select, lists: BlockLists | None,
          limit: Limit | None = None) -> int:
    if limit is not None:
        assert lists is None
        return int(_flow.copy_within(limit.ending, source.local, dst, select, limit.deadline_ns))
    return int(_pull.copy(source.local, dst, select, cluster.settings.sync_kv_timeout_ms, lists=lists))


def find_own(caches: OwnCaches, key: PullKey) -> tuple[OwnCache, int, int] | int:
    """(cache, row, the row's word) that a key names, or why there is none. Under the owner's lock."""
    if isinstance(key, CacheKey):
        return caches.sources.by_key(key.words)
    return caches.sources.by_id(key.cache_id, key.batch_index)
