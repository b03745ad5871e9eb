"""Cache: what a caller of the second generation of the API holds of a cache."""
from __future__ import annotations

from typing import TYPE_CHECKING

from shmkv.cache_handle import CPU_CACHE_ID, CacheHandle
from shmkv.caches import Usable
from shmkv.checks import check_sequence, check_type, wrong_type
from shmkv.errors import LLMParamError
from shmkv.types import CacheDesc, Placement

if TYPE_CHECKING:
    from shmkv.manager_base import ManagerBase


class Cache(CacheHandle):
    """A cache of this process. Made by the calls of `CacheManager` that allocate and register, or around own memory by
    `create_cpu_cache`. Nothing happens when the last reference to it goes: what was allocated stays until it is deallocated.
    """

    def __init__(self, cache_id: int, cache_desc: CacheDesc, tensor_addrs: list[int] | None = None, is_blocks_cache: bool = False,
                 cache_manager: ManagerBase | None = None, own: Usable | None = None) -> None:
        super().__init__(cache_id, cache_desc, cache_manager, own)
        self._is_blocks = is_blocks_cache
        self._addrs = super()._addresses() if tensor_addrs is None else tensor_addrs

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Wrap memory of the caller as a blocks cache: placement HOST, one address a tensor.

        The addresses are not looked at before they are used, and the memory is never freed here.

        Raises:
            LLMParamError: placement, or a wrong number of addresses.
            TypeError: anything of a wrong type.
        """
        check_type("cache_desc", cache_desc, CacheDesc)
        numbers = list(check_sequence("addrs", addrs, int, containers=(list,)))
        if cache_desc.placement != Placement.HOST:
            raise LLMParamError(f"argument 'cache_desc' must have placement HOST, got {cache_desc.placement!s}")
        if not numbers or len(numbers) != cache_desc.num_tensors:
            raise LLMParamError(f"argument 'addrs' must have {cache_desc.num_tensors} addresses, at least one, got {len(numbers)}")
        return cls(CPU_CACHE_ID, cache_desc, numbers, is_blocks_cache=True)

    def _addresses(self) -> list[int]:
        return self._addrs

    def _close(self) -> None:
        super()._close()
        self._addrs = []

    @property
    def tensor_addrs(self) -> list[int]:
        """Addresses of the tensors in this process, empty after deallocate."""
        return self._addrs

    @property
    def is_blocks_cache(self) -> bool:
        """Are its rows blocks?"""
        return self._is_blocks

    def __repr__(self) -> str:
        return (f"Cache(cache_id = {self._cache_id}, device_tensor_addrs = {len(self._addrs)}, "
                f"is_blocks_cache = {self._is_blocks})")


def check_cache(name: str, cache: object) -> Cache:
    """Return `cache` if it is a Cache."""
    if not isinstance(cache, Cache):
        raise wrong_type(name, cache, Cache)
    return cache


def check_kind(name: str, cache: Cache, *, is_blocks: bool) -> None:
    """LLMParamError unless it is a blocks cache, or unless it is none."""
    if cache.is_blocks_cache != is_blocks:
        wanted = "a blocks cache" if is_blocks else "a cache whose rows are not blocks"
        raise LLMParamError(f"argument '{name}' must be {wanted}, got {cache!r}")
