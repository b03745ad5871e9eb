"""CacheDesc: what the tensors of a cache look like, all alike or each in its own way.

Nothing here touches shared memory. A description is checked when it is made; ``validate_for_allocation`` adds
what only an allocation asks for.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from shmkv.checks import (
    INT64_MAX,
    check_int,
    check_int32,
    check_int64,
    check_list_int64,
    check_positive,
    check_sequence,
    check_str,
    check_type,
    check_uint32,
    shown,
)
from shmkv.data_type import DataType
from shmkv.errors import LLMParamError, NamedIntEnum

TENSOR_ALIGNMENT = 64
MAX_DIMS = 31


class Placement(NamedIntEnum):
    """Where a cache lives: HOST is private memory, DEVICE is shared memory that others can pull from."""

    HOST = 0
    DEVICE = 1


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


def _nbytes(name: str, dims: Sequence[int], data_type: DataType) -> int:
    """Bytes of a tensor. LLMParamError, naming the argument, for a dim below 1 or a result beyond int64."""
    total = data_type.nbytes
    for dim in dims:
        total *= check_positive(name, dim)
        if total > INT64_MAX:
            raise LLMParamError(f"argument '{name}' exceeds 2**63 - 1 bytes: {shown(dims)}")
    return total


def _geometry(dims: Sequence[int], batch_dim: int, nbytes: int) -> RowGeometry:
    for dim in dims[: batch_dim + 1]:
        nbytes //= dim
    return RowGeometry(math.prod(dims[:batch_dim]), dims[batch_dim], nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


class CacheDesc:
    """Describes a cache: `num_tensors` tensors of one shape and one element type. For tensors that differ: `of_tensors`.

    Args:
        num_tensors: uint32. Zero is refused only by an allocation.
        shape: dims of one tensor, list or tuple of int64, not empty. A list is kept as it is, not copied.
        data_type: element type.
        placement: DEVICE (shared), for every call, or HOST (private), for `register_cache`, `register_blocks_cache` and
            `create_cpu_cache` alone: what `swap_blocks` copies out to and back from. In cache-manager mode HOST is for every
            call, and `allocate_cache` takes it out of the host pool.
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

    @staticmethod
    def of_tensors(shapes: Sequence[Sequence[int]], data_types: DataType | Sequence[DataType], *,
                   placement: Placement = Placement.DEVICE, batch_dim_index: int = 0, seq_len_dim_index: int = -1,
                   kv_tensor_format: str | None = None) -> CacheDesc:
        """Describe a cache whose tensors differ, one shape each: K and V of unequal size, sliding and full layers, states.

        `shapes` are lists or tuples of int64, at least one; `data_types` is one for all, or one each. The number of dims may
        differ, `batch_dim_index` is the same for all and so is the size of that dim: row b of the cache is row b of each tensor.
        Sizes, offsets and the rest of a row then hold for each tensor with its own row. `seq_len_dim_index` is -1 or a dim
        of some tensor. Tensors that are all alike make a plain description.

        Raises:
            TypeError: wrong type of an argument.
            LLMParamError: value out of range, unequal numbers or batch sizes, naming argument and tensor.
        """
        dims = [tuple(check_list_int64(f"shapes[{place}]", shape))
                for place, shape in enumerate(check_sequence("shapes", shapes, list, tuple))]
        each = [data_types] * len(dims) if isinstance(data_types, DataType) else list(
            check_sequence("data_types", data_types, DataType, containers=(list, tuple, DataType)))
        if not dims or len(each) != len(dims):
            raise LLMParamError("arguments 'shapes' and 'data_types' must have an element for each tensor, got "
                                f"{len(dims)} and {len(each)}")
        rest = (placement, batch_dim_index, seq_len_dim_index, kv_tensor_format)
        if len(set(dims)) == 1 and len(set(each)) == 1:
            return CacheDesc(len(dims), list(dims[0]), each[0], *rest)
        return _MixedDesc(tuple(dims), tuple(each), *rest)

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
        return _nbytes("shape", self._shape, self._data_type)

    @property
    def row_geometry(self) -> RowGeometry:
        """Where the rows of a tensor lie. Raises LLMParamError as `size` does."""
        return _geometry(self._shape, self._batch_dim, self.size)

    @property
    def is_uniform(self) -> bool:
        """Do all tensors have one shape and one element type? If not, only the calls that take a tensor index say what they are."""
        return True

    def tensor_shape(self, tensor_index: int) -> list[int]:
        """Dims of one tensor, as a new list. LLMParamError if there is no such tensor."""
        self._check_index(tensor_index)
        return list(self._shape)

    def tensor_data_type(self, tensor_index: int) -> DataType:
        """Element type of one tensor. LLMParamError if there is no such tensor."""
        self._check_index(tensor_index)
        return self._data_type

    def tensor_size(self, tensor_index: int) -> int:
        """Bytes of one tensor. LLMParamError as for `size`, or if there is no such tensor."""
        self._check_index(tensor_index)
        return self.size

    def tensor_row_geometry(self, tensor_index: int) -> RowGeometry:
        """Where the rows of one tensor lie. LLMParamError as for `tensor_size`."""
        self._check_index(tensor_index)
        return self.row_geometry

    def _check_index(self, tensor_index: int) -> int:
        if 0 <= check_int("tensor_index", tensor_index) < self._num_tensors:
            return tensor_index
        raise LLMParamError(f"argument 'tensor_index' must be in [0, {self._num_tensors}), got {shown(tensor_index)}")

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

    @staticmethod
    def from_values(values: tuple[Any, ...]) -> CacheDesc:
        """The description that `values` was taken from."""
        if isinstance(values[2], DataType):
            return CacheDesc(values[0], list(values[1]), *values[2:])
        return _MixedDesc(*values[1:])

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
        rounded = _rounded(self.size)
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


class _MixedDesc(CacheDesc):
    """What `of_tensors` makes of tensors that differ. Its shapes are its own: only `update_dim` changes them.

    Calls that take a tensor index answer for that tensor what the plain description says for all; the others refuse what differs.
    """

    def __init__(self, shapes: tuple[tuple[int, ...], ...], data_types: tuple[DataType, ...], placement: Placement,
                 batch_dim_index: int, seq_len_dim_index: int, kv_tensor_format: str | None) -> None:
        longest = max(shapes, key=len)
        super().__init__(len(shapes), longest, data_types[0], placement, batch_dim_index, seq_len_dim_index, kv_tensor_format)
        self._shapes = shapes
        self._data_types = data_types
        self._check_batch_sizes()

    def _check_batch_sizes(self) -> None:
        dim = self._batch_dim
        for place, shape in enumerate(self._shapes):
            found = f"shapes[{place}] = {shown(list(shape))}"
            if dim >= len(shape):
                raise LLMParamError(f"argument 'batch_dim_index' must be a dim of every tensor, got {dim} for {found}")
            if shape[dim] != self.batch_size:
                raise LLMParamError(f"argument 'shapes' must have one batch size, got {found} and, in dim {dim} of shapes[0], "
                                    f"{shown(self.batch_size)}")

    @staticmethod
    def _differ(what: str, instead: str) -> NoReturn:
        raise LLMParamError(f"the tensors of this cache have no {what} in common: ask {instead}(tensor_index)")

    @property
    def shape(self) -> list[int]:
        """Raises LLMParamError unless only the element types differ."""
        if len(set(self._shapes)) > 1:
            self._differ("shape", "tensor_shape")
        return list(self._shapes[0])

    @property
    def data_type(self) -> DataType:
        """Raises LLMParamError unless only the shapes differ."""
        if len(set(self._data_types)) > 1:
            self._differ("data_type", "tensor_data_type")
        return self._data_types[0]

    @property
    def batch_size(self) -> int:
        """Number of rows, the same in all tensors."""
        return self._shapes[0][self._batch_dim]

    @property
    def size(self) -> int:
        """Raises LLMParamError: `tensor_size` says it."""
        self._differ("size", "tensor_size")

    @property
    def row_geometry(self) -> RowGeometry:
        """Raises LLMParamError: `tensor_row_geometry` says it."""
        self._differ("rows", "tensor_row_geometry")

    @property
    def is_uniform(self) -> bool:
        """False."""
        return False

    def tensor_shape(self, tensor_index: int) -> list[int]:
        """Dims of one tensor, as a new list."""
        return list(self._shapes[self._check_index(tensor_index)])

    def tensor_data_type(self, tensor_index: int) -> DataType:
        """Element type of one tensor."""
        return self._data_types[self._check_index(tensor_index)]

    def tensor_size(self, tensor_index: int) -> int:
        """Bytes of one tensor."""
        shape = self._shapes[self._check_index(tensor_index)]
        return _nbytes(f"shapes[{tensor_index}]", shape, self._data_types[tensor_index])

    def tensor_row_geometry(self, tensor_index: int) -> RowGeometry:
        """Where the rows of one tensor lie."""
        nbytes = self.tensor_size(tensor_index)
        return _geometry(self._shapes[tensor_index], self._batch_dim, nbytes)

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Set the batch size of all tensors (int64). Raises LLMParamError for any other dim: that is another description."""
        if check_int("dim_index", dim_index) != self._batch_dim:
            raise LLMParamError(f"argument 'dim_index' must be the batch dim {self._batch_dim} where tensors differ, got "
                                f"{shown(dim_index)}: make another description with CacheDesc.of_tensors")
        value = (check_int64("dim_value", dim_value),)
        self._shapes = tuple(shape[:dim_index] + value + shape[dim_index + 1:] for shape in self._shapes)

    def values(self) -> tuple[object, ...]:
        """What the description says now, as a value that can be a key."""
        return (self._num_tensors, self._shapes, self._data_types, self._placement, self._batch_dim, self._seq_len_dim_index,
                self._kv_tensor_format)

    def validate_for_allocation(self) -> None:
        """As for a plain description: each tensor's dims, and all tensors together, each rounded up to 64 bytes, within int64."""
        total = 0
        for place, shape in enumerate(self._shapes):
            if len(shape) > MAX_DIMS:
                raise LLMParamError(f"argument 'shapes[{place}]' must have at most {MAX_DIMS} dims, got {len(shape)}")
            total += _rounded(self.tensor_size(place))
        if total > INT64_MAX:
            raise LLMParamError(f"argument 'shapes' is too large: {total} bytes in {self._num_tensors} tensors exceed int64")

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shapes={shown([list(shape) for shape in self._shapes])}, "
            f"data_types={shown(list(map(str, self._data_types)))}, ".replace("'", "")
            + f"placement={self._placement}, batch_dim_index={self._batch_dim}, seq_len_dim_index={self._seq_len_dim_index}, "
            f"kv_tensor_format={self._kv_tensor_format})"
        )
