"""Memory that the caller already has, as the tensors of a cache: from objects to addresses of rows. Nothing is copied.

What is accepted: whatever has the buffer protocol, ``__array_interface__`` or DLPack with memory of the CPU (bytearray, mmap,
array, ctypes, numpy with ml_dtypes, torch), in these forms, which a list may mix:

* one object a tensor, of the tensor's shape;
* an object with more axes in front, whose indices count tensors in C order: [2, *shape] for the K and the V of a layer;
* flat bytes (one axis of int8 or uint8) of exactly one or more tensors, one behind the other;
* lists or tuples of these, and any one of these without a list around it.

Strided views are accepted as `strided_rows` says.

Held memory stays where it is as far as its owner lets us: an exported bytearray, array or mmap cannot be resized or closed
(BufferError); a numpy array that a weak reference leads to refuses `resize`, with ``refcheck=False`` too. Nobody but the caller can
keep a torch tensor's storage from being resized or moved (`resize_`, ``untyped_storage().resize_``, `share_memory_`), or the numpy
array below ``torch.from_numpy``.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from shmkv._imported import Imported
from shmkv.checks import shown, wrong_element, wrong_type
from shmkv.errors import LLMParamError
from shmkv.strided_rows import RowLayout, check_axes, dense_rows, first_overlap, strided_rows

NAME = "buffers"


class HeldMemory:
    """The rows of a cache's tensors in memory of the caller, which is held until `release` or the end of this object.

    `base` is the lowest address; `tensors` has one RowLayout a tensor, with offsets from `base`; `nbytes` is the distance from
    `base` to the end of the last tensor, in which there may be memory of others; `keepers` are what holds the memory.
    """

    def __init__(self, tensors: Sequence[RowLayout], keepers: Sequence[Any]) -> None:
        self.base = min(tensor.offset for tensor in tensors)
        self.tensors = tuple(tensor._replace(offset=tensor.offset - self.base) for tensor in tensors)
        self.nbytes = max(tensor.offset + tensor.nbytes for tensor in self.tensors)
        self.keepers = tuple(keepers)

    @property
    def is_dense(self) -> bool:
        """Do the rows of each tensor lie as in one that was allocated? The tensors themselves may lie anywhere."""
        return all(tensor.is_dense for tensor in self.tensors)

    def release(self) -> None:
        """Let go of the memory; idempotent. Nobody may use the addresses any more."""
        keepers, self.keepers = list(self.keepers), ()
        _release(keepers)

    def __repr__(self) -> str:
        return f"HeldMemory({len(self.tensors)} tensors, base={self.base:#x}, nbytes={self.nbytes})"


def lay_out(shapes: Sequence[Sequence[int]], itemsizes: Sequence[int], batch_dim: int, buffers: object) -> HeldMemory:
    """The memory of `buffers` as tensors of these shapes and bytes an element; `batch_dim` is the dim that counts rows, in all.

    Raises:
        TypeError: `buffers` or an entry is None, or has none of the three protocols.
        LLMParamError: an entry is read-only, on another device, of another shape or element size, empty; its rows are not
            contiguous or share bytes; two tensors share bytes; there are not as many tensors as shapes.
    """
    keepers: list[Any] = []
    try:
        return HeldMemory(_all_tensors(shapes, itemsizes, batch_dim, buffers, keepers), keepers)
    except BaseException:
        # The traceback would keep what is held here for as long as the exception lives.
        _release(keepers)
        raise


def _release(keepers: list[Any]) -> None:
    while keepers:
        keeper = keepers.pop()
        if isinstance(keeper, Imported):
            keeper.release()


def _all_tensors(shapes: Sequence[Sequence[int]], itemsizes: Sequence[int], batch_dim: int, buffers: object,
                 keepers: list[Any]) -> list[RowLayout]:
    """As lay_out; what has to stay is added to `keepers` before anything is said about it. Offsets are addresses."""
    tensors: list[RowLayout] = []
    places: list[str] = []
    for place, source in _entries(NAME, buffers):
        memory = _imported(place, source)
        keepers += [memory, *_weak_references(source)]
        if memory.readonly:
            raise LLMParamError(f"argument '{place}' of type {type(source).__name__} is read-only, expected memory to write to")
        found = _tensors_of(memory, place, shapes[len(tensors):], itemsizes[len(tensors):], batch_dim, len(tensors))
        tensors += found
        places += [place] * len(found)
    if len(tensors) != len(shapes):
        raise LLMParamError(f"argument '{NAME}' has memory for {len(tensors)} tensors, expected {len(shapes)}")
    _check_apart(tensors, places)
    return tensors


def _entries(place: str, value: object) -> Iterator[tuple[str, object]]:
    """(place, object) of all objects in lists and tuples."""
    if isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from _entries(f"{place}[{number}]", entry)
    else:
        yield place, value


def _imported(place: str, source: object) -> Imported:
    if source is None:
        raise (wrong_type(NAME, None, list, tuple, memoryview) if place == NAME else
               wrong_element(NAME, place, None, memoryview))
    try:
        return Imported(source)
    except TypeError as error:
        raise TypeError(f"argument '{place}' only support memory (buffer protocol, __array_interface__ or DLPack), "
                        f"got {shown(source)} of type {type(source).__name__}") from error
    except BufferError as error:
        raise LLMParamError(f"argument '{place}' of type {type(source).__name__} cannot be used: {error}") from error


def _weak_references(source: object) -> Iterator[weakref.ref[Any]]:
    """numpy resizes no array that a weak reference leads to, whatever refcheck says; an export does not keep it from that."""
    while source is not None:
        if isinstance(source, np.ndarray):
            yield weakref.ref(source)
            source = source.base
        else:
            source = source.obj if isinstance(source, memoryview) else None


def _tensors_of(memory: Imported, place: str, shapes: Sequence[Sequence[int]], itemsizes: Sequence[int], batch_dim: int,
                first: int) -> list[RowLayout]:
    """The next tensors, all that `memory` has; `first` is the number of the first, and offsets are addresses."""
    where = f"argument '{place}' (from tensor {first} on)"
    if not shapes:
        raise LLMParamError(f"argument '{place}' is one too many: the {first} tensors have their memory already")
    shape = list(shapes[0])
    if memory.is_bytes and len(memory.shape) == 1 and (list(memory.shape) != shape or itemsizes[0] != 1):
        return _flat_tensors(memory, where, shapes, itemsizes, batch_dim)
    if memory.itemsize != itemsizes[0]:
        raise LLMParamError(f"{where} has elements of {memory.itemsize} bytes ({memory.format}), expected {itemsizes[0]}")
    leading = len(memory.shape) - len(shape)
    if leading < 0 or list(memory.shape[leading:]) != shape:
        raise LLMParamError(f"{where} has shape {list(memory.shape)}, expected {shape}, more axes before these, or flat bytes")
    _check_same(memory, where, shapes, itemsizes, math.prod(memory.shape[:leading]))
    rows = strided_rows(memory.shape, memory.strides, memory.itemsize, leading + batch_dim, leading, where)
    steps = ([index * stride for index in range(dim)]
             for dim, stride in zip(memory.shape[:leading], memory.strides[:leading], strict=True))
    return [rows._replace(offset=memory.address + sum(step)) for step in product(*steps)]


def _check_same(memory: Imported, where: str, shapes: Sequence[Sequence[int]], itemsizes: Sequence[int], count: int) -> None:
    """The tensors that one object holds have one shape and element size, and are not more than are left."""
    if count > len(shapes):
        raise LLMParamError(f"{where} of shape {list(memory.shape)} has {count} tensors, expected {len(shapes)} or fewer")
    for number in range(1, count):
        if list(shapes[number]) != list(shapes[0]) or itemsizes[number] != itemsizes[0]:
            raise LLMParamError(f"{where} of shape {list(memory.shape)} has {count} tensors of one shape and element size, "
                                f"expected {list(shapes[number])} of {itemsizes[number]} bytes for its tensor {number}")


def _flat_tensors(memory: Imported, where: str, shapes: Sequence[Sequence[int]], itemsizes: Sequence[int],
                  batch_dim: int) -> list[RowLayout]:
    check_axes(memory.shape, memory.strides, where)
    nbytes = memory.shape[0]
    if nbytes > 1 and memory.strides[0] != 1:
        raise LLMParamError(f"{where}: axis 0 has a stride of {memory.strides[0]} bytes, expected 1: flat bytes lie together")
    found: list[RowLayout] = []
    used = 0
    for shape, itemsize in zip(shapes, itemsizes, strict=True):
        if used >= nbytes:
            break
        found.append(dense_rows(memory.address + used, shape, itemsize, batch_dim))
        used += found[-1].nbytes
    if used != nbytes:
        raise LLMParamError(f"{where} has {nbytes} bytes, expected the bytes of whole tensors: {found[0].nbytes} for the first, "
                            f"{used} for {len(found)}")
    return found


def _check_apart(tensors: Sequence[RowLayout], places: Sequence[str]) -> None:
    shared = first_overlap(tensors)
    if shared is None:
        return
    one, two = shared
    what = "is the same memory as" if tensors[one] == tensors[two] else "shares bytes with"
    raise LLMParamError(f"argument '{places[two]}': tensor {two} {what} tensor {one} ('{places[one]}'), expected memory of its own")
