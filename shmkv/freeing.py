"""When the caches of one cluster go, and their memory with them. Runs under the owner's lock.

A cache lives while its id reference or one of its keys does and while anybody reads or writes it. One without an id reference is in
`leaving`, and each call of the owner looks again whether it can go: what readers consumed, which keys' time is over, who is in it.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from shmkv import _link_record
from shmkv._directory import Directory
from shmkv._drop import DropQueue
from shmkv._mapping import Region
from shmkv.addressed import AddressedCache
from shmkv.expiry import KeyExpiry
from shmkv.membership import Namespace
from shmkv.own_cache import OwnCache
from shmkv.prefix_cache import PrefixCache
from shmkv.segment import SegmentPool

REAP_INTERVAL_NS = 20_000_000


class Freeing:
    """Takes caches out of `by_id`, which is the owner's, and gives their segments to `pool`.

    `initiated()` gives (directory, slot) of the link records that this cluster made in other directories; `look` is called every
    REAP_INTERVAL_NS, by a call that looks for dead readers.
    """

    def __init__(self, namespace: Namespace, directory: Directory, pool: SegmentPool, expiry: KeyExpiry, by_id: dict[int, OwnCache],
                 initiated: Callable[[], list[tuple[Region, int]]], look: Callable[[], None]) -> None:
        self._namespace = namespace
        self._directory = directory
        self._pool = pool
        self._expiry = expiry
        self._by_id = by_id
        self._by_slot: dict[int, OwnCache] = directory.owners
        self._initiated = initiated
        self._look = look
        self._reaped: set[tuple[int, int]] = set()
        self._reaped_count = 0
        self._looked_ns = 0
        self.leaving: dict[int, OwnCache] = {}
        self.dropped = DropQueue(directory)         # those whose last handle is gone, put here without any lock
        self.prefix = PrefixCache(directory, expiry, self.leaving, self._is_pinned)

    def let_go(self, cache: OwnCache) -> None:
        """Drop the id reference, if it is there; `collect` does the rest."""
        if cache.id_alive:
            self.leaving[cache.cache_id] = cache
            cache.id_alive = False
            cache.local.close()
            self._directory.end_blocks_key(cache.slot)
            if isinstance(cache, AddressedCache):
                self.unbind(cache, range(cache.layout.rows))        # its memory does not stay for a key

    def unbind(self, cache: OwnCache, rows: Iterable[int]) -> None:
        """Take the keys of rows away."""
        cache.living = None
        for row in rows:
            self._directory.unbind(cache.slot, row)
            self._expiry.unbound(cache.slot, row)

    def collect(self) -> int:
        """Free what can be freed now: bytes that the system has back (kept segments are not among them)."""
        while self.dropped:
            self.let_go(self.dropped.popleft())
        self._expiry.expire_due()
        self._settle()
        self.prefix.evict()
        freed = sum(self._try_free(cache) for cache in list(self.leaving.values()))
        self._directory.index.give_back_old_parts(self._namespace.life_fd, self._namespace.table)
        return freed

    def _settle(self) -> None:
        """Notice what readers consumed; all caches are looked at when a reader died, for it may have left a full row."""
        slots = self._directory.noticed_slots()
        if self._somebody_died():
            slots = list(self._by_slot)
        for slot in slots:
            if slot in self._by_slot:
                self._by_slot[slot].living = self._directory.settle(slot)

    def _somebody_died(self) -> bool:
        count = self._directory.reaped_count
        died = count != self._reaped_count
        self._reaped_count = count
        now = time.monotonic_ns()
        if now - self._looked_ns >= REAP_INTERVAL_NS:
            self._looked_ns = now
            dead = set(_link_record.dead_initiators(self._directory.region, self._namespace.life_fd, self._namespace.table))
            died = died or bool(dead - self._reaped)
            self._reaped = dead
            self._look()
        return died

    def _try_free(self, cache: OwnCache) -> int:
        """Retire a cache that nothing names any more, and use its memory again once nobody is in it."""
        if not cache.retired:
            if cache.living is None:
                cache.living = self._directory.settle(cache.slot)
            if cache.living:
                return 0
            self._directory.retire(cache.slot)
            cache.retired = True
        if self._is_pinned(cache):
            return 0
        # Forgotten first: an interrupt in between costs the record, not the manager.
        self._by_id.pop(cache.cache_id, None)
        self.leaving.pop(cache.cache_id, None)
        self._expiry.freed(cache.slot)
        self._directory.release(cache.slot)
        given_back = self._give_back(cache)
        self._directory.memory_freed()
        return given_back

    def _give_back(self, cache: OwnCache) -> int:
        """Its memory: bytes that the system has back."""
        if isinstance(cache, AddressedCache):
            cache.leave_host()
            return 0
        return self._pool.give(cache.segment)

    def _is_pinned(self, cache: OwnCache) -> bool:
        """Does anybody read or write the cache now, or keep it by a lease?"""
        return cache.local.uses > 0 or bool(self._directory.pinned(
            cache.generation, self._namespace.life_fd, self._namespace.table, self._initiated()))

    # -- for those who wait for memory ------------------------------------------------------------------------------

    @property
    def may_free_untold(self) -> bool:
        """May memory become free without `memory_freed` soon: does this process copy out of a cache that is to go?"""
        return any(cache.local.uses for cache in self.leaving.values())

    @property
    def next_expiry_ns(self) -> int | None:
        """When `collect` ends the next key, which tells nobody before."""
        return self._expiry.next_deadline_ns()

    def note_ttl(self, ttl_ms: int | None) -> None:
        """A key is to live that long."""
        if ttl_ms is not None:
            self._directory.memory_freed()      # not yet, but who waits for memory has to look when the time is over
