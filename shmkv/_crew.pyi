"""Types of the settings of the crew of copying threads."""
from typing import Final, TypedDict

DEFAULT_LIMIT: Final[int]
MAX_LIMIT: Final[int]

class _Current(TypedDict):
    threads: int
    started: int

def configure(threads: int | None = None) -> None: ...
def current() -> _Current: ...
