"""Types of a push."""
from collections.abc import Sequence
from typing import Final

from shmkv._blocks import BlockLists
from shmkv._link import LinkEnd
from shmkv._local import LocalCache

ADDRESS: Final[int]
ROOM: Final[int]
ROW: Final[int]

class Addresses:
    def __init__(self, addresses: Sequence[int]) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def bad(self) -> int: ...
    def part(self, begin: int, end: int) -> list[int]: ...

def push(
    handle: LinkEnd,
    src: LocalCache,
    addresses: Addresses,
    begin: int,
    end: int,
    first_tensor: int,
    src_row: int,
    lists: BlockLists | None,
    timeout_ms: int,
    *,
    check_all: bool = False,
    block_nbytes: int = 0,
) -> int: ...
