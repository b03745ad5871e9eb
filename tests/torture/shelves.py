"""Which caches a prompt has, and what their rows are called. The same in all processes.

Shelf "rows": one cache, its rows filled again and again under the same keys: even rows by request, odd ones by prefix.
Shelf "halves": the same with request keys, a few rows for each decoder, which nobody else pulls, and in halves of the layers.
Lanes: caches that are allocated, filled, published, offered by their id and deallocated. Their rows are never taken back, so a pull
either gets all of a row's bytes or leaves the destination as it was. Lanes with `keyed` are deallocated at once and live by their
keys. Streamed lanes are offered before they are published, layer by layer: whoever pulls from them waits. Parcel lanes are pushed
from and not pulled: decoders have landings of their shapes, and nothing else of such sizes.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

PREFIX_ROWS = 2                         # every second row of the shelf "rows" has a prefix key
HALVES_A_DECODER = 2


@dataclass(frozen=True)
class Shape:
    """`tensors` tensors of `rows` rows of `words` 64-bit words."""

    tensors: int
    rows: int
    words: int

    @property
    def row_nbytes(self) -> int:
        """Of all tensors."""
        return self.tensors * self.words * 8


ROWS = Shape(4, 16, 64)
ROWS_CACHE_ID = 1                       # the first that a prompt allocates
TINY = Shape(2, 2, 16)
MIDDLE = Shape(4, 2, 32768)             # 2 MiB
KEYED = Shape(4, 4, 1024)
BIG = Shape(4, 1, 1 << 19)              # 16 MiB
HUGE = Shape(4, 2, 1 << 19)             # 32 MiB, rows as those of BIG

STREAMED = Shape(8, 2, 1024)
LAYER = 2                               # tensors

# Freed memory goes to the next cache that needs more than half of it: a landing's may not do for anything else of a decoder.
SMALL_PARCEL = Shape(4, 2, 208)         # 13 KiB
PARCELS = (*[SMALL_PARCEL] * 4, Shape(4, 2, 6144), Shape(4, 1, 1 << 17))        # 384 KiB; 4 MiB, which is streamed
SMALL_PARCELS = range(4)
LARGE_PARCELS = range(4, len(PARCELS))


def some_parcels(dice: random.Random) -> list[int]:
    """All small ones, for their number, and at times a large one, into which others can come while it runs."""
    large = [dice.choices(LARGE_PARCELS, (4, 1))[0]] if dice.random() < 0.4 else []
    return [*SMALL_PARCELS, *large]


# Few tiny ones, so that each is renewed often.
LANE_SHAPES = (*[TINY] * 3, MIDDLE, MIDDLE, *[KEYED] * 4, BIG, HUGE, STREAMED, STREAMED, *PARCELS)
LANES = len(LANE_SHAPES)
TINY_LANES = range(3)
MIDDLE_LANES = range(3, 5)
KEYED_LANES = range(5, 9)
BIG_LANES = range(9, 11)
STREAMED_LANES = range(11, 13)
PARCEL_LANES = range(13, LANES)
SLOT_OF_LANE = 512                      # in a stamp; keys of the shelves stand below


def slot_of_parcel(kind: int) -> int:
    """In a stamp."""
    return SLOT_OF_LANE + PARCEL_LANES[kind]


def halves_shape(decoders: int) -> Shape:
    return Shape(4, HALVES_A_DECODER * decoders, 16)


def slots(decoders: int) -> int:
    """Rows that are filled again and again: those of "rows", then those of "halves"."""
    return ROWS.rows + HALVES_A_DECODER * decoders


def halves_slots(decoder: int) -> range:
    """Slots of one decoder's own rows."""
    first = ROWS.rows + HALVES_A_DECODER * decoder
    return range(first, first + HALVES_A_DECODER)
