"""Where a decoder pulls to, and what stands there: the stamp of each part of each row, as it was last seen to be right."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv import CacheDesc, DataType, KvCache
from shmkv.kv_cache_manager import KvCacheManager
from torture import pattern
from torture.pattern import CANARY, Stamp
from torture.shelves import Shape


class Destination:
    """A cache of the decoder. `parts`: how many equal parts of the tensors are pulled on their own."""

    def __init__(self, manager: KvCacheManager, shape: Shape, parts: int = 1) -> None:
        desc = CacheDesc(shape.tensors, [shape.rows, shape.words], DataType.DT_UINT64)
        self.cache: KvCache = manager.allocate_cache(desc)
        self.prepared = manager.prepare_pull(self.cache)
        self.shape = shape
        self.parts = parts
        self.words = pattern.array_of(self.cache, shape)
        self.known: list[list[int | None]] = [[None] * parts for _ in range(shape.rows)]
        self._canaries = 0

    def tensors(self, part: int) -> slice:
        each = self.shape.tensors // self.parts
        return slice(part * each, (part + 1) * each)

    def make_known(self, row: int, part: int) -> None:
        """Before a pull: if it is not known what stands there, write something that is."""
        if self.known[row][part] is None:
            self._canaries += 1
            word = pattern.pack(Stamp(CANARY, 0, row, self._canaries))
            pattern.fill(self.words[:, row], word)
            self.known[row] = [word] * self.parts

    def forget(self, row: int, part: int) -> None:
        """After a pull that may have left anything there."""
        self.known[row][part] = None

    def read(self, row: int, part: int) -> int | None:
        """The stamp's word of a part of a row; None if it is a mixture."""
        if self.parts == 1:
            return pattern.read(self.words[:, row])
        words, whole = pattern.read_many(self.words[:, row:row + 1], self.parts)
        return int(words[0, part]) if whole[0, part] else None

    def read_rows(self, rows: Sequence[int]) -> list[list[int | None]]:
        """Of many small rows at once, each part."""
        words, whole = pattern.read_many(self.words[:, list(rows)], self.parts)
        return [[word if right else None for word, right in zip(*each, strict=True)]
                for each in zip(words.tolist(), whole.tolist(), strict=True)]

    def describe(self, row: int) -> str:
        return pattern.describe(self.words[:, row])
