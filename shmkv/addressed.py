"""Caches in memory of the caller that is given by addresses. The addresses are not touched before a call needs the bytes.

Where all of it lies in the segment of one cache that this cluster allocated, it is published by that segment and an offset, and so
others reach it as they reach that cache. All other memory is private: the directory has the address of each tensor in this process,
and no segment (serial 0).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shmkv._layout import KIND_REGISTERED, SEGMENT_DATA
from shmkv._local import LocalCache
from shmkv._mapping import Region
from shmkv.cache_layout import CacheLayout
from shmkv.checks import shown
from shmkv.errors import LLMParamError
from shmkv.own_cache import OwnCache
from shmkv.registered import CallerMemory
from shmkv.segment import Segment

PRIVATE_SERIAL = 0              # no segment has that number


class PrivateMemory(Segment):
    """Stands where other caches have their segment."""

    def __init__(self, nbytes: int) -> None:
        self.name = ""
        self.serial = PRIVATE_SERIAL
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """From the first byte of the first tensor to the last of the last, whatever lies between."""
        return self._nbytes


@dataclass
class AddressedCache(OwnCache):
    """One registered cache. `host`: the allocated cache in whose segment it lies, counted in as long as this one is there."""

    host: OwnCache | None = None

    @property
    def kind(self) -> int:
        return KIND_REGISTERED

    @property
    def own_region(self) -> Region | None:
        return None

    @property
    def own_nbytes(self) -> int:
        return 0

    def leave_host(self) -> None:
        """Nothing of this cache is used any more: whoever it lies in may go."""
        if self.host is not None:
            host, self.host = self.host, None
            host.local.leave()


def addressed_cache(cache_id: int, wanted: CacheLayout, addresses: Sequence[int], is_blocks: bool, blocks_model_id: int | None,
                    remote_accessible: bool, others: Iterable[OwnCache]) -> AddressedCache:
    """A cache at these addresses, one a tensor; `others` are those in whose segments it may lie. Under the owner's lock.
    LLMParamError for addresses that no memory has."""
    for place, address in enumerate(addresses):
        if not 0 < address < 2**63 - wanted.desc.tensor_size(place):
            raise LLMParamError(f"argument 'addrs' has {shown(address)} for tensor {place}, where no memory can be")
    ends = [address + wanted.desc.tensor_size(place) for place, address in enumerate(addresses)]
    host = next((cache for cache in others if _holds(cache, min(addresses), max(ends))), None)
    base = min(addresses) if host is None else host.local.memory.base
    memory = CallerMemory(base) if host is None else host.local.memory
    offsets = [address - base for address in addresses]
    layout = replace(wanted, tensors=wanted.tensors.moved(offsets), offsets=tuple(offsets))
    segment = PrivateMemory(max(ends) - base) if host is None else host.segment
    local = LocalCache(memory, layout.tensors, layout.format)
    return AddressedCache(cache_id, layout, segment, local, is_blocks, blocks_model_id, host=host,
                          remote_accessible=remote_accessible)


def _holds(cache: OwnCache, begin: int, end: int) -> bool:
    """Does all that memory lie in the segment of an allocated cache, behind its header?"""
    if isinstance(cache, AddressedCache) or cache.retired:
        return False
    base = cache.local.memory.base
    return bool(base + SEGMENT_DATA <= begin and end <= base + cache.segment.nbytes)
