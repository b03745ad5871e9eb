"""Addresses, shapes and strides of other people's objects, by three protocols; what is held, and for how long."""
from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import weakref
from typing import Any

import foreign
import ml_dtypes
import numpy as np
import pytest
from foreign import Foreign

from shmkv._imported import Imported
from shmkv.types import DataType


class Interface:
    """An object that has an __array_interface__ and nothing else."""

    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = interface


def address_of(value: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(value))


def described(memory: Imported) -> tuple[Any, ...]:
    return memory.address, memory.shape, memory.strides, memory.itemsize, memory.readonly


# -- the buffer protocol --------------------------------------------------------------------------------------------------

def test_bytearray() -> None:
    data = bytearray(24)
    memory = Imported(data)
    assert described(memory) == (address_of(data), (24,), (1,), 1, False)
    assert memory.is_bytes
    with pytest.raises(BufferError):
        data.extend(b"x")
    memory.release()
    data.extend(b"x")


def test_array_of_the_standard_library() -> None:
    data = array.array("f", range(6))
    memory = Imported(data)
    assert described(memory) == (data.buffer_info()[0], (6,), (4,), 4, False)
    assert (memory.format, memory.is_bytes) == ("f", False)
    with pytest.raises(BufferError):
        data.append(1.0)
    del memory
    data.append(1.0)


def test_mapping_cannot_be_closed() -> None:
    with mmap.mmap(-1, 4096) as mapping:
        memory = Imported(mapping)
        assert memory.shape == (4096,)
        with pytest.raises(BufferError):
            mapping.close()
        memory.release()
        memory.release()


def test_ctypes_array() -> None:
    data = (ctypes.c_float * 4 * 3)()
    assert described(Imported(data)) == (ctypes.addressof(data), (3, 4), (16, 4), 4, False)


@pytest.mark.parametrize("dtype", ["f2", "f4", "i1", "u8", "?", "c16", [("a", "f4"), ("Other", "i2")]])
def test_numpy_array(dtype: Any) -> None:
    data = np.zeros((4, 6), dtype)[1::2, ::2]
    memory = Imported(data)
    assert described(memory) == (data.ctypes.data, (2, 3), data.strides, data.itemsize, False)


def test_memoryview_of_another_shape() -> None:
    data = bytearray(24)
    memory = Imported(memoryview(data).cast("H", [3, 4]))
    assert described(memory) == (address_of(data), (3, 4), (8, 2), 2, False)


@pytest.mark.parametrize("source", [b"bytes", memoryview(b"12"), np.float32(1), np.broadcast_to(np.zeros(3), (2, 3))], ids=repr)
def test_read_only_memory_is_told(source: Any) -> None:
    assert Imported(source).readonly


@pytest.mark.parametrize("code", "bBc")
def test_bytes_are_told_by_their_format(code: str) -> None:
    assert Imported(memoryview(bytearray(4)).cast(code)).is_bytes
    assert not Imported(memoryview(bytearray(4)).cast("?")).is_bytes


def test_no_dims() -> None:
    assert described(Imported(np.zeros((), "f4")))[1:4] == ((), (), 4)


# -- __array_interface__ --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "M8[s]"])
def test_numpy_types_that_the_buffer_protocol_does_not_have(dtype: Any) -> None:
    data = np.zeros((4, 6), dtype)[:, 1:3]
    with pytest.raises(ValueError, match="cannot include dtype"):
        memoryview(data)
    memory = Imported(data)
    assert described(memory) == (data.ctypes.data, (4, 2), data.strides, data.itemsize, False)
    assert not memory.is_bytes
    data.flags.writeable = False
    assert Imported(data).readonly


def test_an_interface_without_strides_is_dense_and_keeps_its_object() -> None:
    data = np.zeros((2, 3), "i4")
    source = Interface(version=3, data=(data.ctypes.data, False), shape=(2, 3), typestr="<i4")
    alive = weakref.ref(source)
    memory = Imported(source)
    assert described(memory) == (data.ctypes.data, (2, 3), (12, 4), 4, False)
    del source
    assert alive() is not None
    memory.release()
    assert alive() is None


@pytest.mark.parametrize(("typestr", "itemsize"), [("<f1", 1), ("|V6", 6), ("<M8[25us]", 8), ("<U3", 12), ("|S3", 3), ("|b1", 1)])
def test_element_sizes_of_interfaces(typestr: str, itemsize: int) -> None:
    memory = Imported(Interface(version=3, data=(64, False), shape=(2,), typestr=typestr))
    assert (memory.itemsize, memory.strides, memory.is_bytes) == (itemsize, (itemsize,), False)


@pytest.mark.parametrize("typestr", ["", "f4", "<f", "|t8", "|V0", "<f4junk"])
def test_an_interface_of_unknown_elements_is_refused(typestr: str) -> None:
    with pytest.raises(BufferError, match="unknown size"):
        Imported(Interface(version=3, data=(64, False), shape=(2,), typestr=typestr))


def test_an_interface_without_an_address_is_refused() -> None:
    with pytest.raises(BufferError, match="no address"):
        Imported(Interface(version=3, shape=(2,), typestr="<i4"))


# -- DLPack ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (1, 9)])
def test_capsules_of_both_kinds(version: tuple[int, int] | None) -> None:
    data = np.zeros((4, 6), "f4")[::2, 1:3]
    source = Foreign(data, version=version)
    memory = Imported(source)
    assert described(memory) == (data.ctypes.data, (2, 2), data.strides, 4, False)
    assert source.asked == {"max_version": (1, 1), "copy": False}
    assert source.deleted == 0
    memory.release()
    memory.release()
    del memory
    assert source.deleted == 1


def test_the_tensor_is_deleted_with_the_last_reference() -> None:
    source = Foreign(np.zeros(3, "f4"))
    Imported(source)
    assert source.deleted == 1


@pytest.mark.parametrize("keywords", [(), ("max_version",)])
def test_exporters_that_know_no_keywords(keywords: tuple[str, ...]) -> None:
    source = Foreign(np.zeros(3, "f4"), version=None, keywords=keywords)
    assert Imported(source).shape == (3,)
    assert set(source.asked) == set(keywords)


def test_byte_offset_and_missing_strides() -> None:
    data = np.zeros((2, 3), "f4")
    memory = Imported(Foreign(data, byte_offset=4, no_strides=True))
    assert described(memory) == (data.ctypes.data + 4, (2, 3), (12, 4), 4, False)


@pytest.mark.parametrize("device", [1, 3, 11])
def test_pinned_memory_is_memory_of_the_host(device: int) -> None:
    assert Imported(Foreign(np.zeros(3, "f4"), device=(device, 0), device_type=device)).shape == (3,)


def test_the_read_only_flag_is_told() -> None:
    assert Imported(Foreign(np.zeros(3, "f4"), flags=foreign.FLAG_READ_ONLY)).readonly


@pytest.mark.parametrize(("code", "bits", "lanes", "flags", "itemsize", "is_bytes"), [
    (0, 8, 1, 0, 1, True), (1, 8, 1, 0, 1, True), (6, 8, 1, 0, 1, False), (10, 8, 1, 0, 1, False), (4, 16, 1, 0, 2, False),
    (2, 32, 4, 0, 16, False), (17, 4, 2, 0, 1, False), (17, 4, 1, foreign.FLAG_PADDED, 1, False),
])
def test_element_types(code: int, bits: int, lanes: int, flags: int, itemsize: int, is_bytes: bool) -> None:
    memory = Imported(Foreign(np.zeros(32, "u1"), code=code, bits=bits, lanes=lanes, flags=flags))
    assert (memory.itemsize, memory.strides, memory.is_bytes) == (itemsize, (itemsize,), is_bytes)
    assert memory.format == f"DLPack code {code}, {bits} bits, {lanes} lanes"


@pytest.mark.parametrize(("options", "text"), [
    ({"version": (2, 0)}, "DLPack 2, not 1"),
    ({"flags": foreign.FLAG_COPIED}, "a copy"),
    ({"bits": 4}, "4 bits are no whole bytes"),
    ({"data": None}, "no memory"),
    ({"device": (2, 1)}, "this tensor is on cuda:1; its memory has to be the CPU's"),
    ({"device": (10, 0)}, "this tensor is on rocm:0;"),
    ({"device": (99, 0)}, "this tensor is on device type 99:0;"),
    ({"device": ValueError("unheard of")}, "__dlpack_device__ failed: unheard of"),
])
def test_what_dlpack_cannot_give(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BufferError, match=text):
        Imported(Foreign(np.zeros(3, "f4"), **options))


@pytest.mark.parametrize("options", [{"version": (2, 0)}, {"flags": foreign.FLAG_COPIED}, {"bits": 4}, {"device_type": 2}])
def test_a_capsule_that_is_refused_is_deleted(options: dict[str, Any]) -> None:
    source = Foreign(np.zeros(3, "f4"), **options)
    with pytest.raises(BufferError):
        Imported(source)
    assert source.deleted == 1


def test_the_tensors_own_name_of_its_device_is_the_better_one() -> None:
    source: Any = Foreign(np.zeros(3, "f4"), device=ValueError("meta is unknown"))
    source.device = "meta"
    with pytest.raises(BufferError, match="this tensor is on meta; its"):
        Imported(source)
    source.device, source.device_of = "npu:3", (12, 3)
    with pytest.raises(BufferError, match="this tensor is on npu:3; its"):
        Imported(source)


def test_a_view_of_negated_values_is_refused() -> None:
    source: Any = Foreign(np.zeros(3, "f4"))
    source.is_neg = lambda: True
    with pytest.raises(BufferError, match="negative bit"):
        Imported(source)
    source.is_neg = lambda: False
    assert Imported(source).shape == (3,)


def test_no_capsule() -> None:
    source: Any = Foreign(np.zeros(3, "f4"))
    Refusing = type("Refusing", (), {"__dlpack_device__": lambda _: (1, 0), "__dlpack__": lambda _, **__: 1 / 0})
    Answering = type("Answering", (), {"__dlpack_device__": lambda _: (1, 0), "__dlpack__": lambda _, **__: source})
    with pytest.raises(BufferError, match="__dlpack__ refused: division by zero"):
        Imported(Refusing())
    with pytest.raises(BufferError, match="answered Foreign, not a capsule"):
        Imported(Answering())


# -- what is refused ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("source", [None, 1, "text", [1, 2], {}, object(), np.ndarray, bytearray, DataType.DT_INT8], ids=repr)
def test_objects_without_memory(source: Any) -> None:
    with pytest.raises(TypeError):
        Imported(source)


@pytest.mark.parametrize("dtype", ["O", [("name", "f4"), ("other", "O")], [("when", "M8[s]"), ("other", "O")]])
def test_python_objects_are_never_overwritten(dtype: Any) -> None:
    with pytest.raises(BufferError, match="Python objects"):
        Imported(np.zeros(3, dtype))
    with pytest.raises(BufferError, match="Python objects"):
        Imported((ctypes.py_object * 2)())


def test_an_interface_of_objects_is_refused() -> None:
    with pytest.raises(BufferError, match="Python objects"):
        Imported(Interface(version=3, data=(64, False), shape=(2,), typestr="|O8"))
    with pytest.raises(BufferError, match="Python objects"):
        Imported(Interface(version=3, data=(64, False), shape=(2,), typestr="|V8", descr=[("a", "|O8")]))


def test_foreign_byte_order_is_refused() -> None:
    foreign_order = np.dtype("f4").newbyteorder()
    with pytest.raises(BufferError, match="byte order"):
        Imported(np.zeros(3, foreign_order))
    with pytest.raises(BufferError, match="byte order"):
        Imported(np.zeros(3, [("a", foreign_order)]))
    with pytest.raises(BufferError, match="byte order"):
        Imported(Interface(version=3, data=(64, False), shape=(2,), typestr=foreign_order.str))
    assert Imported(np.zeros(3, np.dtype("i1").newbyteorder())).is_bytes


def test_a_buffer_that_is_gone_is_refused() -> None:
    view = memoryview(bytearray(3))
    view.release()
    mapping = mmap.mmap(-1, 4096)
    mapping.close()
    with pytest.raises(BufferError, match="released"):
        Imported(view)
    with pytest.raises(BufferError, match="closed"):
        Imported(mapping)


def test_a_refused_buffer_is_not_held() -> None:
    source = (ctypes.py_object * 2)()
    before = sys.getrefcount(source)
    with pytest.raises(BufferError):
        Imported(source)
    assert sys.getrefcount(source) == before


# -- how long -------------------------------------------------------------------------------------------------------------

def test_memory_is_let_go_in_a_cycle_too() -> None:
    class Knot(bytearray):
        pass

    knot: Any = Knot(8)
    knot.memory = Imported(knot)
    alive = weakref.ref(knot)
    del knot
    gc.collect()
    assert alive() is None


def test_no_reference_is_lost() -> None:
    sources: list[Any] = [bytearray(8), np.zeros(3), np.zeros(3, ml_dtypes.bfloat16), Foreign(np.zeros(3, "f4"))]
    for source in sources:
        Imported(source)                # the first call of a ctypes function keeps a reference of its own
    before = [sys.getrefcount(source) for source in sources]
    for source in sources:
        for _ in range(10):
            Imported(source).release()
    assert [sys.getrefcount(source) for source in sources] == before


def test_repr() -> None:
    memory = Imported(np.zeros((2, 3), "f4"))
    assert repr(memory) == f"Imported({memory.address:#x}, shape=[2, 3], strides=[12, 4], format='f')"
