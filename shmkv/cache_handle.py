"""What a caller holds of a cache in either generation of the API: the cache behind it, and the pulls prepared into it."""
from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shmkv._pull import PreparedPull
from shmkv._view import TensorView
from shmkv.caches import Usable
from shmkv.checks import ApiObject, check_int64, check_type
from shmkv.heads import HeadSlice
from shmkv.types import CacheDesc, Placement

if TYPE_CHECKING:
    from shmkv.manager_base import ManagerBase

CPU_CACHE_ID = -1
PREPARED_KEPT = 32
OPTION_TYPES = (int, type(None), range, HeadSlice)

# size, src_layer_range, dst_layer_range, src_cache_offset, dst_cache_offset, tensor_num_per_layer, heads, strict_format
PullOptions = tuple[int, "range | None", "range | None", "int | None", "int | None", int, "HeadSlice | None", bool]


class CacheHandle(ApiObject):
    """A cache of this process: `cache_id` is unique until finalize, `tensors` are zero-copy views of what is not the caller's."""

    def __init__(self, cache_id: int, cache_desc: CacheDesc, manager: ManagerBase | None = None, own: Usable | None = None) -> None:
        self._cache_id = check_int64("cache_id", cache_id)
        self._cache_desc = check_type("cache_desc", cache_desc, CacheDesc)
        self._manager = manager
        self._own = own                             # None once it was deallocated, and for own memory of the caller
        self._local = None if own is None else own.local
        self._prepared: dict[PullOptions, PreparedPull] = {}    # made by the first pull with some options
        self._last: PreparedPull | None = None                  # the one that was used last
        self._is_host = cache_desc.placement == Placement.HOST
        self._tensors: tuple[TensorView, ...] = ()
        self._is_valid = True

    def _addresses(self) -> list[int]:
        """Where the tensors are in this process; empty after deallocate."""
        own = self._own
        return [] if own is None else [own.local.memory.base + offset for offset in own.offsets]

    def _close(self) -> None:
        """Deallocated: no address and no view any more; what was made of a view keeps its memory."""
        self._is_valid = False
        self._tensors = ()
        self._own = self._local = None
        self._last = None
        self._prepared = {}

    def _prepared_for(self, *options: object) -> PreparedPull | None:
        """The prepared pull that is kept for these options. Their types matter, since 8 and 8.0 are one key of a dict."""
        if not all(type(option) in OPTION_TYPES for option in options[:-1]) or type(options[-1]) is not bool:
            return None
        prepared = self._prepared.get(cast(PullOptions, options))
        if prepared is not None:
            prepared.note_options(options)
            self._last = prepared
        return prepared

    def _keep_prepared(self, options: PullOptions, prepared: PreparedPull) -> None:
        """Whoever has more sets of options than are kept pays for the checks each time."""
        if len(self._prepared) < PREPARED_KEPT:
            self._prepared[options] = prepared

    @property
    def cache_id(self) -> int:
        """Number of the cache, -1 for one that `create_cpu_cache` made."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What was asked for at allocation."""
        return self._cache_desc

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """A writable view of each tensor on the memory itself, in order; () after deallocate, and for memory of the caller,
        registered or wrapped."""
        if self._is_valid and not self._tensors and self._manager is not None:
            self._tensors = self._manager._views(self)
        return self._tensors

    @property
    def is_blocks_cache(self) -> bool:
        """Was it made by `allocate_blocks_cache` or `register_blocks_cache`?"""
        return self._own is not None and self._own.is_blocks

    @property
    def is_host(self) -> bool:
        """Is its placement HOST?"""
        return self._is_host
