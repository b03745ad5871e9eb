"""Types of lists of blocks, and of a plan over them as a Python value."""
from typing import Final

TO_BLOCKS: Final[int]
FROM_ROW: Final[int]
TO_ROW: Final[int]

class BlockLists:
    def __init__(self, src: list[int], dst: list[int], mode: int, also: list[int] | None = None) -> None: ...
    @property
    def looked(self) -> list[int]: ...
    @property
    def pairs(self) -> list[tuple[int, int]]: ...
    @property
    def mode(self) -> int: ...

def runs(
    src: list[tuple[int, ...]],
    dst: list[tuple[int, ...]],
    src_blocks: list[int],
    dst_blocks: list[int],
    mode: int,
    *,
    src_row: int = 0,
    dst_row: int = 0,
    src_first: int = 0,
    dst_first: int = 0,
    src_count: int = -1,
    dst_count: int = -1,
) -> list[tuple[int, int, int]] | int: ...
