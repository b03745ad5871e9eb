"""Types of the choice of a copy loop, and of the benchmarks' list of runs."""
from typing import Final, TypedDict

DEFAULT_NT_THRESHOLD: Final[int]
CREW_THRESHOLD: Final[int]

class _Current(TypedDict):
    kernel: str
    nt_threshold: int
    crew_threshold: int
    threads: int

def supported_kernels() -> list[str]: ...
def configure(kernel: str = "auto", threshold: int | None = None, threads: int | None = None) -> None: ...
def current() -> _Current: ...
def streamed() -> int: ...

class RunList:
    def __init__(
        self, runs: list[tuple[int, int, int]], src: int, dst: int, *, kernel: str = "", streaming: bool = False
    ) -> None: ...
    def copy(self) -> None: ...
