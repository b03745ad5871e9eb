"""Tensor: an array with the element type and shape that llm_datadist speaks of, and its way back to numpy.

A Tensor made from an array owns a copy. A subclass over shared memory uses ``Tensor._over``: no copy.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shmkv.checks import check_bool, check_list_int64, check_type
from shmkv.errors import LLMParamError
from shmkv.types import DataType, data_type_to_np, np_to_data_type

AnyTensor = TypeVar("AnyTensor", bound="Tensor")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class TensorDesc:
    """Element type and shape of a tensor. TypeError or LLMParamError if they are none."""

    def __init__(self, dtype: DataType, shape: Sequence[int]) -> None:
        self._dtype = check_type("dtype", dtype, DataType)
        self._shape = list(check_list_int64("shape", shape))

    @property
    def dtype(self) -> DataType:
        """Element type."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Dims, as a new list."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"TensorDesc(dtype={self._dtype}, shape={self._shape})"


def _inferred(dtype: np.dtype[Any]) -> DataType:
    """Element type for an array without a description. A foreign byte order makes another dtype."""
    if dtype.kind in "SU":
        return DataType.DT_STRING
    if dtype == _BFLOAT16:
        return DataType.DT_BF16
    if dtype not in np_to_data_type:
        raise LLMParamError(f"argument 'data' has an unsupported dtype: {dtype!r}")
    return np_to_data_type[dtype]


def _matches(dtype: np.dtype[Any], wanted: DataType) -> bool:
    if wanted is DataType.DT_STRING:
        return dtype.kind in "SU"
    if wanted is DataType.DT_BF16 and dtype == _BFLOAT16:
        return True
    return dtype == np.dtype(data_type_to_np[wanted])


def _described(data: NDArray[Any], desc: TensorDesc | None) -> TensorDesc:
    """Return the description of `data`, which has to agree with `desc` if there is one."""
    if desc is None:
        return TensorDesc(_inferred(data.dtype), list(data.shape))
    if list(data.shape) != desc.shape:
        raise LLMParamError(f"argument 'data' has shape {list(data.shape)}, tensor_desc says {desc.shape}")
    if not _matches(data.dtype, desc.dtype):
        raise LLMParamError(f"argument 'data' has dtype {data.dtype!r}, tensor_desc says {desc.dtype}")
    return desc


def _bf16_to_float32(carrier: NDArray[Any]) -> NDArray[Any]:
    """A bfloat16 is the upper half of a float32; `carrier` is an array of any two-byte dtype."""
    bits = carrier.view(np.uint16).astype(np.uint32, order="C")
    # In place: an array without dims would come out of "<<" as a scalar.
    bits <<= 16
    return bits.view(np.float32)


class Tensor:
    """An array with a description.

    Args:
        data: C-contiguous ndarray, or another Tensor; copied.
        tensor_desc: has to agree with the data. With BF16 the bits of a float16 array are taken as bfloat16.

    Raises:
        TypeError: `data` is neither, or `tensor_desc` is no TensorDesc.
        LLMParamError (also a RuntimeError): data and description differ, unsupported dtype, not C-contiguous.
    """

    def __init__(self, data: NDArray[Any] | Tensor, tensor_desc: TensorDesc | None = None) -> None:
        check_type("data", data, np.ndarray, Tensor)
        if tensor_desc is not None:
            check_type("tensor_desc", tensor_desc, TensorDesc)
        if isinstance(data, Tensor):
            self._desc = data._clone_desc(tensor_desc)
            array = data._array
        else:
            self._desc = _described(data, tensor_desc)
            array = data
            if not array.flags.c_contiguous:
                raise LLMParamError("argument 'data' must be C-contiguous")
        self._array: NDArray[Any] = np.array(array, order="C", copy=True, subok=False)
        # A view of a read-only array cannot be made writable again by its holder.
        self._array.setflags(write=False)

    @classmethod
    def _over(cls: type[AnyTensor], array: NDArray[Any], desc: TensorDesc) -> AnyTensor:
        """Wrap `array`, which keeps its memory alive, without a copy; the caller vouches that it fits."""
        tensor = cls.__new__(cls)
        tensor._desc = desc
        tensor._array = array
        return tensor

    def _clone_desc(self, wanted: TensorDesc | None) -> TensorDesc:
        if wanted is not None and (wanted.dtype, wanted.shape) != (self._desc.dtype, self._desc.shape):
            raise LLMParamError(f"argument 'data' is described by {self._desc}, tensor_desc says {wanted}")
        return self._desc

    @property
    def tensor_desc(self) -> TensorDesc:
        """Element type and shape."""
        return self._desc

    def numpy(self, copy: bool = False) -> NDArray[Any]:
        """Return the content as an array of the tensor's shape.

        copy=False gives a read-only view, copy=True an independent, writable, C-contiguous array. BF16 is
        converted to float32 either way. Strings are only available as a copy (LLMParamError otherwise).
        """
        check_bool("copy", copy)
        if self._desc.dtype is DataType.DT_STRING and not copy:
            raise LLMParamError("a tensor of strings only support numpy(copy=True), got copy=False")
        if self._desc.dtype is DataType.DT_BF16:
            result = _bf16_to_float32(self._array)
        elif copy:
            result = np.array(self._array, order="C", copy=True, subok=False)
        else:
            result = self._array.view()
        result.setflags(write=copy)
        return result

    def __repr__(self) -> str:
        text = self.numpy(self._desc.dtype is DataType.DT_STRING)
        return f"Tensor({text},tensor_desc={self._desc})"
