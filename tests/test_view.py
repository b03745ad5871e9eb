"""Zero-copy views: numpy, the buffer protocol and DLPack show one memory, keep it alive and let it go."""
from __future__ import annotations

import ctypes
import gc
import hashlib
from pathlib import Path
from typing import Any

import memory
import ml_dtypes
import numpy as np
import pytest
from foreign import DlTensor, DlVersioned

from shmkv import CacheDesc, DataType
from shmkv._mapping import Region
from shmkv._view import TensorView
from shmkv.kv_cache import make_view
from shmkv.types import storage_dtype

SHAPE = (2, 3, 4)
WITHOUT_LETTER = [DataType.DT_BF16, DataType.DT_STRING, DataType.DT_FLOAT8_E4M3FN, DataType.DT_FLOAT8_E5M2]
NATIVE = [kind for kind in DataType if kind not in WITHOUT_LETTER]
DLPACK = {DataType.DT_FLOAT: (2, 32), DataType.DT_FLOAT16: (2, 16), DataType.DT_BF16: (4, 16), DataType.DT_INT8: (0, 8),
          DataType.DT_UINT64: (1, 64), DataType.DT_BOOL: (6, 8),
          DataType.DT_FLOAT8_E4M3FN: (10, 8), DataType.DT_FLOAT8_E5M2: (12, 8)}

every_dtype = pytest.mark.parametrize("kind", list(DataType), ids=lambda kind: kind.name)
native_dtypes = pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
no_letter = pytest.mark.parametrize("kind", WITHOUT_LETTER, ids=lambda kind: kind.name)


def pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, name))


def view_of(kind: DataType, shape: tuple[int, ...] = SHAPE, *, offset: int = 64) -> tuple[TensorView, Region]:
    desc = CacheDesc(1, list(shape), kind)
    region = memory.anonymous(offset + desc.size + 64)
    memory.content(region)[:] = np.arange(region.nbytes) % 251
    if kind == DataType.DT_BOOL:
        memory.content(region)[:] %= 2
    return make_view(region, offset, desc, 0), region


def read_only(kind: DataType = DataType.DT_FLOAT) -> TensorView:
    view, region = view_of(kind)
    letter = b"f" if kind == DataType.DT_FLOAT else b""
    return TensorView(region, 64, view.shape, kind, storage_dtype(kind), letter, DLPACK[kind], True)


@every_dtype
def test_view_describes_its_tensor(kind: DataType) -> None:
    view, region = view_of(kind)
    assert view.shape == SHAPE
    assert view.dtype is kind
    assert view.nbytes == 24 * storage_dtype(kind).itemsize
    assert view.data_ptr == region.base + 64
    assert len(view) == 2
    assert not view.readonly
    assert repr(view) == f"TensorView(shape=[2, 3, 4], dtype={kind}, data_ptr={region.base + 64:#x})"


@every_dtype
def test_numpy_is_the_memory_itself(kind: DataType) -> None:
    view, region = view_of(kind)
    array = view.numpy()
    assert (array.shape, array.dtype) == (SHAPE, storage_dtype(kind))
    assert array.ctypes.data == view.data_ptr
    array.reshape(-1).view(np.uint8)[:] = 1
    assert (memory.content(region, 64, view.nbytes) == 1).all()
    assert memory.content(region)[63] == 63 % (2 if kind == DataType.DT_BOOL else 251)


@every_dtype
def test_asarray_is_typed_and_shares_memory(kind: DataType) -> None:
    view, _ = view_of(kind)
    for array in (np.asarray(view), np.array(view, copy=False)):
        assert (array.dtype, array.shape, array.ctypes.data) == (storage_dtype(kind), SHAPE, view.data_ptr)
    copied = np.array(view)
    assert copied.dtype == storage_dtype(kind)
    assert copied.ctypes.data != view.data_ptr
    assert copied.tobytes() == view.numpy().tobytes()


def test_bf16_is_ml_dtypes_and_can_be_converted() -> None:
    view, _ = view_of(DataType.DT_BF16)
    view.numpy()[...] = 1.5
    assert np.asarray(view).dtype == ml_dtypes.bfloat16
    wide = np.asarray(view, dtype=np.float32)
    assert (wide.dtype, wide.shape, wide.flags.owndata) == (np.float32, SHAPE, True)
    assert (wide == 1.5).all()
    with pytest.raises(ValueError, match="without a copy"):
        view.__array__(np.float32, copy=False)


@native_dtypes
def test_memoryview_of_a_native_dtype_is_typed(kind: DataType) -> None:
    view, _ = view_of(kind)
    with memoryview(view) as seen:
        assert np.dtype(seen.format) == storage_dtype(kind)
        assert (seen.shape, seen.nbytes, seen.c_contiguous, seen.readonly) == (SHAPE, view.nbytes, True, False)
        assert np.asarray(seen).tolist() == view.numpy().tolist()
    assert len(bytes(view)) == view.nbytes


@no_letter
def test_memoryview_without_a_letter_says_what_to_use(kind: DataType) -> None:
    view, _ = view_of(kind)
    for typed in (memoryview, bytes, bytearray):        # all three ask for a format
        with pytest.raises(BufferError, match=f"no format for {kind}: use numpy.., raw or from_dlpack"):
            typed(view)


class Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
                ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
                ("format", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
                ("strides", ctypes.POINTER(ctypes.c_ssize_t)), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


def ask(view: TensorView, flags: int) -> Buffer:
    """PyObject_GetBuffer with these flags; what it grants is released at once."""
    found = Buffer()
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get.argtypes, release.argtypes = [ctypes.py_object, ctypes.POINTER(Buffer), ctypes.c_int], [ctypes.POINTER(Buffer)]
    get(view, ctypes.byref(found), flags)
    release(ctypes.byref(found))
    return found


def test_fortran_order_is_not_promised() -> None:
    view, _ = view_of(DataType.DT_FLOAT)
    nd, strides, c_order, f_order, any_order, typed = 0x8, 0x10, 0x20, 0x40, 0x80, 0x4
    for order in (c_order, any_order):
        assert ask(view, nd | strides | order | typed).ndim == 3
    with pytest.raises(BufferError):
        ask(view, nd | strides | f_order | typed)


@every_dtype
def test_raw_is_bytes_whatever_the_dtype(kind: DataType) -> None:
    view, region = view_of(kind)
    raw = view.raw
    assert (raw.format, raw.ndim, raw.nbytes, raw.readonly) == ("B", 1, view.nbytes, False)
    assert bytes(raw) == memory.content(region, 64, view.nbytes).tobytes()
    raw[0] = 1
    assert memory.content(region)[64] == 1


@every_dtype
def test_bytes_like_uses_take_every_dtype(kind: DataType, tmp_path: Path) -> None:
    view, region = view_of(kind)
    wanted = memory.content(region, 64, view.nbytes).tobytes()
    assert hashlib.sha256(view).digest() == hashlib.sha256(wanted).digest()
    joined = bytearray(b"x")
    joined += view
    assert joined == b"x" + wanted
    assert b"".join([view, view]) == wanted * 2
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert file.write(view) == view.nbytes
    assert (tmp_path / "file").read_bytes() == wanted
    gc.collect()
    assert region.exports == 1


@every_dtype
def test_file_is_read_straight_into_a_view(kind: DataType, tmp_path: Path) -> None:
    view, region = view_of(kind)
    (tmp_path / "file").write_bytes(bytes(view.nbytes))
    with (tmp_path / "file").open("rb", buffering=0) as file:
        assert file.readinto(view) == view.nbytes
    assert not memory.content(region, 64, view.nbytes).any()
    assert memory.content(region)[64 + view.nbytes] == (64 + view.nbytes) % 251 % (2 if kind == DataType.DT_BOOL else 251)


@native_dtypes
def test_numpy_takes_the_dlpack_capsule_without_a_copy(kind: DataType) -> None:
    view, _ = view_of(kind)
    array = np.from_dlpack(view)
    assert (array.dtype, array.shape, array.ctypes.data) == (storage_dtype(kind), SHAPE, view.data_ptr)


@pytest.mark.parametrize("kind", list(DLPACK), ids=lambda kind: kind.name)
def test_capsule_describes_the_tensor(kind: DataType) -> None:
    view, _ = view_of(kind)
    capsule = view.__dlpack__()
    tensor = DlTensor.from_address(pointer(capsule, b"dltensor"))
    assert (tensor.code, tensor.bits, tensor.lanes) == (*DLPACK[kind], 1)
    assert (tensor.device_type, tensor.device_id, tensor.ndim, tensor.byte_offset) == (1, 0, 3, 0)
    assert tensor.data == view.data_ptr
    assert (tensor.shape[:3], tensor.strides[:3]) == ([2, 3, 4], [12, 4, 1])
    assert view.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize(("copy", "flags"), [(None, 0), (False, 0), (True, 2)])
def test_versioned_capsule_of_bf16(copy: bool | None, flags: int) -> None:
    view, _ = view_of(DataType.DT_BF16)
    capsule = view.__dlpack__(max_version=(1, 1), copy=copy, dl_device=(1, 0))
    found = DlVersioned.from_address(pointer(capsule, b"dltensor_versioned"))
    assert (found.major, found.flags) == (1, flags)
    assert (found.tensor.code, found.tensor.bits, found.tensor.ndim) == (4, 16, 3)
    assert (found.tensor.data == view.data_ptr) == (not copy)
    if copy:
        assert found.tensor.data % 64 == 0
        assert ctypes.string_at(found.tensor.data, view.nbytes) == view.numpy().tobytes()


@pytest.mark.parametrize(("kind", "minor"), [(DataType.DT_FLOAT8_E5M2, 1), (DataType.DT_FLOAT8_E4M3FN, 1), (DataType.DT_FLOAT, 0)])
def test_versioned_capsule_says_which_dlpack_has_its_type(kind: DataType, minor: int) -> None:
    view, _ = view_of(kind)
    capsule = view.__dlpack__(max_version=(1, 0))
    found = DlVersioned.from_address(pointer(capsule, b"dltensor_versioned"))
    assert (found.major, found.minor, found.tensor.code) == (1, minor, DLPACK[kind][0])


@pytest.mark.parametrize("kind", [DataType.DT_FLOAT8_E5M2, DataType.DT_FLOAT8_E4M3FN], ids=lambda kind: kind.name)
def test_all_patterns_of_an_8_bit_float_are_seen(kind: DataType) -> None:
    view, region = view_of(kind, (2, 256))
    memory.content(region, 64, 512)[:] = np.arange(512) % 256
    array = view.numpy()
    assert array[1].tobytes() == bytes(view.raw)[256:] == bytes(range(256))
    wide = array[0].astype(np.float32)
    assert wide[0] == 0
    assert np.signbit(wide[128])
    assert len(set(wide[~np.isnan(wide)])) > 240
    array[0, :3] = 1.5
    assert np.asarray(view, dtype=np.float64)[0, :3].tolist() == [1.5] * 3


def test_old_consumers_get_the_old_capsule() -> None:
    view, _ = view_of(DataType.DT_BF16)
    for version in (None, (0, 8)):
        assert pointer(view.__dlpack__(max_version=version), b"dltensor")


@pytest.mark.parametrize("arguments", [{}, {"max_version": (1, 0)}, {"copy": True}, {"max_version": (1, 0), "copy": True}])
def test_capsule_that_nobody_takes_lets_go(arguments: dict[str, Any]) -> None:
    view, region = view_of(DataType.DT_BF16)
    for _ in range(50):
        capsule = view.__dlpack__(**arguments)
        del capsule
    del view
    gc.collect()
    assert region.exports == 0


@pytest.mark.parametrize("arguments", [{}, {"max_version": (1, 0)}])
def test_capsule_keeps_the_memory(arguments: dict[str, Any]) -> None:
    view, region = view_of(DataType.DT_BF16)
    capsule = view.__dlpack__(**arguments)
    del view
    gc.collect()
    assert region.exports == 1
    del capsule
    gc.collect()
    assert region.exports == 0


def test_dlpack_refuses_what_it_cannot_give() -> None:
    view, _ = view_of(DataType.DT_FLOAT)
    with pytest.raises(BufferError, match=r"on the CPU \(1, 0\), not on \(2, 0\)"):
        view.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="no stream"):
        view.__dlpack__(stream=1)
    text, _ = view_of(DataType.DT_STRING)
    with pytest.raises(BufferError, match=r"DLPack has no type for DataType\.DT_STRING"):
        text.__dlpack__()


@pytest.mark.parametrize("kind", [DataType.DT_FLOAT, DataType.DT_BF16], ids=lambda kind: kind.name)
def test_read_only_view_refuses_every_way_to_write(kind: DataType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    view = read_only(kind)
    assert view.readonly
    for array in (view.numpy(), np.asarray(view)):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1
    assert view.raw.readonly
    with pytest.raises(TypeError, match="read-write bytes-like"), (tmp_path / "file").open("rb", buffering=0) as file:
        file.readinto(view)
    with pytest.raises(BufferError, match="exported with copy=True only"):
        view.__dlpack__()
    with pytest.raises(BufferError, match="exported with copy=True only"):
        view.__dlpack__(max_version=(1, 0), copy=False)


def test_read_only_view_is_given_away_as_a_copy() -> None:
    view = read_only()
    array = np.from_dlpack(view, copy=True)
    assert array.ctypes.data != view.data_ptr
    assert array.tobytes() == view.numpy().tobytes()
    array[...] = 0
    assert view.numpy().any()


def test_view_of_a_read_only_region_is_read_only() -> None:
    region = memory.anonymous(4096, writable=False)
    view = make_view(region, 0, CacheDesc(1, [4], DataType.DT_INT8), 0)
    assert view.readonly
    with pytest.raises(ValueError, match="read-only"):
        view.numpy()[0] = 1


def derived(view: TensorView) -> list[Any]:
    """Everything that can be made of a view."""
    return [view.numpy(), np.asarray(view)[1:], view.raw, np.from_dlpack(view), memoryview(view)]


@pytest.mark.parametrize("number", range(5))
def test_what_was_made_of_a_view_keeps_the_memory_mapped(number: int) -> None:
    view, region = view_of(DataType.DT_FLOAT)
    address, wanted = region.base, bytes(view.raw)
    made = derived(view)[number]
    gc.collect()
    del view, region
    gc.collect()
    assert any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())
    assert bytes(made) in wanted
    del made


def test_exports_count_what_lives() -> None:
    view, region = view_of(DataType.DT_FLOAT)
    assert region.exports == 1
    second = make_view(region, 0, CacheDesc(1, [4], DataType.DT_INT8), 0)
    assert region.exports == 2
    made = derived(view)
    del view, second
    gc.collect()
    assert region.exports == 1
    del made
    gc.collect()
    assert region.exports == 0


def test_view_must_lie_inside_its_memory() -> None:
    region = memory.anonymous(4096)
    for offset, shape in [(4096, [1]), (4033, [64]), (0, [4097]), (2**64 - 1, [2])]:
        with pytest.raises(ValueError, match="do not fit 4096 bytes of memory"):
            make_view(region, offset, CacheDesc(1, shape, DataType.DT_INT8), 0)
    gc.collect()
    assert region.exports == 0
    assert make_view(region, 4096 - 64, CacheDesc(1, [64], DataType.DT_INT8), 0).nbytes == 64


def test_view_has_at_most_32_dimensions() -> None:
    region = memory.anonymous(4096)
    assert make_view(region, 0, CacheDesc(1, [1] * 32, DataType.DT_INT8), 0).numpy().ndim == 32
    with pytest.raises(ValueError, match="at most 32 dimensions, not 33"):
        make_view(region, 0, CacheDesc(1, [1] * 33, DataType.DT_INT8), 0)
