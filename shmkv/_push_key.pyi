"""Types of a push to a cache that a key names."""
from typing import Final

from shmkv._blocks import BlockLists
from shmkv._link import LinkEnd
from shmkv._local import LocalCache

CLOSED: Final[int]

def push(
    handle: LinkEnd,
    src: LocalCache,
    packed: bytes,
    select: tuple[int, ...],
    lists: BlockLists | None,
    timeout_ms: int,
    *,
    whole_tensors: int = 0,
) -> int: ...
