"""KvCache: what a caller holds of an allocated cache, and the views of its tensors."""
from __future__ import annotations

from typing import TYPE_CHECKING

from shmkv._drop import OnDrop
from shmkv._mapping import Region
from shmkv._view import TensorView
from shmkv.cache_handle import CPU_CACHE_ID, CacheHandle
from shmkv.caches import Usable
from shmkv.checks import check_sequence, check_type, wrong_type
from shmkv.errors import LLMParamError
from shmkv.types import CacheDesc, DataType, Placement, storage_dtype

if TYPE_CHECKING:
    from shmkv.manager_base import ManagerBase

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


class KvCache(CacheHandle):
    """A cache of this process. Made by the calls of a manager that allocate, register and fork, or around memory of the caller by
    `create_cpu_cache`.

    `cache_id` is unique until finalize; `per_device_tensor_addrs` has one list with the address of each tensor in this process,
    and is empty after deallocate; `tensors` are zero-copy views of what was allocated or forked, in the same order, and () for
    memory of the caller, registered or wrapped.
    """

    def __init__(self, cache_id: int, cache_desc: CacheDesc, per_device_tensor_addrs: list[list[int]] | None,
                 kv_cache_manager: ManagerBase | None = None, own: Usable | None = None) -> None:
        super().__init__(cache_id, cache_desc, kv_cache_manager, own)
        self._addrs = per_device_tensor_addrs       # None: worked out when asked for
        # When the last reference to this object goes, the cache is deallocated by the manager's next call.
        self._on_drop = None if own is None or kv_cache_manager is None else OnDrop(kv_cache_manager._dropped(own), own)

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

    def _addresses(self) -> list[int]:
        return [] if not self.per_device_tensor_addrs else self.per_device_tensor_addrs[0]

    def _close(self) -> None:
        if self._on_drop is not None:
            self._on_drop.disarm()
        super()._close()
        self._addrs = []

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Addresses of the tensors in this process: one inner list, empty list after deallocate."""
        if self._addrs is None:
            self._addrs = [] if self._own is None else [super()._addresses()]
        return self._addrs

    def __repr__(self) -> str:
        return f"KvCache(cache_id = {self._cache_id}, num_devices = {max(len(self.per_device_tensor_addrs), 1)})"


def check_kv_cache(name: str, cache: object) -> KvCache:
    """Return `cache` if it is a KvCache."""
    if not isinstance(cache, KvCache):
        raise wrong_type(name, cache, KvCache)
    return cache
