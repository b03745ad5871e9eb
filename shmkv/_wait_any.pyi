"""Types of one sleep for several waits."""
from shmkv._wait import Ending

def sleep_any(waits: list[Ending], deadline_ns: int, watched: bool) -> int: ...
