"""Tensor: what it accepts, that it copies in, and what comes out of numpy()."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmkv.errors import LLMNoneError, LLMParamError
from shmkv.tensor import Tensor, TensorDesc
from shmkv.types import DataType, data_type_to_np, np_to_data_type

PLAIN = sorted(set(DataType) - {DataType.DT_STRING, DataType.DT_BF16}, key=lambda d: d.value)


def test_desc_gives_a_copy_of_its_shape() -> None:
    desc = TensorDesc(DataType.DT_INT32, (1, 256))
    desc.shape.append(9)
    assert (desc.dtype, desc.shape) == (DataType.DT_INT32, [1, 256])
    assert str(desc) == "TensorDesc(dtype=DataType.DT_INT32, shape=[1, 256])"


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        (1, [1], TypeError), (None, [1], LLMNoneError), (DataType.DT_BOOL, None, LLMNoneError),
        (DataType.DT_BOOL, 4, TypeError), (DataType.DT_BOOL, ["1"], TypeError),
        (DataType.DT_BOOL, [2**63], LLMParamError),
    ],
)
def test_desc_refuses(dtype: Any, shape: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TensorDesc(dtype, shape)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("data_type", PLAIN, ids=str)
def test_round_trip_keeps_dtype_and_shape(data_type: DataType, described: bool) -> None:
    source = np.arange(6).reshape(2, 3).astype(data_type_to_np[data_type])
    tensor = Tensor(source, TensorDesc(data_type, (2, 3)) if described else None)
    assert tensor.tensor_desc.dtype is data_type
    for copy in (False, True):
        result = tensor.numpy(copy)
        assert result.dtype == source.dtype
        np.testing.assert_array_equal(result, source)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_8_bit_floats_keep_their_bits(dtype: Any) -> None:
    source = np.arange(256, dtype=np.uint8).reshape(2, 128)
    tensor = Tensor(source.view(dtype))
    assert tensor.tensor_desc.dtype is np_to_data_type[np.dtype(dtype)]
    for copy in (False, True):
        assert tensor.numpy(copy).dtype == dtype
        np.testing.assert_array_equal(tensor.numpy(copy).view(np.uint8), source)
    with pytest.raises(LLMParamError, match="dtype"):
        Tensor(source, tensor.tensor_desc)
    assert "float8" in repr(tensor).lower()


def test_data_is_copied_in() -> None:
    source = np.zeros((2, 2), np.float32)
    tensor = Tensor(source)
    source[0, 0] = 7
    assert not tensor.numpy().any()


def test_view_is_read_only_for_good() -> None:
    view = Tensor(np.zeros(3, np.int8)).numpy()
    assert not view.flags.writeable
    with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
        view.setflags(write=True)


def test_copy_is_writable_and_independent() -> None:
    tensor = Tensor(np.zeros((2, 2), np.float16))
    copy = tensor.numpy(copy=True)
    copy[:] = 1
    assert copy.flags.c_contiguous
    assert copy.flags.owndata
    assert not tensor.numpy().any()


@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (0, 3)], ids=str)
def test_bf16_takes_the_bits_of_float16(shape: tuple[int, ...]) -> None:
    tensor = Tensor(np.full(shape, 1.875, np.float16), TensorDesc(DataType.DT_BF16, list(shape)))
    for copy in (False, True):
        result = tensor.numpy(copy)
        assert (result.dtype, result.shape, result.flags.writeable) == (np.float32, shape, copy)
        assert (result == 1.0).all()


@pytest.mark.parametrize("desc", [None, TensorDesc(DataType.DT_BF16, [3])])
def test_bf16_of_ml_dtypes_keeps_its_values(desc: TensorDesc | None) -> None:
    values = np.array([1.5, -2.0, np.inf], ml_dtypes.bfloat16)
    tensor = Tensor(values, desc)
    assert tensor.tensor_desc.dtype is DataType.DT_BF16
    assert tensor.numpy().tolist() == [1.5, -2.0, np.inf]


@pytest.mark.parametrize("source", [np.array([["a", "bcd"]]), np.array([b"xy", b"z"])], ids=["U", "S"])
def test_strings_need_a_copy(source: Any) -> None:
    tensor = Tensor(source)
    with pytest.raises(RuntimeError, match="copy=True"):
        tensor.numpy()
    result = tensor.numpy(True)
    assert result.dtype == source.dtype
    np.testing.assert_array_equal(result, source)
    desc = TensorDesc(DataType.DT_STRING, list(source.shape))
    assert Tensor(source, desc).numpy(True).dtype == source.dtype


@pytest.mark.parametrize(
    ("data", "desc"),
    [
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_FLOAT, [3])),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_FLOAT, [2, 1])),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_INT32, [2])),
        (np.zeros(2, np.uint16), TensorDesc(DataType.DT_BF16, [2])),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_STRING, [2])),
        (np.zeros(2, np.complex64), None),
        (np.zeros(2, object), None),
        (np.zeros(2, ">f4"), None),
        (np.zeros(2, ">f4"), TensorDesc(DataType.DT_FLOAT, [2])),
        (np.zeros((4, 4), np.float32)[:, ::2], None),
        (np.zeros((4, 4), np.float32).T[:2], None),
    ],
)
def test_what_does_not_fit_is_a_runtime_error_and_a_value_error(data: Any, desc: TensorDesc | None) -> None:
    with pytest.raises(RuntimeError) as caught:
        Tensor(data, desc)
    assert isinstance(caught.value, LLMParamError)


@pytest.mark.parametrize(
    ("data", "desc", "error"),
    [
        ([1, 2], None, TypeError), (None, None, LLMNoneError), (1, None, TypeError),
        (np.zeros(1), "desc", TypeError), (np.zeros(1), [1], TypeError),
    ],
)
def test_wrong_types(data: Any, desc: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Tensor(data, desc)


@pytest.mark.parametrize(("copy", "error"), [(1, TypeError), ("yes", TypeError), (None, LLMNoneError)])
def test_copy_must_be_bool(copy: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="'copy' only support bool"):
        Tensor(np.zeros(1)).numpy(copy)


def test_tensor_of_a_tensor_is_a_clone() -> None:
    memory = np.zeros((2, 2), np.float16)
    shared = Tensor._over(memory, TensorDesc(DataType.DT_FLOAT16, [2, 2]))
    clone = Tensor(shared)
    memory[0, 0] = 3
    assert shared.numpy()[0, 0] == 3
    assert clone.numpy()[0, 0] == 0
    assert Tensor(clone, TensorDesc(DataType.DT_FLOAT16, [2, 2])).tensor_desc.shape == [2, 2]
    for other in (TensorDesc(DataType.DT_FLOAT16, [4]), TensorDesc(DataType.DT_BF16, [2, 2])):
        with pytest.raises(LLMParamError):
            Tensor(clone, other)


def test_over_shares_memory_and_shows_it_read_only() -> None:
    class Shared(Tensor):
        pass

    memory = np.zeros((4, 6), np.int32)
    tensor = Shared._over(memory[:, 1:3], TensorDesc(DataType.DT_INT32, [4, 2]))
    assert type(tensor) is Shared
    assert np.shares_memory(tensor.numpy(), memory)
    assert not tensor.numpy().flags.writeable
    assert memory.flags.writeable
    copy = tensor.numpy(True)
    assert (copy.flags.c_contiguous, np.shares_memory(copy, memory)) == (True, False)


def test_over_bf16_and_opaque_strings() -> None:
    memory = np.array([[1.5, 2.5]], ml_dtypes.bfloat16)
    assert Tensor._over(memory, TensorDesc(DataType.DT_BF16, [1, 2])).numpy().tolist() == [[1.5, 2.5]]
    opaque = Tensor._over(np.zeros(2, "V16"), TensorDesc(DataType.DT_STRING, [2]))
    assert opaque.numpy(True).dtype == np.dtype("V16")
    assert "DT_STRING" in str(opaque)


def test_text_shows_content_and_desc() -> None:
    assert str(Tensor(np.array([1, 2], np.int8))) == (
        "Tensor([1 2],tensor_desc=TensorDesc(dtype=DataType.DT_INT8, shape=[2]))"
    )
    assert str(Tensor(np.array(["ab"]))).startswith("Tensor(['ab'],tensor_desc=")
