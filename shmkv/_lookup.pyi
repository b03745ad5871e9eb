"""Types of a reader's look into a directory, and its answers."""
from typing import Final

from shmkv._mapping import Region

NEVER: Final[int]
CONSUMED: Final[int]
REMOVED: Final[int]
UNPUBLISHED: Final[int]
DAMAGED: Final[int]
MISSES: Final[frozenset[int]]

def hash_of_key(kind: int, req_id: int, prefix_id: int, model_id: int) -> int: ...
def is_published(directory: Region, words: tuple[int, int, int, int]) -> bool: ...
def describe(
    directory: Region, words: tuple[int, int, int, int], batch_index: int
) -> tuple[int, int, int, int, int] | None: ...
