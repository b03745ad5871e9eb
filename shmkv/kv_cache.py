"""KvCache: what a caller holds of an allocated cache, and the views of its tensors."""
from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shmkv._drop import OnDrop
from shmkv._mapping import Region
from shmkv._pull import PreparedPull
from shmkv._view import TensorView
from shmkv.caches import Usable
from shmkv.checks import Uncopyable, check_int64, check_sequence, check_type, wrong_type
from shmkv.errors import LLMParamError
from shmkv.heads import HeadSlice
from shmkv.types import CacheDesc, DataType, Placement, storage_dtype

if TYPE_CHECKING:
    from shmkv.manager_base import ManagerBase

CPU_CACHE_ID = -1
PREPARED_KEPT = 32
OPTION_TYPES = (int, type(None), range, HeadSlice)

# size, src_layer_range, dst_layer_range, src_cache_offset, dst_cache_offset, tensor_num_per_layer, heads, strict_format
PullOptions = tuple[int, "range | None", "range | None", "int | None", "int | None", int, "HeadSlice | None", bool]

# DLPack's (type code, bits): signed 0, unsigned 1, float 2, bfloat 4, bool 6, float8 10 and 12 (from DLPack 1.1 on); no bits =
# DLPack has no such type.
_DLPACK = {
    DataType.DT_FLOAT: (2, 32), DataType.DT_FLOAT16: (2, 16), DataType.DT_DOUBLE: (2, 64), DataType.DT_BF16: (4, 16),
    DataType.DT_INT8: (0, 8), DataType.DT_INT16: (0, 16), DataType.DT_INT32: (0, 32), DataType.DT_INT64: (0, 64),
    DataType.DT_UINT8: (1, 8), DataType.DT_UINT16: (1, 16), DataType.DT_UINT32: (1, 32), DataType.DT_UINT64: (1, 64),
    DataType.DT_BOOL: (6, 8), DataType.DT_STRING: (0, 0),
    DataType.DT_FLOAT8_E4M3FN: (10, 8), DataType.DT_FLOAT8_E5M2: (12, 8),
}
# Letters of the buffer protocol; none = it has no such type.
_FORMAT = {
    DataType.DT_FLOAT: b"f", DataType.DT_FLOAT16: b"e", DataType.DT_DOUBLE: b"d", DataType.DT_BF16: b"",
    DataType.DT_INT8: b"b", DataType.DT_INT16: b"h", DataType.DT_INT32: b"i", DataType.DT_INT64: b"q",
    DataType.DT_UINT8: b"B", DataType.DT_UINT16: b"H", DataType.DT_UINT32: b"I", DataType.DT_UINT64: b"Q",
    DataType.DT_BOOL: b"?", DataType.DT_STRING: b"", DataType.DT_FLOAT8_E4M3FN: b"", DataType.DT_FLOAT8_E5M2: b"",
}


def make_view(region: Region, offset: int, desc: CacheDesc, tensor_index: int) -> TensorView:
    """A view of one tensor of a cache, `offset` bytes into its segment."""
    return view_of(region, offset, tuple(desc.tensor_shape(tensor_index)), desc.tensor_data_type(tensor_index))


def view_of(region: Region, offset: int, shape: tuple[int, ...], kind: DataType, *, readonly: bool = False,
            pitch: int = 0) -> TensorView:
    """A view of elements of one kind, `offset` bytes into a mapping; `pitch`: bytes between indices of axis 0, 0 = no gaps."""
    return TensorView(region, offset, shape, kind, storage_dtype(kind), _FORMAT[kind], _DLPACK[kind], readonly, pitch)


def row_shape(desc: CacheDesc, number: int, outer: int) -> tuple[int, ...]:
    """The shape of one row of a tensor: its dims without the batch dimension; those before it are one axis where the pieces of a
    row lie apart."""
    shape = desc.tensor_shape(number)
    if outer > 1:
        return (outer, *shape[desc.batch_dim + 1:])
    return (*shape[:desc.batch_dim], *shape[desc.batch_dim + 1:])


class KvCache(Uncopyable):
    """A cache of this process. Made by `allocate_cache` and `register_cache` of a manager, or around own memory by
    `create_cpu_cache`.

    `cache_id` is unique until finalize; `per_device_tensor_addrs` has one list with the address of each tensor in this process,
    and is empty after deallocate; `tensors` are zero-copy views, in the same order.
    """

    def __init__(self, cache_id: int, cache_desc: CacheDesc, per_device_tensor_addrs: list[list[int]] | None,
                 kv_cache_manager: ManagerBase | None = None, own: Usable | None = None) -> None:
        self._cache_id = check_int64("cache_id", cache_id)
        self._cache_desc = check_type("cache_desc", cache_desc, CacheDesc)
        self._addrs = per_device_tensor_addrs       # None: worked out when asked for
        self._manager = kv_cache_manager
        self._own = own                             # None once it was deallocated, and for own memory of the caller
        self._local = None if own is None else own.local
        # When the last reference to this object goes, the cache is deallocated by the manager's next call.
        self._on_drop = None if own is None or kv_cache_manager is None else OnDrop(kv_cache_manager._dropped(own), own)
        self._prepared: dict[PullOptions, PreparedPull] = {}    # made by the first pull with some options
        self._last: PreparedPull | None = None                  # the one that was used last
        self._is_host = cache_desc.placement == Placement.HOST
        self._tensors: tuple[TensorView, ...] = ()
        self._is_valid = True

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Wrap memory of the caller: placement HOST, one address a tensor (or one such list a device).

        The addresses are not looked at before they are used, and the memory is never freed here.

        Raises:
            LLMParamError: placement, a wrong number of addresses, or numbers and lists mixed.
            TypeError: anything of a wrong type.
        """
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("addrs", addrs, list)
        if cache_desc.placement != Placement.HOST:
            raise LLMParamError(f"argument 'cache_desc' must have placement HOST, got {cache_desc.placement!s}")
        devices = cls._per_device(addrs)
        for device in devices:
            if len(device) != cache_desc.num_tensors:
                raise LLMParamError(f"argument 'addrs' must have {cache_desc.num_tensors} addresses, got {len(device)}")
        return cls(CPU_CACHE_ID, cache_desc, devices)

    @staticmethod
    def _per_device(addrs: list[int] | list[list[int]]) -> list[list[int]]:
        if not addrs:
            raise LLMParamError("argument 'addrs' must not be empty")
        kinds = {list if isinstance(element, list) else int for element in addrs if isinstance(element, (int, list))}
        if len(kinds) > 1:
            raise LLMParamError("the elements of argument 'addrs' should be consistent: all int or all list")
        if kinds == {list}:
            return [list(check_sequence("addrs", device, int)) for device in addrs]
        numbers = check_sequence("addrs", addrs, int, list)
        return [[element for element in numbers if isinstance(element, int)]]

    def _close(self) -> None:
        """Deallocated: no address and no view any more; what was made of a view keeps its memory."""
        self._is_valid = False
        if self._on_drop is not None:
            self._on_drop.disarm()
        self._addrs = []
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
        """Number of the cache, -1 for one around own memory."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What was asked for at allocation."""
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Addresses of the tensors in this process: one inner list, empty list after deallocate."""
        if self._addrs is None:
            own = self._own
            self._addrs = [] if own is None else [[own.local.memory.base + offset for offset in own.offsets]]
        return self._addrs

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        """A view of each tensor on the shared memory itself, writable; () after deallocate and for memory of the caller."""
        if self._is_valid and not self._tensors and self._manager is not None:
            self._tensors = self._manager._views(self)
        return self._tensors

    @property
    def is_blocks_cache(self) -> bool:
        """Was it made by `allocate_blocks_cache` or `register_blocks_cache`?"""
        return self._own is not None and self._own.is_blocks

    @property
    def is_host(self) -> bool:
        """Is this own memory of the caller?"""
        return self._is_host

    def __repr__(self) -> str:
        return f"KvCache(cache_id = {self._cache_id}, num_devices = {max(len(self.per_device_tensor_addrs), 1)})"


def check_kv_cache(name: str, cache: object) -> KvCache:
    """Return `cache` if it is a KvCache."""
    if not isinstance(cache, KvCache):
        raise wrong_type(name, cache, KvCache)
    return cache
