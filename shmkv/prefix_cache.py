"""Prefixes that are kept for whoever asks again: caches that nothing but prefix keys keeps alive. When they are too many, those go
that were not used for the longest time. Runs under the owner's lock.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shmkv._directory import Directory
from shmkv.expiry import KeyExpiry
from shmkv.keys import KEY_PREFIX
from shmkv.own_cache import OwnCache


class _Kept(NamedTuple):
    """A cache that prefix keys keep: when one of them was last used or bound, and the rows that have them."""

    used_ns: int
    cache: OwnCache
    rows: list[int]


class PrefixCache:
    """`leaving`: caches without an id reference; `is_pinned`: is somebody in one, or does a lease keep it?"""

    def __init__(self, directory: Directory, expiry: KeyExpiry, leaving: dict[int, OwnCache],
                 is_pinned: Callable[[OwnCache], bool]) -> None:
        self._directory = directory
        self._expiry = expiry
        self._leaving = leaving
        self._is_pinned = is_pinned
        self.capacity: int | None = None        # bytes; None: as much as there is
        self.evictions = 0

    def evict(self) -> None:
        """Remove the keys of the least recently used prefixes until the others fit. One that is being read, or kept by a lease,
        stays for now."""
        if self.capacity is None or self._most_nbytes() <= self.capacity:
            return
        kept = sorted(self._kept(), key=lambda each: each.used_ns)
        nbytes = sum(each.cache.own_nbytes for each in kept)
        for each in kept:
            if nbytes <= self.capacity:
                return
            if not self._is_pinned(each.cache):
                nbytes -= each.cache.own_nbytes
                self._end(each)

    def _most_nbytes(self) -> int:
        """No fewer bytes than prefixes keep: every call of the owner asks, so no key is looked at."""
        return sum(cache.segment.nbytes for cache in self._leaving.values())

    def _end(self, kept: _Kept) -> None:
        kept.cache.living = None
        for row in kept.rows:
            self._directory.remove(kept.cache.slot, row)
            self._expiry.unbound(kept.cache.slot, row)
        self.evictions += 1

    def _kept(self) -> Iterator[_Kept]:
        for cache in list(self._leaving.values()):
            rows = [row for row, kind in self._keys(cache) if kind == KEY_PREFIX]
            if rows and len(rows) == sum(1 for _ in self._keys(cache)) and not cache.retired:
                yield _Kept(max(self._used_ns(cache, row) for row in rows), cache, rows)

    def _keys(self, cache: OwnCache) -> Iterator[tuple[int, int]]:
        """(row, kind) of the living keys."""
        for row in self._expiry.rows(cache.slot):
            words = self._directory.row_key(cache.slot, row)
            if words is not None:
                yield row, words[0]

    def _used_ns(self, cache: OwnCache, row: int) -> int:
        return max(self._expiry.since_ns(cache.slot, row), self._directory.last_use_ns(cache.slot, row))

    def hits(self) -> int:
        """Pulls and views of rows with a prefix key, so far."""
        living = sum(self._directory.prefix_hits(slot, row) for slot, row, words in self._expiry.living() if words[0] == KEY_PREFIX)
        return living + int(self._directory.ended_prefix_hits)
