"""Contract, appendix A6: tensors (and the tensor part of A3.12). Item numbers are in the names."""
from __future__ import annotations

import numpy as np

from shmkv.tensor import Tensor, TensorDesc
from shmkv.types import DataType


def test_a6_1_two_dimensional_strings() -> None:
    source = np.array([["one", "two"], ["three", "four"]])
    result = Tensor(source).numpy(True)
    assert result.dtype == source.dtype
    np.testing.assert_array_equal(result, source)


def test_a6_2_float32_without_desc() -> None:
    assert Tensor(np.ones((1, 4), np.float32)).numpy().dtype == np.float32


def test_a6_3_int32_with_a_tuple_as_shape() -> None:
    desc = TensorDesc(DataType.DT_INT32, (1, 256))
    assert Tensor(np.ones((1, 256), np.int32), desc).numpy().dtype == np.int32


def test_a6_4_float16_bits_as_bf16() -> None:
    result = Tensor(np.array([1.875], np.float16), TensorDesc(DataType.DT_BF16, [1])).numpy()
    assert result.dtype == np.float32
    assert int(result[0]) == 1


def test_a6_5_float16_as_float16() -> None:
    result = Tensor(np.array([1.875], np.float16), TensorDesc(DataType.DT_FLOAT16, [1])).numpy()
    assert (result.dtype, result[0]) == (np.float16, 1.875)


def test_a6_6_copy_is_independent() -> None:
    source = np.array([[1, 2], [3, 4]], np.float32)
    result = Tensor(source).numpy(copy=True)
    source[:] = 0
    np.testing.assert_array_equal(result, np.array([[1, 2], [3, 4]], np.float32))
    assert result.flags.c_contiguous
    assert result.flags.writeable


def test_a3_12_printing_tensors() -> None:
    tensor = Tensor(np.array([1, 2], np.int32))
    assert str(tensor) == "Tensor([1 2],tensor_desc=TensorDesc(dtype=DataType.DT_INT32, shape=[2]))"
