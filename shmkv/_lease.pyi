"""Numbers around leases."""
from typing import Final

NONE_FREE: Final[int]
MOST: Final[int]
