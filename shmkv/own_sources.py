"""Own caches as sources: of pulls and views out of the own cluster. Runs under the owner's lock."""
from __future__ import annotations

import time
from collections.abc import Sequence

from shmkv import _lookup
from shmkv._directory import Directory
from shmkv._layout import KIND_REGISTERED
from shmkv.keys import KeyWords
from shmkv.own_cache import OwnCache


class OwnSources:
    """What a reader without a link asks of the own directory. `by_id` and `by_slot` are the caches that there are."""

    def __init__(self, directory: Directory, by_id: dict[int, OwnCache], by_slot: dict[int, OwnCache]) -> None:
        self._directory = directory
        self._by_id = by_id
        self._by_slot = by_slot

    def by_key(self, words: KeyWords) -> tuple[OwnCache, int, int] | int:
        """(cache, row, the row's word) of a living key of our own, or why there is none."""
        found = self._directory.find(words)
        if found is None:
            return int(self._directory.why_ended(words))
        slot, row = found
        return self._by_slot[slot], row, self._word(slot, row)

    def by_id(self, cache_id: int, row: int) -> tuple[OwnCache, int, int] | int:
        """The same for a cache that its id or a key of it keeps alive."""
        cache = self._by_id.get(cache_id)
        if cache is None or cache.retired or row >= cache.desc.batch_size:
            return int(_lookup.NEVER)
        return cache, row, self._word(cache.slot, row)

    def by_blocks_key(self, model_id: int) -> OwnCache | None:
        """The blocks cache of our own with that key."""
        slot = self._directory.find_blocks(model_id)
        return None if slot is None else self._by_slot[slot]

    def row_number(self, cache: OwnCache, row: int) -> int:
        """Of the record of a row, for who waits for it."""
        return int(self._directory.row_number(cache.slot, row))

    def row_words(self, cache: OwnCache, rows: Sequence[int]) -> list[int]:
        """What `are_same_rows` needs to know before the bytes of rows are read."""
        return self._directory.row_words(cache.slot, rows)

    def are_same_rows(self, cache: OwnCache, rows: Sequence[int], words: Sequence[int]) -> bool:
        """Have rows had the same bytes since `row_words`? Asked while the cache is still counted in."""
        return self._directory.are_same_rows(cache.slot, rows, words)

    def is_published(self, cache: OwnCache, row: int, first: int, count: int) -> bool:
        """Are the selected tensors (count -1 = all) of a row published?"""
        tensors = cache.desc.num_tensors
        wanted = tensors if count < 0 else min(tensors, first + count)
        return bool(self._directory.progress(cache.slot, row) >= wanted)

    def finish(self, cache: OwnCache, row: int, word: int, *, by_key: bool, consumes: bool, first: int, count: int) -> int:
        """After the copy of a pull of our own, while the source is still counted in: 0, or REMOVED if the row is not what it was.
        Coverage, and the key is consumed when this was the last part. `word`: as `by_key` or `by_id` found it."""
        if not self._directory.still_counts(cache.slot, row, word, by_key):
            return int(_lookup.REMOVED)
        self._directory.note_use(cache.slot, row, time.monotonic_ns())
        if consumes and cache.kind != KIND_REGISTERED:
            tensors = cache.desc.num_tensors if count < 0 else count
            self._directory.mark_pulled(cache.slot, row, word >> 8, first, tensors)
        return 0

    def _word(self, slot: int, row: int) -> int:
        return int(self._directory.row_words(slot, [row])[0])
