"""Types of one sleep for several waits."""
from shmkv._wait import Ending

class Bell(Ending):
    def see(self) -> None: ...

def sleep_any(waits: list[Ending], deadline_ns: int, watched: bool) -> int: ...
