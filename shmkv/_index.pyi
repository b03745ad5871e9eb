"""Types of the key index, as its owner sees it."""
from collections.abc import Callable

from shmkv._mapping import Region

class KeyIndex:
    def __init__(self, region: Region, reserve: Callable[[int, int], object]) -> None: ...
    @property
    def capacity(self) -> int: ...
    def give_back_old_parts(self, life_fd: int, members: Region) -> None: ...
