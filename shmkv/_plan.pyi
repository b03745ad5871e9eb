"""Types of a plan as a Python value, and the faults of a selection."""
from typing import Final, TypeAlias

_Shape: TypeAlias = tuple[int, ...]

DST_ROW: Final[int]
DST_RANGE: Final[int]
DST_WINDOW: Final[int]
SRC_WINDOW: Final[int]
SRC_RANGE: Final[int]
COUNTS: Final[int]
DAMAGED: Final[int]
DIVISOR: Final[int]
DST_BLOCK: Final[int]
SRC_BLOCK: Final[int]
BLOCK_NBYTES: Final[int]
BLOCKS_WINDOW: Final[int]
HEADS: Final[int]
FORMAT: Final[int]
ARGUMENT_FAULTS: Final[frozenset[int]]

class ShapeList:
    def __init__(self, tensors: list[tuple[int, ...]]) -> None: ...
    @property
    def count(self) -> int: ...
    def describe(self) -> list[tuple[int, int, int, int, int, int]]: ...
    def piece_pitches(self) -> list[int]: ...
    def moved(self, offsets: list[int]) -> ShapeList: ...

def runs(
    src: list[_Shape],
    dst: list[_Shape],
    *,
    size: int = -1,
    src_offset: int = 0,
    dst_offset: int = 0,
    src_row: int = 0,
    dst_row: int = 0,
    src_first: int = 0,
    dst_first: int = 0,
    src_count: int = -1,
    dst_count: int = -1,
    window: int = 0,
    src_period: int = 0,
    dst_period: int = 0,
) -> list[tuple[int, int, int]] | int: ...
