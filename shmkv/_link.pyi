"""Types of getting a link's lock, and its answers."""
from typing import Final

ENDED: Final[int]
BUSY: Final[int]
PEER_GONE: Final[int]
TIMEOUT: Final[int]
INTERRUPTED: Final[int]
CANCELLED: Final[int]
FORKED: Final[int]

def inside_call() -> bool: ...
