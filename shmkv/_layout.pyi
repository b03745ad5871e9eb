"""Types of the layout: names, offsets, sizes and limits, as compiled."""
from typing import Final

VERSION: Final[int]
FINGERPRINT: Final[int]
DIRECTORY_SIZE: Final[int]
MEMBERS_SIZE: Final[int]
SEGMENT_DATA: Final[int]
ALIGNMENT: Final[int]
MEMBERS_LIMIT: Final[int]
LINKS_LIMIT: Final[int]
KIND_CONTIGUOUS: Final[int]
KIND_BLOCKS: Final[int]
KIND_HOST: Final[int]
KIND_REGISTERED: Final[int]

def fields() -> tuple[tuple[str, str, int, int], ...]: ...
def tables() -> tuple[tuple[str, int, int, int], ...]: ...
