"""Waits for rows of the own cluster: no link, no lease; the words are those that other processes wait on."""
from __future__ import annotations

import time

from shmkv import _flow, _link, _lookup, _plan, _wait
from shmkv._local import LocalCache
from shmkv.cluster import Cluster
from shmkv.keys import BlocksCacheKey, CacheKey
from shmkv.own_cache import OwnCache
from shmkv.own_pull import Limit, pull_own
from shmkv.pull_failure import PullKey, Select, SourceKey

Found = tuple[OwnCache, int, int]


class OwnWait(_wait.EventWait):
    """The loop: look under the owner's lock, sleep without it."""

    def __init__(self, cluster: Cluster, key: SourceKey, timeout_ms: int, waits: bool = True) -> None:
        super().__init__(cluster.directory.region)
        self._waits = waits
        self._cluster = cluster
        self._key = key
        self._deadline = time.monotonic_ns() + timeout_ms * 1_000_000
        self._found: Found | None = None
        self._word: int | None = None       # number of the row that is slept on, -1: the keys

    @property
    def is_found(self) -> bool:
        """Was the row there at some look?"""
        return self._found is not None

    def wait_until(self, first: int, end: int, turn_ns: int, watched: bool) -> int:
        """Until tensors `first` to `end` (-1 = all) of the row are published: 0, or why not."""
        is_armed = False
        try:
            while True:
                self.see()
                if self.is_cancelled:
                    return int(_link.CANCELLED)
                with self._cluster.lock:
                    status, word = self._look(first, end)
                if status != _lookup.UNPUBLISHED or not self._waits:
                    return status
                if turn_ns == _wait.LOOK_NS:
                    return int(_wait.NOT_YET)
                if word != self._word:
                    self._count_in(word)
                    continue
                if turn_ns == _wait.ARM_NS:
                    is_armed = True
                    return int(_wait.NOT_YET)
                slept = self.sleep(self._deadline, turn_ns, watched)
                if slept:
                    return slept
        finally:
            if not is_armed:
                self._word = None
                self.count_out()

    def _count_in(self, word: int) -> None:
        if word < 0:
            self.count_in_for_keys()
        else:
            self.count_in_for_row(word)
        self._word = word

    def _look(self, first: int, end: int) -> tuple[int, int]:
        """UNPUBLISHED with the word to sleep on, or what to answer."""
        found = self._find()
        if isinstance(found, int):
            is_final = self._found is not None or not self._waits
            return (found, -1) if is_final else (int(_lookup.UNPUBLISHED), -1)
        cache, row, word = found
        if self._found is not None and self._found[2] >> 8 != word >> 8:       # another binding
            return int(_lookup.REMOVED), -1
        self._found = found
        caches = self._cluster.caches
        if isinstance(self._key, BlocksCacheKey):
            rows = [block for block in range(cache.desc.batch_size) if not caches.sources.is_published(cache, block, 0, -1)]
            return (int(_lookup.UNPUBLISHED), caches.sources.row_number(cache, rows[0])) if rows else (0, -1)
        if caches.sources.is_published(cache, row, first, end - first if end >= 0 else -1):
            return 0, -1
        return int(_lookup.UNPUBLISHED), caches.sources.row_number(cache, row)

    def _find(self) -> Found | int:
        caches, key = self._cluster.caches, self._key
        if isinstance(key, CacheKey):
            return caches.sources.by_key(key.words)
        if isinstance(key, BlocksCacheKey):
            cache = caches.sources.by_blocks_key(key.model_id)
            return int(_lookup.NEVER) if cache is None else (cache, 0, cache.generation << 8)
        return caches.sources.by_id(key.cache_id, key.batch_index)


class OwnKeyWait(OwnWait):
    """Until a key is bound and wholly published."""

    def run(self, turn_ns: int, watched: bool) -> int:
        """As of `_await.KeyWait`."""
        return self.wait_until(0, -1, turn_ns, watched)


class OwnRowFlow(OwnWait):
    """A pull that waits, piece by piece as `_flow.RowFlow` does, or (`piece` 0) as one pull when all is there."""

    def __init__(self, cluster: Cluster, key: PullKey, dst: LocalCache, select: Select, consumes: bool, timeout_ms: int,
                 piece: int = 0, waits: bool = True) -> None:
        super().__init__(cluster, key, timeout_ms, waits)
        self._pull_key = key
        self._dst = dst
        self._select = select
        self._consumes = consumes
        self._piece = piece
        self._done = 0
        self._count = select[6] if select[6] >= 0 else select[8]        # -1: as many as the source has

    @property
    def done(self) -> tuple[int, int]:
        """(tensors copied, tensors selected)."""
        return self._done, max(self._count, 0)

    def run(self, turn_ns: int, watched: bool) -> int:
        """As of `_flow.RowFlow`."""
        if self._count < 0:
            status = self.wait_until(0, 0, turn_ns, watched)        # for the row itself
            if status:
                return status
            assert self._found is not None
            self._count = self._found[0].desc.num_tensors
        if not self._piece:
            return self._pull(self._select, self._select[5] + self._count, turn_ns, watched)
        wanted = min(self._piece, self._count - self._done)
        first, dst_first = self._select[5] + self._done, self._select[7] + self._done
        select = (*self._select[:5], first, wanted, dst_first, wanted, 0, *self._select[10:])
        status = self._fault() or self._pull(select, first + wanted, turn_ns, watched)
        if status == 0:
            self._done += wanted
        return int(_flow.MORE) if status == 0 and self._done < self._count else status

    def _fault(self) -> int:
        """What a pull of the whole would answer for ranges of different length, before the first piece."""
        wanted = self._select[8]
        return int(_plan.COUNTS) if wanted >= 0 and wanted != self._count else 0

    def _pull(self, select: Select, end: int, turn_ns: int, watched: bool) -> int:
        status = self.wait_until(select[5], end, turn_ns, watched)
        if status:
            return status
        status = pull_own(self._cluster, self._pull_key, self._dst, select, self._consumes, None, Limit(self, self._deadline))
        return int(_lookup.REMOVED) if status == _lookup.UNPUBLISHED else status        # taken back meanwhile
