"""How long to sleep between two looks, where nothing can wake the one that waits: short at first, then few times a second."""
from __future__ import annotations

import time

FIRST_S = 0.001
LONGEST_S = 0.025               # 40 looks a second


class Pauses:
    """One wait: `sleep` is called after each look in vain."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def sleep(self, left_s: float = LONGEST_S) -> None:
        """Sleep a little longer than last time, but no longer than `left_s`."""
        time.sleep(max(0.0, min(self._next_s, left_s)))
        self._next_s = min(self._next_s * 2, LONGEST_S)
