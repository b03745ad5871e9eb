"""Types of the peer's end of a copy."""
from typing import Final

PRIVATE: Final[int]
