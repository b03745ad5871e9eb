"""The bytes of a row, and what they say about themselves.

A *stamp* names cluster, slot, row and generation. Word i of tensor t is the stamp plus a number that depends on t and i alone,
modulo 2**64: subtract these numbers, and the stamp is left in every word, if all of them belong to one generation of one row and
stand in their places.
"""
from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torture.shelves import Shape

if TYPE_CHECKING:
    from shmkv import KvCache

Words = npt.NDArray[np.uint64]
BLOCK = 32768
_BASE: Words = np.random.default_rng(20).integers(0, 2**64, BLOCK, np.uint64)
_TENSOR, _BLOCK = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_ALL = 2**64 - 1
COUNT_BITS = 24                         # of a generation; above them stands the life


class Stamp(NamedTuple):
    """Whose bytes these are."""

    cluster: int
    slot: int
    row: int
    generation: int


CANARY = 255                            # cluster of bytes that no prompt has


def generation(life: int, count: int) -> int:
    """Goes up from publication to publication and from life to life of a cluster id."""
    return life << COUNT_BITS | count


def pack(stamp: Stamp) -> int:
    return stamp.cluster << 56 | stamp.slot << 46 | stamp.row << 40 | stamp.generation


def unpack(word: int) -> Stamp:
    return Stamp(word >> 56, word >> 46 & 0x3FF, word >> 40 & 0x3F, word & (1 << 40) - 1)


@lru_cache
def template(tensors: int, words: int, first: int = 0) -> Words:
    """What is added to the stamp, (tensors, words), for rows of one block; of tensors from the `first` on."""
    assert words <= BLOCK
    steps = np.array([_step(first + tensor, 0) for tensor in range(tensors)], np.uint64)
    return _BASE[:words] + steps[:, None]


def _step(tensor: int, block: int) -> int:
    return (tensor * _TENSOR + block * _BLOCK) & _ALL


def array_of(cache: KvCache, shape: Shape) -> Words:
    """All words of a cache, (tensors, rows, words), without a view that would keep its memory from being used again."""
    (addresses,) = cache.per_device_tensor_addrs
    step = addresses[1] - addresses[0]
    length = step * (shape.tensors - 1) + shape.rows * shape.words * 8
    memory = memoryview((ctypes.c_char * length).from_address(addresses[0])).cast("B")
    words: Words = np.ndarray((shape.tensors, shape.rows, shape.words), np.uint64, memory, strides=(step, shape.words * 8, 8))
    return words


def fill(row: Words, word: int, first: int = 0) -> None:
    """Write a row, (tensors, words), of any length, or of one block some of its tensors."""
    tensors, words = row.shape
    if words <= BLOCK:
        np.add(template(tensors, words, first), np.uint64(word), out=row)
        return
    for tensor in range(tensors):
        for block in range(words // BLOCK):
            step = np.uint64((word + _step(tensor, block)) & _ALL)
            np.add(_BASE, step, out=row[tensor, block * BLOCK:(block + 1) * BLOCK])


def read(row: Words, first: int = 0) -> int | None:
    """The word of the stamp that a row, (tensors, words), carries in every place; None if they differ. `first` as for `fill`."""
    tensors, words = row.shape
    if words <= BLOCK:
        found = row - template(tensors, words, first)
        word = found[0, 0]
        return int(word) if bool((found == word).all()) else None
    word = (int(row[0, 0]) - int(_BASE[0])) & _ALL
    left = np.empty(BLOCK, np.uint64)
    for tensor in range(tensors):
        for block in range(words // BLOCK):
            np.subtract(row[tensor, block * BLOCK:(block + 1) * BLOCK], _BASE, out=left)
            if not bool((left == np.uint64((word + _step(tensor, block)) & _ALL)).all()):
                return None
    return word


def has_only(row: Words, allowed: tuple[int, ...]) -> bool:
    """Is each word of a row that of one of these stamps, in its place?"""
    tensors, words = row.shape
    for tensor in range(tensors):
        for block in range(-(-words // BLOCK)):
            piece = row[tensor, block * BLOCK:(block + 1) * BLOCK]
            left = piece - _BASE[:piece.size] - np.uint64(_step(tensor, block))
            if not bool(np.isin(left, np.array(allowed, np.uint64)).all()):
                return False
    return True


def read_many(rows: Words, parts: int) -> tuple[Words, npt.NDArray[np.bool_]]:
    """Of rows of one block each, (tensors, count, words), the words of the stamps, (count, parts), and whether each part of the
    tensors carries one in every place."""
    tensors, count, words = rows.shape
    found = rows.transpose(1, 0, 2) - template(tensors, words)
    flat = found.reshape(count, parts, tensors // parts * words)
    return flat[:, :, 0], (flat == flat[:, :, :1]).all(axis=2)


def describe(row: Words) -> str:
    """For a fault: which stamps a row holds, tensor by tensor, and how often."""
    lines = []
    for tensor in range(row.shape[0]):
        words = row[tensor].reshape(-1, min(BLOCK, row.shape[1]))
        left = np.concatenate([piece - _BASE[:piece.size] - np.uint64(_step(tensor, block)) for block, piece in enumerate(words)])
        values, counts = np.unique(left, return_counts=True)
        some = [f"{unpack(int(value))} x {count}" for value, count in list(zip(values, counts, strict=True))[:6]]
        lines.append(f"tensor {tensor}: {', '.join(some)}{' ...' if len(values) > 6 else ''}")
    return "\n".join(lines)
