"""Types of the cold lock."""
from collections.abc import Callable

from shmkv._mutex import Mutex

class ColdLock:
    def __init__(
        self, mutex: Mutex, life_fd: int, deadline: float, namespace: str, check: Callable[[], None] | None = None
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
