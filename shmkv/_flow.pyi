"""Types of pulls that wait."""
from typing import Final

from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache
from shmkv._wait import Ending

MORE: Final[int]

def copy_within(ending: Ending, src: LocalCache, dst: LocalCache, select: tuple[int, ...], deadline_ns: int) -> int: ...

class RowFlow(Ending):
    def __init__(
        self,
        handle: LinkHandle,
        dst: LocalCache,
        packed: bytes,
        select: tuple[int, ...],
        consumes: bool,
        timeout_ms: int,
        limit: int,
        piece: int = 0,
        waits: bool = True,
    ) -> None: ...
    @property
    def has_lease(self) -> bool: ...
    @property
    def is_pulling(self) -> bool: ...
    @property
    def done(self) -> tuple[int, int]: ...
    def run(self, turn_ns: int, watched: bool) -> int: ...
    def close(self) -> None: ...
