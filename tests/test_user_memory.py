"""From the caller's objects to the rows of tensors: every form that is accepted, every refusal, and for how long memory is held."""
from __future__ import annotations

import array
import ctypes
import gc
import mmap
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import foreign
import ml_dtypes
import numpy as np
import pytest
from foreign import Foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from shmkv import LLMParamError
from shmkv.errors import LLMNoneError
from shmkv.strided_rows import RowLayout, dense_rows
from shmkv.user_memory import HeldMemory, lay_out

SHAPE = [4, 8]
NBYTES = 32


def held(buffers: object, count: int = 1, shape: Sequence[int] = SHAPE, itemsize: int = 1, batch: int = 0) -> HeldMemory:
    return lay_out([shape] * count, [itemsize] * count, batch, buffers)


def rows_of(memory: HeldMemory) -> list[list[bytes]]:
    """What lies at the addresses: the bytes of each row of each tensor."""
    def piece(tensor: RowLayout, row: int, number: int) -> bytes:
        address = memory.base + tensor.offset + number * tensor.piece_pitch + row * tensor.row_pitch
        return ctypes.string_at(address, tensor.inner)

    return [[b"".join(piece(tensor, row, number) for number in range(tensor.outer)) for row in range(tensor.rows)]
            for tensor in memory.tensors]


def rows_by_numpy(*tensors: Any, batch: int = 0) -> list[list[bytes]]:
    return [[np.ascontiguousarray(row).tobytes() for row in np.moveaxis(tensor, batch, 0)] for tensor in tensors]


def counted(*shape: int, dtype: Any = "i1") -> Any:
    """An array whose bytes are all different as far as they can be."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return (np.arange(nbytes) % 251).astype("u1").view(dtype).reshape(shape)


def refusal(buffers: object, *args: Any, **more: Any) -> str:
    with pytest.raises(LLMParamError) as caught:
        held(buffers, *args, **more)
    assert str(caught.value).startswith("argument 'buffers")
    return str(caught.value)


# -- forms ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("container", [list, tuple])
def test_one_array_a_tensor(container: Callable[[Any], Any]) -> None:
    arrays = [counted(4, 8), counted(4, 8) + 1, counted(4, 8) + 2]
    memory = held(container(arrays), 3)
    assert rows_of(memory) == rows_by_numpy(*arrays)
    addresses = [each.ctypes.data for each in arrays]
    assert memory.base == min(addresses)
    assert [memory.base + tensor.offset for tensor in memory.tensors] == addresses
    assert memory.nbytes == max(addresses) + NBYTES - memory.base
    assert memory.is_dense
    assert repr(memory) == f"HeldMemory(3 tensors, base={memory.base:#x}, nbytes={memory.nbytes})"


@pytest.mark.parametrize("shape", [(6, 4, 8), (3, 2, 4, 8), (1, 6, 1, 4, 8)])
def test_one_array_whose_first_axes_count_tensors(shape: tuple[int, ...]) -> None:
    whole = counted(*shape)
    memory = held(whole, 6)
    assert rows_of(memory) == rows_by_numpy(*whole.reshape(6, 4, 8))
    assert memory.tensors == tuple(dense_rows(NBYTES * number, SHAPE, 1, 0) for number in range(6))
    assert (memory.base, memory.nbytes) == (whole.ctypes.data, 6 * NBYTES)
    assert held([whole], 6).tensors == memory.tensors


def test_an_array_a_layer_with_its_keys_and_values() -> None:
    layers = [counted(2, 4, 8), counted(2, 4, 8) + 1]
    memory = held(layers, 4)
    assert rows_of(memory) == rows_by_numpy(layers[0][0], layers[0][1], layers[1][0], layers[1][1])


def test_leading_axes_of_a_view() -> None:
    whole = counted(5, 3, 2, 4, 8)[::2, 1]
    memory = held(whole, 6)
    assert rows_of(memory) == rows_by_numpy(*whole.reshape(6, 4, 8))


def test_pairs_in_a_list() -> None:
    keys, values = counted(4, 8), counted(4, 8) + 1
    assert rows_of(held([(keys, values), [values + 1, counted(2, 4, 8)]], 5)) == rows_by_numpy(
        keys, values, values + 1, *counted(2, 4, 8))


def test_forms_in_one_list() -> None:
    flat = bytearray(counted(64).tobytes())
    memory = held([counted(4, 8), flat, counted(2, 4, 8)], 5)
    assert rows_of(memory) == rows_by_numpy(counted(4, 8), *counted(2, 4, 8), *counted(2, 4, 8))


def flat_objects() -> list[Any]:
    mapping = mmap.mmap(-1, 3 * NBYTES)
    mapping[:] = counted(96).tobytes()
    return [bytearray(counted(96).tobytes()), mapping, counted(96), counted(96, dtype="u1"),
            array.array("B", counted(96).tobytes()), memoryview(bytearray(counted(96).tobytes())),
            (ctypes.c_uint8 * 96)(*counted(96).tobytes()), Foreign(counted(96), code=1)]


@pytest.mark.parametrize("flat", flat_objects(), ids=lambda flat: type(flat).__name__)
def test_flat_bytes(flat: Any) -> None:
    """Whatever the element size: three tensors of bytes, or of 2-byte elements."""
    assert rows_of(held(flat, 3)) == rows_by_numpy(*counted(3, 4, 8))
    assert rows_of(held([flat], 3, [2, 8], 2)) == rows_by_numpy(*counted(3, 2, 8, dtype="i2"))
    assert rows_of(held(flat, 1, [4, 3, 8], 1, 1)) == rows_by_numpy(counted(4, 3, 8), batch=1)


def test_flat_bytes_of_tensors_of_several_shapes() -> None:
    flat = bytearray(4 * 8 + 2 * 4 * 3)
    memory = lay_out([[4, 8], [4, 3]], [1, 2], 0, flat)
    assert memory.tensors == (dense_rows(0, [4, 8], 1, 0), dense_rows(32, [4, 3], 2, 0))
    assert lay_out([[4, 8], [4, 3]], [1, 2], 0, [counted(4, 8), counted(4, 3, dtype="f2")]).tensors[1].inner == 6


def test_one_axis_of_bytes_may_be_the_tensors_own() -> None:
    assert held(bytearray(8), 1, [8]).tensors == (dense_rows(0, [8], 1, 0),)
    assert held(bytearray(16), 2, [8]).tensors == (dense_rows(0, [8], 1, 0), dense_rows(8, [8], 1, 0))
    assert held(counted(16)[::2], 1, [8]).tensors[0].row_pitch == 2


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "f2", "f4", "?", "c8"])
def test_elements_of_any_type(dtype: Any) -> None:
    data = counted(4, 8, dtype="u1" if dtype == "?" else dtype)
    assert rows_of(held([data], 1, SHAPE, data.itemsize)) == rows_by_numpy(data)


def test_dlpack() -> None:
    data = counted(4, 16, dtype="f4")[:, :8]
    memory = held([Foreign(data)], 1, SHAPE, 4)
    assert rows_of(memory) == rows_by_numpy(data)
    assert memory.tensors[0].row_pitch == 64


# -- views ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("view", "batch"), [
    (counted(4, 64)[:, :40], 0), (counted(8, 8)[::2], 0), (counted(10, 2, 3, 4)[:, 0], 0), (counted(10, 2, 3, 4)[:, 1], 0),
    (counted(6, 5, 8)[::2, 1:4], 1), (counted(4, 3, 8).transpose(1, 0, 2), 1), (counted(2, 3, 4, 5)[:, :, 1:3], 2),
    (counted(2, 8, 4, dtype="f4")[1:, 3:], 1),
], ids=str)
def test_rows_of_views(view: Any, batch: int) -> None:
    memory = held([view], 1, view.shape, view.itemsize, batch)
    assert rows_of(memory) == rows_by_numpy(view, batch=batch)
    assert memory.base == view.ctypes.data


def test_keys_and_values_of_interleaved_blocks() -> None:
    blocks = [counted(10, 2, 3, 4), counted(10, 2, 3, 4) + 1]
    memory = held([(each[:, 0], each[:, 1]) for each in blocks], 4, [10, 3, 4])
    assert rows_of(memory) == rows_by_numpy(*(each[:, half] for each in blocks for half in (0, 1)))
    assert not memory.is_dense


# -- refusals -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [1, 1.5, "text", {}, {"a": bytearray(32)}, object(), np.ndarray, iter([])], ids=repr)
def test_objects_without_memory_are_a_type_error(bad: object) -> None:
    for buffers, place in ((bad, "buffers"), ([counted(4, 8), bad], r"buffers\[1\]"), ([(bad,)], r"buffers\[0\]\[0\]")):
        with pytest.raises(TypeError, match=f"argument '{place}' only support memory") as caught:
            held(buffers, 2)
        assert f"of type {type(bad).__name__}" in str(caught.value)


def test_none() -> None:
    with pytest.raises(LLMNoneError, match="argument 'buffers' only support"):
        held(None)
    with pytest.raises(LLMNoneError, match=r"argument 'buffers' inner type only support .* at 'buffers\[1\]'"):
        held([counted(4, 8), None], 2)


@pytest.mark.parametrize("bad", [bytes(32), memoryview(bytes(32)), Foreign(counted(4, 8), flags=foreign.FLAG_READ_ONLY)], ids=repr)
def test_read_only(bad: object) -> None:
    assert f"argument 'buffers[0]' of type {type(bad).__name__} is read-only" in refusal([bad])


def test_read_only_arrays() -> None:
    frozen = counted(4, 8, dtype=ml_dtypes.float8_e5m2)
    frozen.flags.writeable = False
    assert "is read-only" in refusal([frozen])
    assert "is read-only" in refusal([np.broadcast_to(counted(8), (4, 8))])


@pytest.mark.parametrize(("view", "text"), [
    (counted(4, 8)[::-1], "axis 0 has a stride of -8 bytes, expected 8: the axis runs backwards"),
    (counted(4, 8)[:, ::-1], "axis 1 has a stride of -1 bytes, expected 1"),
    (counted(8, 4).T, "axis 1 has a stride of 4 bytes, expected 1"),
    (np.asfortranarray(counted(4, 8)), "axis 1 has a stride of 4 bytes, expected 1"),
    (counted(4, 16)[:, ::2], "axis 1 has a stride of 2 bytes, expected 1"),
    (as_strided(counted(8), (4, 8), (0, 1)), "axis 0 has a stride of 0 bytes, expected more: it is"),
    (as_strided(counted(32), (4, 8), (4, 1)), "axis 0 has a stride of 4 bytes, expected 8 or more: rows"),
    (as_strided(counted(32), (2, 4, 8), (0, 8, 1)), "axis 0 has a stride of 0 bytes"),
    (counted(4, 4, 8)[::-2], "axis 0 has a stride of -64 bytes"),
])
def test_rows_that_do_not_lie_together(view: Any, text: str) -> None:
    message = refusal([counted(4, 8), view], 3)
    assert message.startswith("argument 'buffers[1]' (from tensor 1 on): ")
    assert text in message


def test_an_axis_of_size_one_may_have_any_stride() -> None:
    odd = as_strided(counted(32), (1, 4, 1, 8), (-3, 8, 5, 1))
    assert held([odd], 1, [4, 1, 8]).tensors == (dense_rows(0, [4, 8], 1, 0),)


@pytest.mark.parametrize("empty", [np.zeros((0, 4, 8), "i1"), bytearray(), np.zeros(0, "u1")], ids=repr)
def test_empty(empty: object) -> None:
    assert "is empty: axis 0 of shape [0" in refusal([empty])


@pytest.mark.parametrize("shape", [(8, 4), (4, 9), (4,), (), (32, 1), (4, 8, 1), (4, 0), (0, 8)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    message = refusal(np.zeros(shape, "f4"), 1, SHAPE, 4)
    assert f"argument 'buffers' (from tensor 0 on) has shape {list(shape)}, expected [4, 8], more axes before these" in message


@pytest.mark.parametrize("nbytes", [1, 31, 33, 63, 97, 1000])
def test_flat_bytes_of_no_whole_tensors(nbytes: int) -> None:
    assert f"has {nbytes} bytes, expected the bytes of whole tensors: 32 for the first" in refusal(bytearray(nbytes), 3)


def test_flat_bytes_with_gaps() -> None:
    assert "axis 0 has a stride of 2 bytes, expected 1: flat bytes lie together" in refusal(counted(64)[::2])
    assert "axis 0 has a stride of -1 bytes" in refusal(counted(32)[::-1])


@pytest.mark.parametrize("dtype", ["i1", "f4", "f8"])
def test_elements_of_other_sizes(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    letter = memoryview(np.zeros(1, dtype)).format
    message = refusal([np.zeros(SHAPE, dtype)], 1, SHAPE, 2)
    assert f"(from tensor 0 on) has elements of {size} bytes ({letter}), expected 2" in message


def test_numbers_of_tensors() -> None:
    assert refusal([], 2) == "argument 'buffers' has memory for 0 tensors, expected 2"
    assert refusal([counted(4, 8)], 2) == "argument 'buffers' has memory for 1 tensors, expected 2"
    assert "argument 'buffers[2]' is one too many: the 2 tensors" in refusal([counted(4, 8), counted(4, 8), counted(4, 8)], 2)
    assert "of shape [2, 4, 8] has 2 tensors, expected 1 or fewer" in refusal([counted(4, 8), counted(2, 4, 8)], 2)


def test_tensors_of_several_shapes_do_not_fit_one_array() -> None:
    with pytest.raises(LLMParamError, match=r"has 2 tensors of one shape and element size, expected \[4, 6\] of 1 bytes for its"):
        lay_out([[4, 8], [4, 6]], [1, 1], 0, counted(2, 4, 8))
    with pytest.raises(LLMParamError, match=r"expected \[4, 8\] of 2 bytes for its tensor 1"):
        lay_out([[4, 8], [4, 8]], [1, 2], 0, counted(2, 4, 8))


def test_memory_that_cannot_be_used() -> None:
    message = refusal([Foreign(counted(4, 8), device=(2, 0))])
    assert message.endswith("'buffers[0]' of type Foreign cannot be used: this tensor is on cuda:0; its memory has to be the CPU's")
    assert "its elements are Python objects" in refusal([np.zeros(SHAPE, "O")], 1, SHAPE, 8)


# -- shared bytes ---------------------------------------------------------------------------------------------------------

def test_the_same_memory_twice() -> None:
    data = counted(4, 8)
    expected = "argument 'buffers[1]': tensor 1 is the same memory as tensor 0 ('buffers[0]'), expected memory of its own"
    assert refusal([data, data], 2) == expected
    assert refusal([data, memoryview(data)], 2) == expected
    assert refusal([Foreign(data), data], 2) == expected
    assert "tensor 2 is the same memory as tensor 0" in refusal([data, counted(4, 8), data], 3)


def test_partly_shared_memory() -> None:
    whole = counted(72)
    one, two = whole[:32].reshape(4, 8), whole[24:56].reshape(4, 8)
    expected = "argument 'buffers[1]': tensor 1 shares bytes with tensor 0 ('buffers[0]'), expected memory of its own"
    assert refusal([one, two], 2) == refusal([two, one], 2) == expected
    assert rows_of(held([one, whole[32:64].reshape(4, 8)], 2)) == rows_by_numpy(one, whole[32:64].reshape(4, 8))


def test_interleaved_views_that_share_bytes() -> None:
    whole = counted(10, 24)
    assert "shares bytes" in refusal([whole[:, :12], whole[:, 8:20]], 2, [10, 12])
    assert held([whole[:, :12], whole[:, 12:]], 2, [10, 12]).nbytes == 240
    # Another pitch: every second row of one, all rows of the other.
    assert "shares bytes" in refusal([whole[::2, :12], whole[:5, 8:20]], 2, [5, 12])
    assert held([whole[::2, :12], whole[:5, 12:]], 2, [5, 12]).nbytes == 8 * 24 + 12


def test_leading_axes_that_share_bytes() -> None:
    windows = as_strided(counted(64), (2, 4, 8), (16, 8, 1))
    assert "argument 'buffers': tensor 1 shares bytes with tensor 0" in refusal(windows, 2)


# -- how long -------------------------------------------------------------------------------------------------------------

def resizable() -> list[tuple[Any, Callable[[Any], object]]]:
    return [(bytearray(32), lambda data: data.extend(b"x")), (bytearray(32), lambda data: data.clear()),
            (array.array("B", bytes(32)), lambda data: data.append(1)), (mmap.mmap(-1, 32), lambda data: data.close())]


@pytest.mark.parametrize(("data", "resize"), resizable(), ids=["extend", "clear", "append", "close"])
def test_exported_memory_stays(data: Any, resize: Callable[[Any], object]) -> None:
    memory = held(data)
    with pytest.raises(BufferError):
        resize(data)
    memory.release()
    memory.release()
    resize(data)


def test_memory_is_let_go_in_a_cycle_too() -> None:
    data = bytearray(32)
    memory: Any = held(data)
    memory.cycle, memory = memory, None
    gc.collect()
    data.extend(b"x")       # a BufferError while it is held
    assert len(data) == 33


@pytest.mark.parametrize("given_as", [lambda data: data, lambda data: data[:, :], lambda data: data.view("u1")[1:],
                                      memoryview, lambda data: memoryview(data[1:])], ids=range(5))
def test_numpy_resizes_nothing_that_is_held(given_as: Callable[[Any], Any]) -> None:
    """It would, with refcheck=False, if there were nothing but an export."""
    data = np.zeros((4, 8), "i1")
    given = given_as(data)
    memory = held([given], 1, given.shape)
    del given
    with pytest.raises(ValueError, match="cannot resize"):
        data.resize((4096, 8), refcheck=False)
    memory.release()
    data.resize((4096, 8), refcheck=False)


def test_what_is_refused_is_not_held() -> None:
    """Although the exception lives on."""
    first, second, frozen = bytearray(32), np.zeros((4, 8), "i1"), Foreign(counted(4, 8), flags=foreign.FLAG_READ_ONLY)
    with pytest.raises(LLMParamError) as caught:
        held([first, second, frozen], 3)
    first.extend(b"x")
    second.resize((4096, 8), refcheck=False)
    assert frozen.deleted == 1
    assert caught.value.__traceback__ is not None


def test_capsules_are_deleted_once() -> None:
    sources = [Foreign(counted(4, 8)) for _ in range(3)]
    memory = held(sources, 3)
    assert [source.deleted for source in sources] == [0, 0, 0]
    memory.release()
    memory.release()
    del memory
    assert [source.deleted for source in sources] == [1, 1, 1]


def test_the_objects_live_as_long_as_they_are_held() -> None:
    class Kept(bytearray):
        pass

    data = Kept(32)
    alive, memory = weakref.ref(data), held(data)
    del data
    gc.collect()
    assert alive() is not None
    memory.release()
    assert alive() is None


# -- against numpy --------------------------------------------------------------------------------------------------------

@settings(max_examples=500, deadline=None)
@given(st.data())
def test_windows_on_one_array(data: st.DataObject) -> None:
    """Windows of one shape on one memory are accepted when their rows lie together and no byte is in two of them, else not."""
    whole = counted(6, 6, 6)                    # the value of each byte tells its place
    shape = [data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3, 6]))]
    batch = data.draw(st.integers(0, 1))
    steps = [data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)) if batch else 1, 1]
    corner = st.tuples(*(st.integers(0, 6 - (dim - 1) * step - 1) for dim, step in zip(shape, steps, strict=True)))
    windows = [whole[tuple(slice(first, first + (dim - 1) * step + 1, step)
                           for first, dim, step in zip(at, shape, steps, strict=True))]
               for at in data.draw(st.lists(corner, min_size=1, max_size=3))]
    is_contiguous = batch == 1 or shape[1] == 1 or shape[2] == 6
    owned = np.concatenate([window.reshape(-1) for window in windows])
    if is_contiguous and len(np.unique(owned)) == len(owned):
        assert rows_of(held(windows, len(windows), shape, 1, batch)) == rows_by_numpy(*windows, batch=batch)
    else:
        text = "shares bytes|the same memory" if is_contiguous else "have to lie together"
        assert re.search(text, refusal(windows, len(windows), shape, 1, batch))
