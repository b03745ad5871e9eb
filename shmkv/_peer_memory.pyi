"""Types of moves into and out of a peer's private memory."""
from typing import Final

from shmkv._mapping import Region

FORBIDDEN: Final[int]
UNSUPPORTED: Final[int]
ELSEWHERE: Final[int]
REPLACED: Final[int]
UNMAPPED: Final[int]
OWN_UNMAPPED: Final[int]
UNSURE: Final[int]
NO_ROOM: Final[int]

def transfer(
    members: Region, life_fd: int, slot: int, incarnation: int, runs: list[tuple[int, int, int]], writes: bool, timeout_ms: int
) -> tuple[int, int, int]: ...
def allow_all() -> int: ...
def ask() -> int: ...
