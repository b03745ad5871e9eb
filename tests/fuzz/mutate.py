"""Changes of tables that know the layout: which field, of which record, to which value."""
from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from memory import OFFSETS, TABLES, WIDTHS

from .world import IN_USE, World

TOP32, TOP64 = 2**32 - 1, 2**64 - 1
EDGES = [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 4095, 4096, 4097, 8191, 8192, 8193, 2**16, 2**20 + 1,
         2**21 - 1, 2**21, 2**21 + 1, 2**22, 2**31 - 1, 2**31, 2**31 + 1, TOP32 - 1, TOP32, 2**32, 2**32 + 1, 2**40, 2**48,
         2**62, 2**63 - 1, 2**63, 2**63 + 1, TOP64 - 4096, TOP64 - 1, TOP64]
HEADER_FIELDS = ("magic", "version", "fingerprint", "header_nbytes", "nbytes", "incarnation", "serial")


@dataclass(frozen=True)
class Place:
    """One number in a file: where, how wide, and how far the same one of the next record is."""

    offset: int
    width: int
    step: int = 0
    records: int = 1

    def of(self, number: int) -> int:
        return self.offset + number * self.step


def _numbers(struct_name: str, start: int, step: int, records: int) -> list[Place]:
    """The fields of a record; a long one is a number every 8 bytes."""
    found = []
    for (owner, name), offset in OFFSETS.items():
        if owner == struct_name:
            width = WIDTHS[owner, name]
            found += [Place(start + offset + at, min(width, 8), step, records) for at in range(0, min(width, 64), 8)]
    return found


def _table(name: str) -> list[Place]:
    step, start = TABLES[name]
    return _numbers(name, start, step, IN_USE.get(name, 4))


def _link_places() -> list[Place]:
    step, start = TABLES["LinkRecord"]
    side, sides = WIDTHS["LinkRecord", "sides"] // 2, OFFSETS["LinkRecord", "sides"]
    found = [place for place in _table("LinkRecord") if place.offset < start + sides and place.width == 8]
    for number in range(2):
        found += _numbers("LinkSide", start + sides + number * side, step, 4)
    return found


DIRECTORY_PLACES: dict[str, list[Place]] = {
    "header": _numbers("DirectoryHeader", 0, 0, 1),
    "cache": _table("CacheRecord"),
    "tensor": _table("TensorRecord"),
    "row": _table("RowRecord"),
    "link": _link_places(),
    "ended": _table("EndedKey"),
    "coverage": [Place(TABLES["coverage line"][1], 8, 8, 32 * 16)],
    "unlinked": [Place(TABLES["EndedKey"][1] + 64 * 64, 8, 8, 512)],
    "index": [Place(TABLES["index entry"][1], 8, 8, 256)],
}
WEIGHTS = {"header": 3, "cache": 6, "tensor": 6, "row": 6, "link": 2, "ended": 1, "coverage": 2, "unlinked": 1, "index": 2}
LOCK = Place(TABLES["LinkRecord"][1] + OFFSETS["LinkRecord", "word"], 4, TABLES["LinkRecord"][0], 4)
LOCK_VALUES = [0, 1, 2, 3, 4, 5, 0x80000000, 0x80000001, 0x80000002, 0x80000003, 0x80000004, 0x80000005, TOP32, 0x12345678]
MEMBER_PLACES = _numbers("MemberRecord", TABLES["MemberRecord"][1], TABLES["MemberRecord"][0], 6)
HEADER_PLACES = [Place(OFFSETS["Header", name], WIDTHS["Header", name]) for name in HEADER_FIELDS]
MEMBERS_HEADER = [*HEADER_PLACES, *_numbers("MembersHeader", 0, 0, 1)]
SEGMENT_HEADER = [*HEADER_PLACES, Place(OFFSETS["SegmentHeader", "generation"], 8)]
INDEX = TABLES["index entry"][1]
INDEX_WORD = OFFSETS["DirectoryHeader", "index_word"]
HOW_MANY = (1, 1, 2, 3, 4)


class Mutator:
    """Changes tables; every choice comes from one random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def value(self, view: memoryview, place: Place, at: int) -> int:
        """A number for a field that now stands at `at`: an edge, near what stands there, another record's, or anything."""
        rng, old = self.rng, self._read(view, at, place.width)
        kind = rng.randrange(8)
        if kind < 2:
            new = rng.choice(EDGES)
        elif kind == 2:
            new = old + rng.choice((-8, -1, 1, 8, 64, 4096, 256, -256, 512))
        elif kind == 3:
            new = (old & ~0xFF) | rng.choice((0, 1, 2, 3, 4, 5, 6, 255))        # another state of the same generation
        elif kind == 4:
            new = old ^ 1 << rng.randrange(place.width * 8)
        elif kind == 5:
            new = self._read(view, place.of(rng.randrange(place.records)), place.width)
        elif kind == 6:
            new = rng.choice(EDGES) - old                                       # sums that wrap
        else:
            new = rng.getrandbits(64)
        return new % (1 << 8 * place.width)

    @staticmethod
    def _read(view: memoryview, at: int, width: int) -> int:
        return int.from_bytes(view[at:at + width], "little")

    def change(self, view: memoryview, place: Place, among: int | None = None) -> None:
        """Another value in one of the first records of a table."""
        at = place.of(self.rng.randrange(among or place.records) if place.records > 1 else 0)
        struct.pack_into("<Q" if place.width == 8 else "<I", view, at, self.value(view, place, at))

    def directory(self, view: memoryview) -> None:
        """One field of a directory, not of the header that all files have."""
        kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        place = self.rng.choice(DIRECTORY_PLACES[kind])
        few = {"cache": 4, "row": 9, "tensor": 74}.get(kind)
        self.change(view, place, few if few and self.rng.randrange(8) else None)

    def lock(self, view: memoryview) -> None:
        """A lock word: held, offered, waited for, or nonsense."""
        struct.pack_into("<I", view, LOCK.of(self.rng.randrange(2)), self.rng.choice(LOCK_VALUES))

    def index(self, view: memoryview) -> None:
        """Entries that lead astray: every one the same, each with a right tag and another row, or a table of another size."""
        kind, entries = self.rng.randrange(4), view[INDEX:INDEX + 2048].cast("Q")
        if kind == 0:
            entries[:] = memoryview(struct.pack("<Q", self.rng.choice([1, *filter(None, entries)])) * 256).cast("Q")
        elif kind == 1:
            row = self.rng.choice((0, 1, 2, 3, 17, 18, 2**21 + 1, 2**21 + 2, TOP32))
            for number, entry in enumerate(entries):
                if entry:
                    entries[number] = entry >> 32 << 32 | row
        elif kind == 2:
            log2, part = self.rng.choice((0, 7, 8, 9, 10, 22, 23, 63, 64, 255)), self.rng.randrange(2)
            struct.pack_into("<Q", view, INDEX_WORD, self.rng.getrandbits(40) << 16 | part << 8 | log2)
        else:
            shift = self.rng.randrange(1, 255)
            kept = list(entries)
            entries[:] = memoryview(struct.pack("<256Q", *kept[shift:], *kept[:shift])).cast("Q")

    def shape(self, view: memoryview) -> None:
        """A tensor whose numbers agree with each other: other rows, other pieces, another place, to the segment's last byte."""
        rng, (width, start) = self.rng, TABLES["TensorRecord"]
        at = start + width * rng.randrange(8)
        nbytes = rng.choice((64, 512, 1024, 2048, 4096, 8192))
        outer, rows = (1 << rng.randrange(4) for _ in range(2))
        offset = rng.choice((0, 4096, 8192 - nbytes, 8192 - nbytes, 8192 - nbytes + 1, 8191)) % 2**64
        struct.pack_into("<5Q", view, at, offset, nbytes, outer, rows, nbytes // (outer * rows))

    def header(self, view: memoryview, places: list[Place]) -> None:
        """One field of what a file begins with."""
        self.change(view, self.rng.choice(places))

    def fix_up(self, view: memoryview, kept: bytes) -> None:
        """Magic, version, fingerprint and lengths as they must be."""
        view[0:32] = kept[:32]

    def world(self, world: World) -> None:
        """One input: one to four changes; for most of them the headers are mended afterwards, so that they get deep."""
        menu: list[tuple[int, Callable[[], None]]] = [
            (70, lambda: self.directory(world.directory)),
            (4, lambda: self.index(world.directory)),
            (4, lambda: self.shape(world.directory)),
            (1, lambda: self.lock(world.directory)),
            (8, lambda: self.change(world.members, self.rng.choice(MEMBER_PLACES))),
            (5, lambda: self.header(world.members, MEMBERS_HEADER)),
            (6, lambda: self.header(world.directory, HEADER_PLACES)),
            (8, lambda: self.header(self.rng.choice(world.segments), SEGMENT_HEADER)),
        ]
        changes = self.rng.choices([change for _, change in menu], [weight for weight, _ in menu], k=self.rng.choice(HOW_MANY))
        for change in changes:
            change()
        if self.rng.randrange(5):
            self.fix_up(world.directory, world.kept[0].bytes)
            self.fix_up(world.members, world.kept[-1].bytes)
            for view, kept in zip(world.segments, world.headers, strict=True):
                self.fix_up(view, kept.bytes)

