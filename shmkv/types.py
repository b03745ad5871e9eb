"""Values that callers hold: enumerations, element types, the description of a cache, a memory range.

Nothing here touches shared memory. A description is checked when it is made; ``validate_for_allocation`` adds
what only an allocation asks for.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from shmkv.checks import (
    INT64_MAX,
    check_int,
    check_int32,
    check_int64,
    check_list_int64,
    check_positive,
    check_str,
    check_type,
    check_uint32,
    shown,
)
from shmkv.errors import LLMParamError, NamedIntEnum

TENSOR_ALIGNMENT = 64
MAX_DIMS = 31


class LLMRole(NamedIntEnum):
    """What a cluster does: prefill prompts, decode, or neither as yet."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(NamedIntEnum):
    """Where a cache lives: HOST is private memory, DEVICE is shared memory that others can pull from."""

    HOST = 0
    DEVICE = 1


class Memtype(Enum):
    """Kind of memory that a MemInfo describes."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(Enum):
    """How far the members of a communication have come."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class DataType(Enum):
    """Element type of a tensor; the numbers are those of llm_datadist."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return _STORAGE[self].itemsize


# In these tables float16 carries the bits of a bfloat16, and no numpy type leads back to BF16.
data_type_to_np: dict[DataType, type[np.generic]] = {
    DataType.DT_FLOAT: np.float32,
    DataType.DT_FLOAT16: np.float16,
    DataType.DT_BF16: np.float16,
    DataType.DT_INT8: np.int8,
    DataType.DT_INT16: np.int16,
    DataType.DT_UINT16: np.uint16,
    DataType.DT_UINT8: np.uint8,
    DataType.DT_INT32: np.int32,
    DataType.DT_INT64: np.int64,
    DataType.DT_UINT32: np.uint32,
    DataType.DT_UINT64: np.uint64,
    DataType.DT_BOOL: np.bool_,
    DataType.DT_DOUBLE: np.float64,
    DataType.DT_STRING: np.bytes_,
}
valid_np_dtypes: list[type[np.generic]] = list(data_type_to_np.values())
np_to_data_type: dict[np.dtype[Any], DataType] = {
    np.dtype(np_type): data_type
    for data_type, np_type in data_type_to_np.items()
    if data_type is not DataType.DT_BF16
}

_STORAGE: dict[DataType, np.dtype[Any]] = {
    **{data_type: np.dtype(np_type) for data_type, np_type in data_type_to_np.items()},
    DataType.DT_BF16: np.dtype(ml_dtypes.bfloat16),
    DataType.DT_STRING: np.dtype("V16"),
}


def storage_dtype(data_type: DataType) -> np.dtype[Any]:
    """Return the numpy dtype of a zero-copy view: ml_dtypes.bfloat16 for BF16, 16 opaque bytes for STRING."""
    return _STORAGE[data_type]


class RowGeometry(NamedTuple):
    """How the rows of a tensor lie in its bytes.

    Row ``b`` consists of `outer` pieces of `inner_nbytes` bytes; piece ``p`` starts at byte
    ``(p * rows + b) * inner_nbytes``. With the batch dimension in front a row is one piece.
    """

    outer: int
    rows: int
    inner_nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row: the stride of the contract."""
        return self.outer * self.inner_nbytes


class CacheDesc:
    """Describes a cache: `num_tensors` tensors of one shape and one element type.

    Args:
        num_tensors: uint32. Zero is refused only by an allocation.
        shape: dims of one tensor, list or tuple of int64, not empty. A list is kept as it is, not copied.
        data_type: element type.
        placement: DEVICE (shared) or HOST (private).
        batch_dim_index: which dim counts the rows that keys name and transfers move.
        seq_len_dim_index: -1 or the index of a dim; stored only.
        kv_tensor_format: any text or None; stored only.

    Raises:
        TypeError: wrong type of an argument.
        LLMParamError: value out of range.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: list[int] | tuple[int, ...],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = check_uint32("num_tensors", num_tensors)
        dims = check_list_int64("shape", shape)
        self._shape: list[int] = dims if isinstance(dims, list) else list(dims)
        self._data_type = check_type("data_type", data_type, DataType)
        self._placement = check_type("placement", placement, Placement)
        self._batch_dim = check_int("batch_dim_index", batch_dim_index)
        self._seq_len_dim_index = check_int32("seq_len_dim_index", seq_len_dim_index)
        if kv_tensor_format is not None:
            check_str("kv_tensor_format", kv_tensor_format)
        self._kv_tensor_format = kv_tensor_format
        self._check_dims()

    def _check_dims(self) -> None:
        """Shape and indices fit together; asked again later, as the caller's list may have changed."""
        check_list_int64("shape", self._shape)
        if not self._shape:
            raise LLMParamError("argument 'shape' must have at least one dim, got []")
        count = len(self._shape)
        if not 0 <= self._batch_dim < count:
            raise LLMParamError(
                f"argument 'batch_dim_index' must be in [0, {count}), got {shown(self._batch_dim)}"
            )
        if not -1 <= self._seq_len_dim_index < count:
            raise LLMParamError(
                f"argument 'seq_len_dim_index' must be -1 or in [0, {count}), got {self._seq_len_dim_index}"
            )

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return self._num_tensors

    @property
    def shape(self) -> list[int]:
        """Dims of one tensor; the caller's own list if a list was given."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """HOST or DEVICE."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """Index of the dim that counts rows."""
        return self._batch_dim

    @property
    def batch_size(self) -> int:
        """Number of rows, as the shape says now."""
        return self._shape[self._batch_dim]

    @property
    def seq_len_dim_index(self) -> int:
        """As given; not used by any transfer."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """As given; not used by any transfer."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor. Raises LLMParamError for a dim below 1 or a result beyond int64."""
        self._check_dims()
        total = self._data_type.nbytes
        for dim in self._shape:
            total *= check_positive("shape", dim)
            if total > INT64_MAX:
                raise LLMParamError(f"argument 'shape' exceeds 2**63 - 1 bytes: {shown(self._shape)}")
        return total

    @property
    def row_geometry(self) -> RowGeometry:
        """Where the rows of a tensor lie. Raises LLMParamError as `size` does."""
        inner = self.size
        for dim in self._shape[: self._batch_dim + 1]:
            inner //= dim
        return RowGeometry(math.prod(self._shape[: self._batch_dim]), self.batch_size, inner)

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Set one dim (int64); sizes and rows follow. Raises LLMParamError if there is no such dim."""
        count = len(self._shape)
        if not 0 <= check_int("dim_index", dim_index) < count:
            raise LLMParamError(f"argument 'dim_index' must be in [0, {count}), got {shown(dim_index)}")
        self._shape[dim_index] = check_int64("dim_value", dim_value)

    def values(self) -> tuple[object, ...]:
        """What the description says now, as a value that can be a key. TypeError or LLMParamError if the caller's list does not
        hold a shape any more."""
        if not all(type(dim) is int for dim in self._shape):
            self._check_dims()
        return (self._num_tensors, tuple(self._shape), self._data_type, self._placement, self._batch_dim,
                self._seq_len_dim_index, self._kv_tensor_format)

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> CacheDesc:
        """The description that `values` was taken from."""
        return cls(values[0], list(values[1]), *values[2:])

    def snapshot(self) -> CacheDesc:
        """Return a copy that later changes of this description, or of the caller's list, do not reach."""
        return self.from_values(self.values())

    def validate_for_allocation(self) -> None:
        """Raise LLMParamError, naming the argument, unless memory for this description can be asked for.

        Wanted: 1 to 31 dims, all above zero; at least one tensor; all tensors together, each rounded up to 64
        bytes, within int64.
        """
        self._check_dims()
        if len(self._shape) > MAX_DIMS:
            raise LLMParamError(f"argument 'shape' must have at most {MAX_DIMS} dims, got {len(self._shape)}")
        rounded = -(-self.size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        if check_positive("num_tensors", self._num_tensors) * rounded > INT64_MAX:
            raise LLMParamError(
                f"argument 'num_tensors' is too large: {self._num_tensors} x {rounded} bytes exceed int64"
            )

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim}, "
            f"seq_len_dim_index={self._seq_len_dim_index}, kv_tensor_format={self._kv_tensor_format})"
        )


@dataclass(frozen=True, repr=False)
class MemInfo:
    """A memory range. Only the types are checked here; whether it makes sense is for its user to say."""

    mem_type: Memtype
    addr: int
    size: int

    def __post_init__(self) -> None:
        check_type("mem_type", self.mem_type, Memtype)
        check_int("addr", self.addr)
        check_int("size", self.size)

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self.mem_type}, addr={self.addr}, size={self.size})"
