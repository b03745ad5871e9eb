"""Types of what an acceptor does with a link."""
from shmkv._mapping import Region

def remove(
    directory: Region, slot: int, serial: int, life_fd: int, members: Region, timeout_ms: int, force: bool
) -> bool: ...
