"""The caches of one cluster: allocate, bind, publish; when they go is decided in `freeing.py`. Everything here runs under the
owner's lock. Knows nothing of links but the addresses of their records, nor of arguments' form.
"""
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from shmkv import segment
from shmkv._directory import Directory
from shmkv._layout import SEGMENT_DATA
from shmkv._local import LocalCache
from shmkv._mapping import Region
from shmkv.addressed import AddressedCache, addressed_cache
from shmkv.cache_layout import CacheLayout
from shmkv.config import Settings
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode
from shmkv.expiry import KeyExpiry
from shmkv.freeing import Freeing
from shmkv.keys import KEY_REQUEST, KeyWords
from shmkv.membership import Member, Namespace
from shmkv.memory_pool import MemoryPool, no_memory_for
from shmkv.own_cache import OwnCache
from shmkv.own_sources import OwnSources
from shmkv.pauses import Pauses
from shmkv.registered import RegisteredCache, RegisteredCaches
from shmkv.segment import Segment, SegmentPool
from shmkv.types import CacheDesc

log = logging.getLogger("shmkv")


Usable = OwnCache | RegisteredCache         # what a caller's handle stands for


class OwnCaches:
    """All caches of one cluster, by id. `initiated` and `look` are for `Freeing`."""

    def __init__(self, settings: Settings, namespace: Namespace, member: Member, directory: Directory, pool: SegmentPool,
                 initiated: Callable[[], list[tuple[Region, int]]], look: Callable[[], None]) -> None:
        self._settings = settings
        self._namespace = namespace
        self._member = member
        self._directory = directory
        self._pool = pool
        self._by_id: dict[int, OwnCache] = {}
        self._by_slot: dict[int, OwnCache] = directory.owners
        self.expiry = KeyExpiry(directory, self._key_ends)
        self._ids = itertools.count(1)
        self.registered = RegisteredCaches()
        self.pools = MemoryPool.by_placement(settings)
        self.sources = OwnSources(directory, self._by_id, self._by_slot)
        self.freeing = Freeing(namespace, directory, pool, self.expiry, self._by_id, initiated, look)
        self.prefix = self.freeing.prefix

    def __iter__(self) -> Iterator[OwnCache]:
        return iter(list(self._by_id.values()))

    def get(self, own: Usable) -> Usable:
        """The cache itself, if its id reference lives; LLM_KV_CACHE_NOT_EXIST otherwise, also for one of an earlier init."""
        if not own.id_alive or not self.is_current(own):
            raise LLMException(f"cache {own.cache_id} does not exist or was deallocated",
                               status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        return own

    def is_current(self, own: Usable) -> bool:
        """Is this a cache of this cluster, and not one of an earlier init with the same id?"""
        return self._by_id.get(own.cache_id) is own or self.registered.get(own.cache_id) is own

    def next_id(self) -> int:
        """Ids of allocated and of registered caches are never used again."""
        return next(self._ids)

    # -- making -----------------------------------------------------------------------------------------------------

    def allocate(self, wanted: CacheLayout, keys: dict[int, KeyWords], *, publish: bool, zero: bool, blocks: bool = False,
                 blocks_model_id: int | None = None, key_ttl_ms: int | None = None,
                 into: list[OwnCache] | None = None) -> OwnCache:
        """A new cache with its rows bound to `keys`, or a blocks cache with its own kind of key. LLMParamError if a key is bound
        to a living cache; nothing is left of a failed call. `into` holds the cache from the moment on that it is the caller's."""
        cache: OwnCache | None = None
        made: Segment | None = None
        try:
            self.collect()
            self._namespace.check_own_life(self._member)
            self._check_keys(keys, blocks_model_id)
            pool_nbytes = self._pool_nbytes(wanted.desc)
            made, fresh = self._pool.take(wanted.nbytes, self._make_room)
            if zero and not fresh:
                made.region.clear(SEGMENT_DATA, wanted.nbytes)
            local = LocalCache(made.region, wanted.tensors, wanted.format)
            cache = OwnCache(self.next_id(), wanted, made, local, blocks, blocks_model_id, pool_nbytes=pool_nbytes)
            self._record(cache, keys, publish, key_ttl_ms)
            if into is not None:
                into.append(cache)
        except BaseException as error:
            self._undo(cache, made)
            if isinstance(error, (MemoryError, OSError)):
                raise no_memory_for(wanted, error, self._settings.out_of_memory_status) from error
            raise
        return cache

    def register(self, wanted: CacheLayout, addresses: Sequence[int], keys: dict[int, KeyWords], *, blocks: bool = False,
                 blocks_model_id: int | None = None, remote_accessible: bool = True,
                 into: list[OwnCache] | None = None) -> OwnCache:
        """A new cache in memory of the caller, one address a tensor; as `allocate` in all else."""
        cache: AddressedCache | None = None
        try:
            self.collect()
            self._namespace.check_own_life(self._member)
            self._check_keys(keys, blocks_model_id)
            cache = addressed_cache(self.next_id(), wanted, addresses, blocks, blocks_model_id, remote_accessible, self)
            if cache.host is not None:
                cache.host.local.count_in()
            self._record(cache, keys, True, None)
            if into is not None:
                into.append(cache)
        except BaseException as error:
            self._undo(cache, None)
            if cache is not None and cache.slot < 0:
                cache.leave_host()
            if isinstance(error, (MemoryError, OSError)):
                raise no_memory_for(wanted, error, self._settings.out_of_memory_status) from error
            raise
        return cache

    def unregister(self, cache: AddressedCache) -> None:
        """Forget a registered cache and its keys; what others are copying out of it now fails."""
        self.freeing.let_go(cache)
        self.collect()

    def by_id(self, cache_id: int) -> OwnCache | None:
        """The cache with that number, if its id reference lives."""
        cache = self._by_id.get(cache_id)
        return cache if cache is not None and cache.id_alive else None

    def leaving(self, cache_id: int) -> OwnCache | None:
        """The cache that had that number, if somebody still reads or writes it."""
        return self.freeing.leaving.get(cache_id)

    def _pool_nbytes(self, desc: CacheDesc) -> int:
        """What a cache takes of the pool of its placement, 0 if that has no limit. Counted anew each time from the caches that
        there are, so that no interrupt can leave a wrong count."""
        pool = self.pools.get(desc.placement)
        if pool is None:
            return 0
        return pool.check(desc, sum(cache.pool_nbytes for cache in self if cache.desc.placement == desc.placement))

    def _check_keys(self, keys: dict[int, KeyWords], model_id: int | None) -> None:
        """LLMParamError for a key that is bound already, of a row or of a blocks cache."""
        for row, words in keys.items():
            self._check_unbound(row, words)
        if model_id is not None and any(cache.blocks_model_id == model_id and cache.id_alive for cache in self):
            raise LLMParamError(f"blocks key (model_id {model_id}) is bound to a living cache already")

    def _record(self, cache: OwnCache, keys: dict[int, KeyWords], publish: bool, ttl_ms: int | None) -> None:
        wanted = cache.layout
        self.freeing.note_ttl(ttl_ms)
        cache.slot, cache.generation = self._directory.insert(
            cache.own_region, cache, cache_id=cache.cache_id, serial=cache.segment.serial, tensors=wanted.tensors,
            num_rows=wanted.rows, published=wanted.desc.num_tensors if publish else 0, kind=cache.kind,
            blocks_model_id=cache.blocks_model_id, format=wanted.format, base_address=cache.local.memory.base,
            nbytes=cache.segment.nbytes, remote_accessible=cache.remote_accessible)
        self._by_id[cache.cache_id] = cache
        for row, words in keys.items():
            self.expiry.bound(cache.slot, row, ttl_ms)
            self._directory.bind(cache.slot, row, words)
        self._directory.cache_added()

    def _undo(self, cache: OwnCache | None, made: Segment | None) -> None:
        """Take back what a failed allocation got to. Once it is recorded, a reader may be in it: then it leaves as any cache."""
        slot = next((slot for slot, owner in self._by_slot.items() if owner is cache), None)
        if cache is None or slot is None:
            if made is not None:
                self._pool.give(made)
            return
        cache.slot, cache.generation = slot, self._directory.generation(slot)
        self._by_id[cache.cache_id] = cache
        for row in range(cache.layout.rows):
            self._directory.unbind(slot, row)
        self.freeing.let_go(cache)

    def _make_room(self, nbytes: int) -> None:
        """Before memory is said to be short, what the dead left is removed."""
        if segment.free_nbytes() >= nbytes:
            return
        try:
            with self._namespace.cold(self._settings.sync_kv_timeout_ms):
                self._namespace.sweep()
        except LLMException as error:
            log.warning("could not look for leftovers of dead processes: %s", error)

    # -- keys and progress ------------------------------------------------------------------------------------------

    def _check_unbound(self, row: int, words: KeyWords, slot: int = -1) -> None:
        found = self._directory.find(words)
        if found is not None and found != (slot, row):
            kind, req_id, prefix_id, model_id = words
            name = f"req_id {req_id}" if kind == KEY_REQUEST else f"prefix_id {prefix_id}"
            owner = self._by_slot[found[0]].cache_id
            raise LLMParamError(f"key ({name}, model_id {model_id}) is bound to row {found[1]} of cache {owner} already")

    def bind(self, cache: OwnCache, keys: dict[int, KeyWords], *, publish: bool, key_ttl_ms: int | None = None) -> None:
        """Bind keys to rows, which are published by that unless ``publish=False``."""
        self.collect()
        for row, words in keys.items():
            self._check_unbound(row, words, cache.slot)
        cache.living = None
        self.freeing.note_ttl(key_ttl_ms)
        try:
            self._directory.make_room(len(keys))
            for row, words in keys.items():
                self.expiry.bound(cache.slot, row, key_ttl_ms)
                self._directory.bind(cache.slot, row, words, cache.desc.num_tensors if publish else 0)
        except (MemoryError, OSError) as error:
            raise no_memory_for(cache.layout, error, self._settings.out_of_memory_status) from error

    def unbind(self, cache: OwnCache, rows: Iterable[int]) -> None:
        """Take the keys of rows away; a pull that is in one of them answers "not there"."""
        self.freeing.unbind(cache, rows)
        self.collect()

    def publish(self, cache: OwnCache, rows: Sequence[int], tensors: int, key_ttl_ms: int | None = None) -> None:
        """The first `tensors` tensors of each row hold their bytes now."""
        self.freeing.note_ttl(key_ttl_ms)
        self.expiry.published(cache.slot, rows, key_ttl_ms)
        for row in rows:
            self._directory.publish(cache.slot, row, tensors)
        self.collect()

    def remove_key(self, words: KeyWords) -> None:
        """Forget a key and its coverage; an unknown one is no error."""
        found = self._directory.find(words)
        if found is not None:
            self._key_ends(found[0])
            self._directory.remove(*found)
        self.collect()

    def _key_ends(self, slot: int) -> None:
        """The keys of a cache have to be counted again. Before one of them goes: an interrupt must not leave an old count."""
        self._by_slot[slot].living = None

    def expire(self, older_than_ms: int) -> int:
        """Forget the keys that are older, as `remove_key` does: how many."""
        ended = self.expiry.expire_older(older_than_ms)
        self.collect()
        return ended

    def waited_for(self) -> list[tuple[KeyWords, bool]]:
        """The request keys that can be used up and that nobody has fetched, and of each whether its row is published, so that
        somebody can."""
        self.collect()
        return [(words, self.sources.is_published(self._by_slot[slot], row, 0, -1)) for slot, row, words in self.expiry.living()
                if words[0] == KEY_REQUEST and not isinstance(self._by_slot[slot], AddressedCache)]

    def stats(self) -> dict[str, int]:
        """What there is and what expired so far."""
        self.collect()
        return {
            "caches": len(self._by_id), "cache_bytes": sum(cache.own_nbytes for cache in self),
            "recycle_bytes": self._pool.kept_nbytes, "keys": sum(1 for _ in self.expiry.living()),
            "keys_expired_by_ttl": self.expiry.by_ttl, "keys_expired_by_call": self.expiry.by_call,
            "prefix_hits": self.prefix.hits(), "prefix_evictions": self.prefix.evictions,
        }

    # -- letting go -------------------------------------------------------------------------------------------------

    def deallocate(self, cache: Usable) -> None:
        """Drop the id reference; no-op for one that is dropped already."""
        if isinstance(cache, RegisteredCache):
            self.registered.let_go(cache)
        else:
            self.freeing.let_go(cache)
        self.collect()

    def collect(self) -> int:
        """Free what can be freed now: bytes that the system has back (kept segments are not among them)."""
        self.registered.collect()
        return self.freeing.collect()

    def close(self, timeout_ms: int) -> None:
        """finalize: unlink everything at once. Running copies of this process are waited for, those of others go on reading
        mapped memory that has no name any more."""
        deadline = time.monotonic() + timeout_ms / 1000
        for cache in list(self._by_id.values()):
            cache.local.close()
            if isinstance(cache, AddressedCache):
                cache.leave_host()
        self.registered.close()
        pauses = Pauses()
        while any(cache.local.uses for cache in self._by_id.values()) and time.monotonic() < deadline:
            pauses.sleep()
        for cache in self._by_id.values():
            if not isinstance(cache, AddressedCache):
                segment.unlink(cache.segment.name)
        self._by_id.clear()
        self.freeing.leaving.clear()
        self._pool.drain()
