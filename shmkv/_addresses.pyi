"""Types of the way from an address to a tensor."""
from shmkv._mapping import Region

def tensor_of(directory: Region, address: int) -> tuple[int, int] | None: ...
