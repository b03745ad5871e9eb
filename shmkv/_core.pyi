"""Types of one pull: its caches, its call, its answers."""
from typing import Final

from shmkv._link import LinkHandle
from shmkv._mapping import Region

DST_GONE: Final[int]
SRC_GONE: Final[int]

class LocalCache:
    def __init__(self, region: Region, shapes: list[tuple[int, int, int, int, int]]) -> None: ...
    @property
    def region(self) -> Region: ...
    @property
    def uses(self) -> int: ...
    def close(self) -> None: ...
    def count_in(self) -> None: ...
    def leave(self) -> None: ...

# `select` has ten numbers; callers cut it up and put it together again, so its length is not part of the type.
def pull(
    handle: LinkHandle,
    dst: LocalCache,
    key: tuple[int, int, int, int],
    select: tuple[int, ...],
    consumes: bool,
    timeout_ms: int,
) -> int: ...
def copy(src: LocalCache, dst: LocalCache, select: tuple[int, ...], timeout_ms: int) -> int: ...
def check(dst: LocalCache, select: tuple[int, ...]) -> int: ...
