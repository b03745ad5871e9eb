"""The key index as a model: an owner inserts, removes and grows, a reader probes without any lock.

Two keys begin at the same place. K lives all the time; the other comes and goes, so that K stands behind a full entry, then
behind a tombstone. Two parts: a table is only ever built in the part that is not in use, so the third stands where the first was.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from model import FAULT, Promise, put

EMPTY, TOMBSTONE, OTHER, K = range(4)
SIZE = 3
Part = tuple[int, ...]


class Index(NamedTuple):
    version: int = 0                    # of the index word; its part is version % 2
    parts: tuple[Part, Part] = ((OTHER, K, EMPTY), (EMPTY,) * SIZE)
    owner: str = "idle"
    step: int = 0
    place: int = 0
    owner_alive: bool = True
    reader: str = "look"
    seen: int = 0
    at: int = 0
    found: bool = False
    probes: int = 2
    reader_alive: bool = True


Moves = Iterator[tuple[str, Index]]


@dataclass(frozen=True)
class IndexModel:
    """The switches are mistakes to be caught."""

    grows: int = 2
    no_second_look: bool = False
    switches_before_refill: bool = False
    removal_empties: bool = False
    reader_stops_at_tombstones: bool = False

    def initial(self) -> Index:
        return Index()

    @property
    def promises(self) -> tuple[Promise, ...]:
        return (_living_key_is_found,)

    def steps(self, index: Index) -> Moves:
        if index.owner_alive:
            for what, after in getattr(self, "_owner_" + index.owner)(index):
                yield f"owner: {what}", after
            yield f"{FAULT}owner crashes", index._replace(owner_alive=False)
        if index.reader_alive and index.probes:
            for what, after in getattr(self, "_" + index.reader)(index):
                yield f"reader: {what}", after
            yield f"{FAULT}reader crashes", index._replace(reader_alive=False)

    # the owner

    def _owner_idle(self, index: Index) -> Moves:
        now = index.version % 2
        table = index.parts[now]
        if OTHER in table:
            gone = put(table, table.index(OTHER), EMPTY if self.removal_empties else TOMBSTONE)
            yield "removes an entry", _part(index, now, gone)
        else:
            free = min(i for i in range(SIZE) if table[i] < OTHER)
            yield "inserts an entry", _part(index, now, put(table, free, OTHER))
        if index.version and any(index.parts[1 - now]):
            yield "punches the replaced table", _part(index, 1 - now, (EMPTY,) * SIZE)
        if index.version < self.grows:
            yield "begins to grow", index._replace(owner="switch" if self.switches_before_refill else "clear")

    def _owner_clear(self, index: Index) -> Moves:
        yield "clears the next table", _part(index, self._next(index), (EMPTY,) * SIZE)._replace(owner="refill", step=0)

    def _owner_refill(self, index: Index) -> Moves:
        """One living entry a step, to the first free place."""
        old, new = index.parts[1 - self._next(index)], index.parts[self._next(index)]
        living = [entry for entry in old if entry >= OTHER]
        if index.step < len(living):
            filled = put(new, new.index(EMPTY), living[index.step])
            yield "copies an entry", _part(index, self._next(index), filled)._replace(step=index.step + 1)
        else:
            yield "has built the next table", index._replace(owner="idle" if self.switches_before_refill else "switch", step=0)

    def _owner_switch(self, index: Index) -> Moves:
        after = "clear" if self.switches_before_refill else "idle"
        yield "switches the index word", index._replace(version=index.version + 1, owner=after)

    def _next(self, index: Index) -> int:
        """The part that is built: not the one in use."""
        return index.version % 2 if self.switches_before_refill else 1 - index.version % 2

    # the reader

    def _look(self, index: Index) -> Moves:
        yield "looks at the index word", index._replace(reader="probe", seen=index.version, at=0)

    def _probe(self, index: Index) -> Moves:
        entry = index.parts[index.seen % 2][index.at]
        stops = entry == EMPTY or (entry == TOMBSTONE and self.reader_stops_at_tombstones)
        if entry == K:
            yield "finds the key", index._replace(reader="look", probes=index.probes - 1)
        elif stops or index.at + 1 == SIZE:
            yield "finds no more", index._replace(reader="missed" if self.no_second_look else "look_again")
        else:
            yield "goes on", index._replace(at=index.at + 1)

    def _look_again(self, index: Index) -> Moves:
        yield "looks at the index word again", index._replace(reader="missed" if index.version == index.seen else "look")

    def _missed(self, index: Index) -> Moves:
        yield "says it is not there", index._replace(reader="look", probes=index.probes - 1)


def _part(index: Index, number: int, table: Part) -> Index:
    return index._replace(parts=(table, index.parts[1]) if number == 0 else (index.parts[0], table))


def _living_key_is_found(index: Index) -> bool:
    """A key that lives all the time is never missed."""
    return index.reader != "missed" or not index.reader_alive


def probes_are_over(index: Index) -> bool:
    """The reader has ended its probes, or is dead."""
    return not index.probes or not index.reader_alive
