"""Types of what happens when the last reference goes."""
from collections import deque
from typing import Any

class OnDrop:
    def __init__(self, queue: deque[Any], item: object) -> None: ...
    def disarm(self) -> None: ...
