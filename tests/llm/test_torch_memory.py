"""torch tensors as memory of the caller: the address is the tensor's own, nothing is copied, and what cannot be used is refused."""
from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmkv import LLMParamError
from shmkv._imported import Imported
from shmkv.strided_rows import RowLayout, dense_rows
from shmkv.user_memory import HeldMemory, lay_out

pytestmark = pytest.mark.llm
NEEDED = "needs torch: make test-llm installs it"
DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "int64",
          "uint16", "bool", "complex64", "float4_e2m1fn_x2"]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason=NEEDED)


def held(*tensors: Any, count: int | None = None, shape: tuple[int, ...] | None = None, batch: int = 0) -> HeldMemory:
    count = count or len(tensors)
    return lay_out([shape or tuple(tensors[0].shape)] * count, [tensors[0].element_size()] * count, batch, list(tensors))


def refusal(tensor: Any) -> str:
    with pytest.raises(LLMParamError) as caught:
        held(tensor)
    assert str(caught.value).startswith("argument 'buffers[0]'")
    return str(caught.value)


@pytest.mark.parametrize("name", DTYPES)
def test_each_element_type_is_taken_where_it_lies(torch: Any, name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.zeros(4, 8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    memory = held(tensor)
    assert memory.base == tensor.data_ptr()
    assert memory.tensors == (dense_rows(0, [4, 8], dtype.itemsize, 0),)
    assert Imported(tensor).is_bytes == (name in ("int8", "uint8"))


def test_writing_to_the_address_changes_the_tensor(torch: Any) -> None:
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    memory = held(tensor)
    ctypes.memset(memory.base + 16, 0x40, 16)
    assert tensor[1].tolist() == [3.0] * 8
    assert not tensor[0].any()
    assert not tensor[2:].any()


@pytest.mark.parametrize(("view", "batch", "expected"), [
    (lambda torch: torch.zeros(4, 64, dtype=torch.int8)[:, :40], 0, RowLayout(0, 232, 1, 4, 40, 64, 256)),
    (lambda torch: torch.zeros(8, 4)[::2], 0, RowLayout(0, 112, 1, 4, 16, 32, 128)),
    (lambda torch: torch.zeros(10, 2, 3, 4, dtype=torch.bfloat16)[:, 1], 0, RowLayout(0, 456, 1, 10, 24, 48, 480)),
    (lambda torch: torch.zeros(3, 4, 8, dtype=torch.float8_e5m2), 1, RowLayout(0, 96, 3, 4, 8, 8, 32)),
    (lambda torch: torch.zeros(4, 3, 8, dtype=torch.int8).transpose(0, 1), 1, dense_rows(0, [4, 24], 1, 0)),
    (lambda torch: torch.zeros(1, 8).expand(1, 8), 0, dense_rows(0, [1, 8], 4, 0)),
], ids=range(6))
def test_views(torch: Any, view: Callable[[Any], Any], batch: int, expected: RowLayout) -> None:
    tensor = view(torch)
    memory = held(tensor, batch=batch)
    assert memory.base == tensor.data_ptr()
    assert memory.tensors == (expected,)


def test_keys_and_values_of_one_tensor(torch: Any) -> None:
    kv = torch.zeros(10, 2, 3, 4)
    memory = held(kv[:, 0], kv[:, 1])
    assert [memory.base + tensor.offset for tensor in memory.tensors] == [kv[:, 0].data_ptr(), kv[:, 1].data_ptr()]
    whole = torch.zeros(3, 2, 4, 8)
    assert [tensor.offset for tensor in held(whole, count=6, shape=(4, 8)).tensors] == [128 * number for number in range(6)]
    flat = torch.zeros(256, dtype=torch.uint8)
    assert lay_out([[4, 8]] * 2, [4, 4], 0, flat).base == flat.data_ptr()


def test_memory_of_parameters_and_subclasses(torch: Any) -> None:
    frozen = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    assert held(frozen).base == frozen.data_ptr()
    with torch.inference_mode():
        inferred = torch.zeros(4, 8)
    assert held(inferred).base == inferred.data_ptr()
    shared = torch.zeros(4, 8).share_memory_()
    assert held(shared).base == shared.data_ptr()


def test_the_memory_outlives_the_tensor(torch: Any) -> None:
    array = np.ones((4, 8), "f4")
    tensor, alive = torch.from_numpy(array), weakref.ref(array)
    memory = held(tensor)
    del tensor, array
    gc.collect()
    assert alive() is not None
    memory.release()
    memory.release()
    gc.collect()
    assert alive() is None


def with_gradient(torch: Any) -> Any:
    return torch.zeros(4, 8, requires_grad=True)


@pytest.mark.parametrize(("tensor", "text"), [
    (with_gradient, "require gradient, use tensor.detach()"),
    (lambda torch: torch.nn.Parameter(torch.zeros(4, 8)), "require gradient"),
    (lambda torch: torch.zeros(4, 8, device="meta"), "this tensor is on meta; its memory has to be the CPU's"),
    (lambda torch: torch.zeros(4, 8, dtype=torch.complex64).conj(), "conjugate bit"),
    (lambda torch: torch.zeros(4, 8, dtype=torch.complex64).conj().imag, "negative bit"),
    (lambda torch: torch._neg_view(torch.zeros(4, 8)), "negative bit"),
    (lambda torch: torch.zeros(4, 8).to_sparse(), "layout other than torch.strided"),
    (lambda torch: torch._efficientzerotensor(4, 8), "has no memory"),
    (lambda torch: torch.zeros(8, 4).t(), "axis 1 has a stride of 16 bytes, expected 4"),
    (lambda torch: torch.zeros(4, 16)[:, ::2], "axis 1 has a stride of 8 bytes, expected 4"),
    (lambda torch: torch.zeros(1, 8).expand(4, 8), "axis 0 has a stride of 0 bytes"),
    (lambda torch: torch.zeros(64).as_strided((4, 8), (4, 1)), "axis 0 has a stride of 16 bytes, expected 32 or more"),
    (lambda torch: torch.zeros(0, 8), "is empty"),
], ids=range(13))
def test_refusals(torch: Any, tensor: Callable[[Any], Any], text: str) -> None:
    assert text in refusal(tensor(torch))


def test_what_is_refused_for_its_gradient_is_taken_detached(torch: Any) -> None:
    tensor = with_gradient(torch)
    assert held(tensor.detach()).base == tensor.data_ptr()


def test_the_same_tensor_twice(torch: Any) -> None:
    tensor = torch.zeros(4, 8)
    with pytest.raises(LLMParamError, match="tensor 1 is the same memory as tensor 0"):
        held(tensor, tensor)
    with pytest.raises(LLMParamError, match="tensor 1 is the same memory as tensor 0"):
        held(tensor, tensor.view(4, 8))


def test_torch_is_not_imported_for_any_of_this() -> None:
    code = "import sys, shmkv, shmkv.user_memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
