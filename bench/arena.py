"""One workload, set up: the source in the prompt process, its copy in shared memory, destinations of every kind."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cluster import Source
from contenders import Private, Shared, Target
from programs import Process
from workloads import Workload

import shmkv

# Source, its copy, our destination, that of the second process, private memory; and room to breathe.
COPIES = 6


def memory_available() -> int:
    """Bytes that this machine can give now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class Arena:
    """The parts of one workload. What is big and rarely wanted is made when it is first asked for."""

    def __init__(self, manager: shmkv.KvCacheManager, prompt: Process, workload: Workload) -> None:
        self.workload = workload
        self.prompt = prompt
        self.source = Source(**prompt.call("publish", num_tensors=workload.num_tensors, row_nbytes=workload.row_nbytes))
        self._manager = manager
        self._shared: Shared | None = None
        self._private: Private | None = None

    @property
    def shared(self) -> Shared:
        if self._shared is None:
            self._shared = Shared(self.prompt, self.source, self.workload.num_tensors, self.workload.row_nbytes)
        return self._shared

    @property
    def private(self) -> Private:
        if self._private is None:
            self._private = Private(self.workload.nbytes)
        return self._private

    @contextlib.contextmanager
    def target(self, at: int) -> Iterator[Target]:
        """A destination cache whose rows begin at byte `at` of a page."""
        target = Target(self._manager, self.source, self.workload.num_tensors, self.workload.row_nbytes, at)
        try:
            yield target
        finally:
            target.close()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self.prompt.call("drop", cache_id=self.source.cache_id)


@contextlib.contextmanager
def opened(manager: shmkv.KvCacheManager, prompt: Process, workload: Workload) -> Iterator[Arena]:
    """An arena, closed afterwards. MemoryError if the machine has not the memory for all of it."""
    wanted, there = COPIES * workload.nbytes, memory_available()
    if there < wanted:
        raise MemoryError(f"{workload.name} needs {wanted >> 20} MiB of memory, {there >> 20} MiB are available")
    arena = Arena(manager, prompt, workload)
    try:
        yield arena
    finally:
        arena.close()
