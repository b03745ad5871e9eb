"""Types of the link records in a directory."""
from collections.abc import Callable, Sequence
from typing import Final, TypedDict

from shmkv._mapping import Region

LIVE: Final[int]

class _Side(TypedDict):
    open: int
    slot: int
    incarnation: int
    cluster_id: int
    hazard: int
    leases: int
    counters: list[int]

class _Record(TypedDict):
    serial: int
    state: int
    word: int
    sides: list[_Side]

def set_own(incarnation: int) -> None: ...
def links_reserved(directory: Region) -> int: ...
def reserve_more(directory: Region, reserve: Callable[[int, int], object]) -> None: ...
def claim(
    directory: Region, life_fd: int, members: Region, sides: Sequence[tuple[int, int, int]], claimed: list[int] | None = None
) -> int | None: ...
def abandon(directory: Region, slot: int) -> None: ...
def find(directory: Region, cluster_id: int) -> list[tuple[int, int]]: ...
def read(directory: Region, slot: int) -> _Record: ...
def initiator_lives(directory: Region, slot: int, life_fd: int, members: Region) -> bool: ...
def dead_initiators(directory: Region, life_fd: int, members: Region) -> list[tuple[int, int]]: ...
def address(directory: Region, slot: int) -> int: ...
