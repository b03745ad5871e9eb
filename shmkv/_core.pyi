"""One answer of the hot path; the rest is for C."""
from typing import Final

PRIVATE: Final[int]
