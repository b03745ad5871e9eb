"""Types of getting a link's lock, and its answers."""
from typing import Any, Final

from shmkv._mapping import Region

ENDED: Final[int]
BUSY: Final[int]
PEER_GONE: Final[int]
TIMEOUT: Final[int]
INTERRUPTED: Final[int]
CANCELLED: Final[int]
FORKED: Final[int]

class LinkEnd:
    @property
    def directory(self) -> Region | Any: ...        # None while an acceptor has not needed it
    @property
    def peer_slot(self) -> int: ...
    @property
    def peer_incarnation(self) -> int: ...
    @property
    def users(self) -> int: ...
    @property
    def fault(self) -> int: ...
    def look(self) -> int: ...

def inside_call() -> bool: ...
