"""Caches in memory of the caller: destinations of pulls and ends of local copies, which nobody else can reach.

The memory is held until the cache is unregistered and the last call that uses it has returned.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shmkv._local import LocalCache
from shmkv.cache_layout import CacheLayout, layout
from shmkv.checks import shown
from shmkv.errors import LLMParamError
from shmkv.types import CacheDesc


@dataclass(frozen=True)
class CallerMemory:
    """Memory at an address; nothing here keeps it alive."""

    base: int


@dataclass(eq=False)
class RegisteredCache:
    """One registered cache. `local` refers to what keeps the memory."""

    cache_id: int
    layout: CacheLayout             # its offsets count from the memory's first byte
    local: LocalCache
    is_blocks: bool
    id_alive: bool = True

    @property
    def desc(self) -> CacheDesc:
        """What was registered."""
        return self.layout.desc

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of the tensors, in bytes from `local.memory.base`."""
        return self.layout.offsets


class RegisteredCaches:
    """Those of one cluster, by id; under the owner's lock, but for `dropped`."""

    def __init__(self) -> None:
        self._by_id: dict[int, RegisteredCache] = {}
        self.dropped: deque[RegisteredCache] = deque()      # those whose last handle is gone, put here without any lock

    def get(self, cache_id: int) -> RegisteredCache | None:
        """The registered cache with that id."""
        return self._by_id.get(cache_id)

    def add(self, cache: RegisteredCache) -> None:
        """From now on the cache can be used."""
        self._by_id[cache.cache_id] = cache

    def let_go(self, cache: RegisteredCache) -> None:
        """No new call may use the cache; its memory goes with the last reference to `cache.local`."""
        cache.id_alive = False
        cache.local.close()
        self._by_id.pop(cache.cache_id, None)

    def collect(self) -> None:
        """Let go of those that nobody holds any more."""
        while self.dropped:
            self.let_go(self.dropped.popleft())

    def close(self) -> None:
        """finalize: nothing is registered any more."""
        for cache in list(self._by_id.values()):
            self.let_go(cache)


def at_addresses(desc: CacheDesc, addresses: Sequence[int]) -> LocalCache:
    """Tensors of the caller, each in one piece at its address, as `create_cpu_cache` takes them. LLMParamError for a description
    that no memory can be asked for, and for addresses that no memory has."""
    for place, address in enumerate(addresses):
        if not 0 < address < 2**63 - desc.tensor_size(place):
            raise LLMParamError(f"tensor {place} is at address {shown(address)}, where no memory can be")
    base, shapes = min(addresses), layout(desc).tensors
    return LocalCache(CallerMemory(base), shapes.moved([address - base for address in addresses]))
