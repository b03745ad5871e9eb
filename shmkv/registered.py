"""Caches in memory of the caller: destinations of pulls and ends of local copies, which nobody else can reach.

The memory is held until the cache is unregistered and the last call that uses it has returned.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shmkv._local import LocalCache
from shmkv._mapping import Region
from shmkv._plan import ShapeList
from shmkv.cache_layout import CacheLayout, layout
from shmkv.checks import shown
from shmkv.errors import LLMParamError
from shmkv.types import CacheDesc
from shmkv.user_memory import HeldMemory


@dataclass(frozen=True)
class CallerMemory:
    """Memory at an address; nothing here keeps it alive."""

    base: int


@dataclass(eq=False)
class RegisteredCache:
    """One registered cache. `local` refers to what keeps the memory, and so may a pull that was prepared."""

    cache_id: int
    layout: CacheLayout             # its offsets count from the memory's first byte
    local: LocalCache
    is_blocks: bool
    held: HeldMemory | Region
    id_alive: bool = True

    @classmethod
    def over(cls, held: HeldMemory | Region, cache_id: int, layout: CacheLayout, is_blocks: bool) -> RegisteredCache:
        """A cache in memory of the caller, or in a mapping of this process (a fork)."""
        return cls(cache_id, layout, LocalCache(held, layout.tensors, layout.format), is_blocks, held)

    @property
    def desc(self) -> CacheDesc:
        """What was registered."""
        return self.layout.desc

    @property
    def region(self) -> Region | None:
        """The mapping, if it is in one."""
        return self.held if isinstance(self.held, Region) else None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of the tensors, in bytes from `local.memory.base`."""
        return self.layout.offsets

    def release(self) -> None:
        """Give back the memory of a cache that was let go of, unless a call uses it still, which keeps it until its end. A mapping
        goes with the last view of it, and is not kept by a pull that was prepared."""
        if self.local.uses:
            return
        if isinstance(self.held, HeldMemory):
            self.held.release()
        else:
            self.local.forget(CallerMemory(self.local.memory.base))


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
        """No new call may use the cache. Its memory is left to `release`, which need not be called under the lock: what goes with
        the memory may be the caller's code."""
        cache.id_alive = False
        cache.local.close()
        self._by_id.pop(cache.cache_id, None)

    def collect(self) -> None:
        """Let go of those that nobody holds any more."""
        while self.dropped:
            self._end(self.dropped.popleft())

    def close(self) -> None:
        """finalize: nothing is registered any more."""
        for cache in list(self._by_id.values()):
            self._end(cache)

    def _end(self, cache: RegisteredCache) -> None:
        self.let_go(cache)
        cache.release()


def held_layout(wanted: CacheLayout, held: HeldMemory) -> CacheLayout:
    """The layout of a description in memory of the caller."""
    kinds = (wanted.desc.tensor_data_type(place).value for place in range(wanted.desc.num_tensors))
    shapes = [(rows.offset, rows.nbytes, rows.outer, rows.rows, rows.inner, kind, rows.row_pitch, rows.piece_pitch)
              for rows, kind in zip(held.tensors, kinds, strict=True)]
    return replace(wanted, tensors=ShapeList(list(shapes)), offsets=tuple(shape[0] for shape in shapes), nbytes=held.nbytes)


def at_addresses(desc: CacheDesc, addresses: Sequence[int]) -> LocalCache:
    """Tensors of the caller, each in one piece at its address, as `create_cpu_cache` takes them. LLMParamError for a description
    that no memory can be asked for, and for addresses that no memory has."""
    for place, address in enumerate(addresses):
        if not 0 < address < 2**63 - desc.tensor_size(place):
            raise LLMParamError(f"tensor {place} is at address {shown(address)}, where no memory can be")
    base, shapes = min(addresses), layout(desc).tensors
    return LocalCache(CallerMemory(base), shapes.moved([address - base for address in addresses]))
