"""Hazard, retire and recycle as a model: one piece of memory that its owner gives on from cache to cache.

There is one cache slot and one row. The key of cache generation G is row generation G: a convenience of the
model, which the readers do not use. A reader by key looks at row and cache, a reader by id at the cache
alone.

A push is a reader by id that writes: "copies" writes to whatever cache is in the memory, the promises are the
same, and its hazard stands in the record of the link that the owner made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put


class Reader(NamedTuple):
    """A pull by one link; `row` and `cache` are the generations that it found."""

    pc: str
    row: int = 0
    cache: int = 0
    read: tuple[int, ...] = ()  # for the promises: whose bytes each run of the copy read
    life: bool = True
    runs: bool = True


class Memory(NamedTuple):
    cache: tuple[int, str] = (1, "LIVE")
    row: tuple[int, str] = (1, "LIVE")
    tenant: int = 1  # the generation whose bytes are in the memory
    hazards: tuple[int, ...] = (0, 0)
    delayed: tuple[int, ...] = (0, 0)  # hazard stores that others cannot see yet
    owner: str = "keep"
    owner_lives: bool = True
    scanned: int = 0
    readers: tuple[Reader, ...] = ()


Moves = Iterator[tuple[str, Memory]]

PROTECTED = {"copy", "row_again", "cache_again", "consume"}


@dataclass(frozen=True)
class HazardModel:
    """Two readers, an owner that recycles up to generation `last`. The switches are mistakes to be caught.

    `lost_life_bytes`: a reader may lose its life byte and run on (an fcntl lock goes when any descriptor of
    the file is closed), so the owner recycles under it. It may then read foreign bytes, but must not call
    them good. That is what the last look at the cache's generation is for: the hazard alone does not give it.
    """

    by_id: tuple[bool, ...] = (False, True)
    last: int = 3
    lost_life_bytes: bool = False
    hazard_is_delayed: bool = False
    word_is_not_read_again: bool = False
    owner_does_not_scan: bool = False
    owner_scans_before_retiring: bool = False
    dead_hazards_count: bool = False
    no_last_look_at_cache: bool = False

    def initial(self) -> Memory:
        return Memory(readers=tuple(Reader(self._find(index)) for index in range(len(self.by_id))))

    @property
    def promises(self) -> tuple[Promise, ...]:
        return (_success_read_one_tenant, _hazard_keeps_tenant)

    def all_recycled(self, memory: Memory) -> bool:
        """The owner got through, or died: the last generation is in the memory."""
        return memory.tenant == self.last or not memory.owner_lives

    def steps(self, memory: Memory) -> Moves:
        if memory.owner_lives:
            for what, after in getattr(self, "_owner_" + memory.owner)(memory):
                yield f"owner: {what}", after
            yield f"{FAULT}owner crashes", memory._replace(owner_lives=False)
        for index, reader in enumerate(memory.readers):
            if not reader.runs or reader.pc in ("success", "not_exist"):
                continue
            for what, after in getattr(self, "_" + reader.pc)(memory, index):
                yield f"reader {index}: {what}", after
            if memory.delayed[index]:
                yield f"reader {index}: hazard store is seen", _see_hazard(memory, index)
            yield (
                f"{FAULT}reader {index} crashes",
                _reader(_see_hazard(memory, index), index, life=False, runs=False),
            )
            if self.lost_life_bytes and reader.life:
                yield f"{FAULT}reader {index} loses its life byte", _reader(memory, index, life=False)

    # the owner

    def _owner_keep(self, memory: Memory) -> Moves:
        """The id reference is gone from the start; the cache goes when its key does."""
        generation, state = memory.row
        if state == "LIVE":
            yield "removes the key", memory._replace(row=(generation, "REMOVED"))
        elif generation < self.last:
            yield "retires", self._retire(memory)

    def _retire(self, memory: Memory) -> Memory:
        if self.owner_does_not_scan:
            return memory._replace(cache=(memory.cache[0], "RETIRED"), owner="free")
        if self.owner_scans_before_retiring:
            return memory._replace(owner="scan", scanned=0)
        return memory._replace(cache=(memory.cache[0], "RETIRED"), owner="scan", scanned=0)

    def _owner_scan(self, memory: Memory) -> Moves:
        """One hazard a step. One that names the generation ends the scan, unless its side is dead: the owner
        comes back at its next call and begins anew."""
        link = memory.scanned
        if link == len(memory.hazards):
            yield "no hazard names it", memory._replace(owner="free", scanned=0)
        elif memory.hazards[link] == memory.cache[0]:
            yield f"hazard {link} names it", memory._replace(owner="look_at_life")
        else:
            yield f"hazard {link} is clear", memory._replace(scanned=link + 1)

    def _owner_look_at_life(self, memory: Memory) -> Moves:
        link = memory.scanned
        if memory.readers[link].life or self.dead_hazards_count:
            yield f"side {link} lives", memory._replace(owner="scan", scanned=0)
        else:
            yield f"side {link} is dead", memory._replace(owner="scan", scanned=link + 1)

    def _owner_free(self, memory: Memory) -> Moves:
        """The word leaves RETIRED before the first byte of the memory changes: a reader's last look needs
        it."""
        yield "frees", memory._replace(cache=(memory.cache[0], "FREE"), owner="fill")

    def _owner_fill(self, memory: Memory) -> Moves:
        """The next cache may stand in another slot: to a reader the word of this one is then FREE for
        long."""
        yield "writes the memory", memory._replace(tenant=memory.cache[0] + 1, owner="publish_cache")

    def _owner_publish_cache(self, memory: Memory) -> Moves:
        yield "cache LIVE", memory._replace(cache=(memory.tenant, "LIVE"), owner="publish_row")

    def _owner_publish_row(self, memory: Memory) -> Moves:
        yield "row LIVE", memory._replace(row=(memory.cache[0], "LIVE"), owner="keep")

    # a reader

    def _find(self, index: int) -> str:
        return "find_cache" if self.by_id[index] else "find_row"

    def _find_row(self, memory: Memory, index: int) -> Moves:
        generation, state = memory.row
        pc = "find_cache" if state == "LIVE" else "not_exist"
        yield "finds row", _reader(memory, index, pc=pc, row=generation)

    def _find_cache(self, memory: Memory, index: int) -> Moves:
        generation, state = memory.cache
        if state == "LIVE":
            yield "finds cache", _reader(memory, index, pc="set_hazard", cache=generation)
        else:
            yield "cache is not LIVE", _reader(memory, index, pc="not_exist")

    def _set_hazard(self, memory: Memory, index: int) -> Moves:
        generation = memory.readers[index].cache
        pc = "copy" if self.word_is_not_read_again else "cache_word_again"
        if self.hazard_is_delayed:
            memory = memory._replace(delayed=put(memory.delayed, index, generation))
        else:
            memory = _hazard(memory, index, generation)
        yield "sets hazard", _reader(memory, index, pc=pc)

    def _cache_word_again(self, memory: Memory, index: int) -> Moves:
        same = memory.cache == (memory.readers[index].cache, "LIVE")
        found = "copy" if self.by_id[index] else "row_word_again"
        yield "reads cache word again", _reader(memory, index, pc=found if same else "take_back")

    def _row_word_again(self, memory: Memory, index: int) -> Moves:
        same = memory.row == (memory.readers[index].row, "LIVE")
        yield "reads row word again", _reader(memory, index, pc="copy" if same else "take_back")

    def _take_back(self, memory: Memory, index: int) -> Moves:
        cleared = _hazard(memory, index, 0)
        yield "clears hazard, looks again", _reader(cleared, index, pc=self._find(index), row=0, cache=0)

    def _copy(self, memory: Memory, index: int) -> Moves:
        read = (*memory.readers[index].read, memory.tenant)
        found = "cache_again" if self.by_id[index] else "row_again"
        yield "copies a run", _reader(memory, index, pc="copy" if len(read) < 2 else found, read=read)

    def _row_again(self, memory: Memory, index: int) -> Moves:
        row = memory.readers[index].row
        good = memory.row in ((row, "LIVE"), (row, "CONSUMED"))
        yield "last look at row", _reader(memory, index, pc="cache_again" if good else "clear_failed")

    def _cache_again(self, memory: Memory, index: int) -> Moves:
        """LIVE, or RETIRED because another reader consumed the last key meanwhile: both keep the bytes.
        FREE or another generation: the memory may have been given on while it was copied."""
        generation = memory.readers[index].cache
        good = memory.cache in ((generation, "LIVE"), (generation, "RETIRED")) or self.no_last_look_at_cache
        found = "clear" if self.by_id[index] else "consume"
        yield "last look at cache", _reader(memory, index, pc=found if good else "clear_failed")

    def _consume(self, memory: Memory, index: int) -> Moves:
        row = memory.readers[index].row
        state = (row, "CONSUMED") if memory.row == (row, "LIVE") else memory.row
        yield "consumes", _reader(memory._replace(row=state), index, pc="clear")
        yield "leaves the key", _reader(memory, index, pc="clear")

    def _clear(self, memory: Memory, index: int) -> Moves:
        yield "clears hazard", _reader(_hazard(memory, index, 0), index, pc="success")

    def _clear_failed(self, memory: Memory, index: int) -> Moves:
        yield "clears hazard", _reader(_hazard(memory, index, 0), index, pc="not_exist", read=())


def _reader(memory: Memory, index: int, **fields: Any) -> Memory:
    return memory._replace(readers=put(memory.readers, index, memory.readers[index]._replace(**fields)))


def _hazard(memory: Memory, index: int, generation: int) -> Memory:
    return memory._replace(
        hazards=put(memory.hazards, index, generation), delayed=put(memory.delayed, index, 0)
    )


def _see_hazard(memory: Memory, index: int) -> Memory:
    return _hazard(memory, index, memory.delayed[index]) if memory.delayed[index] else memory


def _success_read_one_tenant(memory: Memory) -> bool:
    """A pull that succeeds read every run from the one cache that its key or id named."""
    return all(
        set(reader.read) == {reader.row or reader.cache}
        for reader in memory.readers
        if reader.pc in ("success", "clear")
    )


def _hazard_keeps_tenant(memory: Memory) -> bool:
    """While a living reader copies under its hazard, the memory is not given to another cache."""
    return all(
        memory.tenant == reader.cache for reader in memory.readers if reader.pc in PROTECTED and reader.life
    )
