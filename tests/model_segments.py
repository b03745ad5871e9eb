"""Segments as a model: a cache's file from its creation to its unlinking, and a reader that keeps what it has mapped.

The owner makes one cache after the other in one cache slot. The next one is put into the file of the last (its header gets a new
generation) or into a new file, and then the old name goes and its serial is noted in the ring. Serials are never used again, so a
mapping is known by its serial for ever; whether the cache that was found lives in it says the generation in the header. A sweeper
takes the names of an owner that died, wherever it stood.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put

LAST = 3                                # generations that the owner makes
NOTHING = 0
HOLDS = {"look_again", "attach", "check_generation", "copy", "last_look", "clear_hazard"}


class File(NamedTuple):
    named: bool = False
    size: bool = False
    header: int = NOTHING               # the generation that it says, once it is valid
    tenant: int = NOTHING               # whose bytes are in it


class Reader(NamedTuple):
    pc: str = "drop_unlinked"
    calls: int = 2
    found: tuple[int, int] = (0, 0)     # generation and serial of the cache that was found
    mapped: frozenset[int] = frozenset()
    checked: tuple[int, int] = (0, 0)   # (serial, generation) that the header said when it was looked at
    seen: int = 0                       # how much of the ring
    read: int = 0
    alive: bool = True


class Store(NamedTuple):
    files: tuple[File, ...] = (File(),) * (LAST + 1)       # by serial; 0 is none
    cache: tuple[int, str, int] = (0, "FREE", 0)            # generation, state, serial
    entry: bool = False                 # does the index lead to the cache?
    ring: tuple[int, ...] = ()          # serials noted as unlinked
    hazard: int = 0
    owner: str = "create"
    serial: int = 1                     # of the file that the owner works on
    made: int = 1                       # generation of the cache that it works on
    alive: bool = True
    swept: bool = False
    reader: Reader = Reader()


Moves = Iterator[tuple[str, Store]]


@dataclass(frozen=True)
class SegmentsModel:
    """An owner, a reader with two calls, a sweeper. The switches are mistakes to be caught."""

    header_after_live: bool = False
    unlinks_before_scanning: bool = False
    keeps_generation_when_reused: bool = False
    maps_by_slot: bool = False
    sweeps_before_death: bool = False

    def initial(self) -> Store:
        return Store()

    @property
    def promises(self) -> tuple[Promise, ...]:
        return _published_is_whole, _reads_its_cache, _pinned_can_be_attached, _mappings_end

    def steps(self, store: Store) -> Moves:
        if store.alive:
            for what, after in getattr(self, "_owner_" + store.owner)(store):
                yield f"owner: {what}", after
            yield f"{FAULT}owner crashes", store._replace(alive=False)
        if (not store.alive or self.sweeps_before_death) and not store.swept:
            yield from self._sweep(store)
        reader = store.reader
        if reader.alive and reader.pc != "done":
            for what, after in getattr(self, "_" + reader.pc)(store):
                yield f"reader: {what}", after
            yield f"{FAULT}reader crashes", _reader(store, alive=False, pc="dead", mapped=frozenset())

    # the owner

    def _owner_create(self, store: Store) -> Moves:
        yield "creates the name", _file(store, named=True)._replace(owner="fallocate")

    def _owner_fallocate(self, store: Store) -> Moves:
        yield "gets its pages (fallocate)", _file(store, size=True)._replace(owner="live" if self.header_after_live else "header")

    def _owner_header(self, store: Store) -> Moves:
        """A kept file gets another generation by one store; of a new one everything else stands before."""
        late = self.header_after_live
        if not (self.keeps_generation_when_reused and _at(store).header):
            store = _file(store, header=store.made)
        yield "writes the header", _file(store, tenant=store.made)._replace(owner="index" if late else "live")

    def _owner_live(self, store: Store) -> Moves:
        after = "header" if self.header_after_live else "index"
        yield "publishes: cache LIVE", store._replace(cache=(store.made, "LIVE", store.serial), owner=after)

    def _owner_index(self, store: Store) -> Moves:
        yield "inserts into the index", store._replace(entry=True, owner="keep")

    def _owner_keep(self, store: Store) -> Moves:
        if store.made < LAST:
            generation, _, serial = store.cache
            state = store._replace(cache=(generation, "RETIRED", serial), owner="scan")
            yield "retires", state._replace(owner="unlink") if self.unlinks_before_scanning else state

    def _owner_scan(self, store: Store) -> Moves:
        """A dead reader's hazard counts as clear."""
        if store.hazard != store.made or not store.reader.alive:
            yield "no hazard names it", store._replace(entry=False, owner="free")

    def _owner_free(self, store: Store) -> Moves:
        """The record goes back before the memory is used again: into the next cache, or to the kernel."""
        store = store._replace(cache=(store.made, "FREE", store.serial))
        yield "recycles the file", store._replace(owner="header", made=store.made + 1)
        if self.unlinks_before_scanning:
            yield "takes a new file", store._replace(owner="create", serial=store.serial + 1, made=store.made + 1)
        else:
            yield "gives the file back", store._replace(owner="unlink")

    def _owner_unlink(self, store: Store) -> Moves:
        store = _file(store, named=False)
        yield "unlinks", store._replace(owner="scan" if self.unlinks_before_scanning else "note")

    def _owner_note(self, store: Store) -> Moves:
        noted = store._replace(ring=(*store.ring, store.serial))
        yield "notes the serial", noted._replace(owner="create", serial=store.serial + 1, made=store.made + 1)

    # the sweeper: whoever joins next, or gc

    def _sweep(self, store: Store) -> Moves:
        left = [serial for serial, file in enumerate(store.files) if file.named]
        if left:
            yield "sweeper: unlinks a name of the dead", _file(store._replace(serial=left[0]), named=False)._replace(
                serial=store.serial)
        else:
            yield "sweeper: swept", store._replace(swept=True)

    # the reader, under its link's lock

    def _drop_unlinked(self, store: Store) -> Moves:
        reader = store.reader
        gone = frozenset(store.ring[reader.seen:])
        yield "drops mappings of unlinked segments", _reader(store, pc="find", mapped=reader.mapped - gone, seen=len(store.ring))

    def _find(self, store: Store) -> Moves:
        generation, state, serial = store.cache
        if not store.alive:
            yield "the peer is gone", self._over(store)
        elif not store.entry or state != "LIVE":
            yield "not there", self._over(store)
        else:
            yield "finds the cache", _reader(store, pc="set_hazard", found=(generation, serial))

    def _set_hazard(self, store: Store) -> Moves:
        yield "sets hazard", _reader(store._replace(hazard=store.reader.found[0]), pc="look_again")

    def _look_again(self, store: Store) -> Moves:
        same = store.cache == (store.reader.found[0], "LIVE", store.reader.found[1])
        yield "looks again", _reader(store, pc="attach" if same else "clear_hazard")

    def _attach(self, store: Store) -> Moves:
        """By serial: what is mapped is used, anything else is opened by its name. A dead owner's may be swept already."""
        reader, serial = store.reader, store.reader.found[1]
        if serial in reader.mapped or (self.maps_by_slot and reader.mapped):
            yield "has it mapped", _reader(store, pc="check_generation")
        elif store.files[serial].named:
            yield "attaches", _reader(store, pc="check_generation", mapped=reader.mapped | {serial})
        elif not store.alive:
            yield "its name is gone with its owner", _reader(store, pc="clear_hazard")
        else:
            yield "has lost it", _reader(store, pc="lost")

    def _lost(self, store: Store) -> Moves:
        yield from ()

    def _check_generation(self, store: Store) -> Moves:
        """Once for each (mapping, generation)."""
        reader = store.reader
        if reader.checked == (reader.found[1], reader.found[0]):
            yield "knows the generation", _reader(store, pc="copy")
        elif self._mapped_file(store).header == reader.found[0]:
            yield "checks the generation", _reader(store, pc="copy", checked=(reader.found[1], reader.found[0]))
        else:
            yield "is another's", _reader(store, pc="lost")

    def _copy(self, store: Store) -> Moves:
        yield "copies", _reader(store, pc="last_look", read=self._mapped_file(store).tenant)

    def _last_look(self, store: Store) -> Moves:
        generation, state, _ = store.cache
        good = generation == store.reader.found[0] and state != "FREE"
        yield "last look", _reader(store, pc="clear_hazard", read=store.reader.read if good else 0)

    def _clear_hazard(self, store: Store) -> Moves:
        yield "clears hazard", self._over(store._replace(hazard=0))

    def _mapped_file(self, store: Store) -> File:
        reader = store.reader
        return store.files[min(reader.mapped) if self.maps_by_slot else reader.found[1]]

    def _over(self, store: Store) -> Store:
        calls = store.reader.calls - 1
        return _reader(store, pc="drop_unlinked" if calls else "done", calls=calls, found=(0, 0), read=0)


def _at(store: Store) -> File:
    return store.files[store.serial]


def _file(store: Store, **fields: Any) -> Store:
    return store._replace(files=put(store.files, store.serial, _at(store)._replace(**fields)))


def _reader(store: Store, **fields: Any) -> Store:
    return store._replace(reader=store.reader._replace(**fields))


def _published_is_whole(store: Store) -> bool:
    """A LIVE cache has its pages, its header and its bytes."""
    generation, state, serial = store.cache
    file = store.files[serial]
    return state != "LIVE" or (file.size and file.header == file.tenant == generation)


def _reads_its_cache(store: Store) -> bool:
    """What a pull calls good are the bytes of the cache that it found."""
    return store.reader.read in (0, store.reader.found[0]) or store.reader.pc == "last_look"


def _pinned_can_be_attached(store: Store) -> bool:
    """While its owner lives, a cache that is pinned can be attached and says its generation."""
    return store.reader.pc != "lost" or not store.alive


def _mappings_end(store: Store) -> bool:
    """After it has looked at the ring, a reader maps nothing that was noted before."""
    reader = store.reader
    return reader.pc == "drop_unlinked" or not reader.mapped & frozenset(store.ring[:reader.seen])


def names_are_gone(store: Store) -> bool:
    """The owner lives, or nothing of it has a name."""
    return store.alive or not any(file.named for file in store.files)
