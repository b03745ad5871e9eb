"""Numpy twin of plan and copy: what pull_cache, pull_blocks, copy_blocks and swap_blocks have to answer, by brute force.

A cache is a uint8 array of shape (num_tensors, outer, rows, inner): ``outer`` is the product of the
dimensions before the batch dimension, ``inner`` the bytes of the dimensions after it. A row is what
``cache[t, :, b, :]`` holds, in that order. A cache whose tensors differ is a list of such ``cache[t]``.
Nothing here knows shared memory, links or shmkv itself; the order of the checks is the order of the contract.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Tensors = Sequence[Bytes] | Bytes

SUCCESS = "LLM_SUCCESS"
PARAM_INVALID = "LLM_PARAM_INVALID"
NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
WRONG_TYPE = "TypeError"
U32, I63 = 2**32 - 1, 2**63 - 1


class Geometry(NamedTuple):
    """Shape of the byte array of a cache."""

    num_tensors: int
    outer: int
    rows: int
    inner: int

    @property
    def stride(self) -> int:
        """Bytes of one row of one tensor."""
        return self.outer * self.inner


def geometry(num_tensors: int, shape: list[int], itemsize: int, batch_dim: int = 0) -> Geometry:
    """Geometry of a cache of ``num_tensors`` tensors of ``shape`` whose elements have ``itemsize`` bytes."""
    outer, inner = np.prod(shape[:batch_dim], dtype=int), np.prod(shape[batch_dim + 1:], dtype=int)
    return Geometry(num_tensors, int(outer), shape[batch_dim], int(inner) * itemsize)


@dataclass(frozen=True)
class Pull:
    """Arguments of one pull: ``src_row`` is the row that the key names, the others are pull_cache's own."""

    src_row: int = 0
    batch_index: Any = 0
    size: Any = -1
    src_layer_range: Any = None
    dst_layer_range: Any = None
    src_cache_offset: Any = None
    dst_cache_offset: Any = None
    tensor_num_per_layer: Any = 2

    def options(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, under pull_cache's own names."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "src_row"}
        return {name: value for name, value in given.items() if value != getattr(Pull, name)}


class Refused(Exception):
    """The pull is an error: the argument is the status or the class of that error."""


def _need(condition: bool, answer: str = PARAM_INVALID) -> None:
    if not condition:
        raise Refused(answer)


def _need_int(value: Any, low: int, high: int) -> None:
    _need(isinstance(value, int), WRONG_TYPE)
    _need(low <= value <= high)


def _check_arguments(pull: Pull, dst_tensors: int) -> None:
    _need_int(pull.size, -1, I63)
    _need(pull.size != 0)
    _need_int(pull.batch_index, 0, U32)
    for offset in (pull.src_cache_offset, pull.dst_cache_offset):
        if offset is not None:
            _need_int(offset, 0, I63)
    _need_int(pull.tensor_num_per_layer, 1, U32)
    given = [layers for layers in (pull.src_layer_range, pull.dst_layer_range) if layers is not None]
    for layers in given:
        _need(isinstance(layers, range), WRONG_TYPE)
        _need(layers.step == 1 and 0 <= layers.start <= U32 and len(layers) > 0)
    _need(len({len(layers) for layers in given}) < 2)
    _need(pull.tensor_num_per_layer == 2 or pull.tensor_num_per_layer <= dst_tensors)
    _need(not given or _divides(pull.tensor_num_per_layer, dst_tensors))


def _divides(per_layer: int, num_tensors: int) -> bool:
    return per_layer == 2 or num_tensors % per_layer == 0


def _tensors(layers: Any, per_layer: int, num_tensors: int) -> range:
    if layers is None:
        return range(num_tensors)
    _need(layers.stop * per_layer <= num_tensors)
    return range(layers.start * per_layer, layers.stop * per_layer)


def _stride(tensor: Bytes) -> int:
    return int(tensor.shape[0] * tensor.shape[2])


def pull_tensors(src: Tensors | None, dst: Tensors, pull: Pull) -> list[Bytes]:
    """The destination's tensors after the pull; ``src`` None means that the key names nothing. Raises Refused."""
    per_layer = pull.tensor_num_per_layer
    src_offset, dst_offset = pull.src_cache_offset or 0, pull.dst_cache_offset or 0
    _check_arguments(pull, len(dst))
    _need(pull.batch_index < dst[0].shape[1])
    into = _tensors(pull.dst_layer_range, per_layer, len(dst))
    lengths = [_stride(dst[place]) - dst_offset if pull.size == -1 else pull.size for place in into]
    for place, length in zip(into, lengths, strict=True):
        _need(length > 0 and dst_offset + length <= _stride(dst[place]))
    if src is None or not 0 <= pull.src_row < src[0].shape[1]:
        raise Refused(NOT_EXIST)
    out_of = _tensors(pull.src_layer_range, per_layer, len(src))
    ranges_given = pull.src_layer_range is not None or pull.dst_layer_range is not None
    _need(not ranges_given or _divides(per_layer, len(src)))
    _need(len(out_of) == len(into))
    for place, length in zip(out_of, lengths, strict=True):
        _need(src_offset + length <= _stride(src[place]))
    after = [tensor.copy() for tensor in dst]
    for source, place, length in zip(out_of, into, lengths, strict=True):
        _move_row(src[source], after[place], (pull.src_row, pull.batch_index), (src_offset, dst_offset), length)
    return after


def _move_row(src: Bytes, dst: Bytes, rows: tuple[int, int], offsets: tuple[int, int], length: int) -> None:
    window = src[:, rows[0], :].reshape(-1)[offsets[0]:offsets[0] + length]
    row = dst[:, rows[1], :].reshape(-1)
    row[offsets[1]:offsets[1] + length] = window
    dst[:, rows[1], :] = row.reshape(dst.shape[0], dst.shape[2])


def pull_bytes(src: Bytes | None, dst: Bytes, pull: Pull) -> Bytes:
    """The same for caches whose tensors are alike, each one array."""
    return np.stack(pull_tensors(src, dst, pull))


def copy_tensors(src: Tensors, dst: Tensors, rows: tuple[int, int], offset: int, size: int) -> list[Bytes]:
    """The destination's tensors after a copy of row rows[0] into row rows[1]. Raises Refused."""
    _need(len(src) == len(dst))
    _need(rows[0] < src[0].shape[1] and rows[1] < dst[0].shape[1])
    lengths = [_stride(tensor) - offset if size == -1 else size for tensor in src]
    for length, source, target in zip(lengths, src, dst, strict=True):
        _need(length > 0 and offset + length <= min(_stride(source), _stride(target)))
    after = [tensor.copy() for tensor in dst]
    for length, source, target in zip(lengths, src, after, strict=True):
        _move_row(source, target, rows, (offset, offset), length)
    return after


@dataclass(frozen=True)
class PullBlocks:
    """Arguments of one pull_blocks. With `by_row` the key names row `src_row`, else the source's blocks."""

    prompt_blocks: Any = ()
    decoder_blocks: Any = ()
    src_layer_range: Any = None
    dst_layer_range: Any = None
    tensor_num_per_layer: Any = 2
    by_row: bool = False
    src_row: int = 0
    into_row: bool = False              # the destination is no blocks cache, and decoder_blocks is empty
    batch_index: int = 0

    def options(self) -> dict[str, Any]:
        """The keyword arguments that differ from their defaults."""
        names = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer", "batch_index")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(PullBlocks, name)}


def _check_lists(pull: PullBlocks) -> None:
    src, dst = pull.prompt_blocks, pull.decoder_blocks
    if pull.by_row:
        _need(not src and len(dst) > 0)
    elif pull.into_row:
        _need(len(src) > 0 and not dst)
    else:
        _need(len(src) == len(dst) > 0)
    _need(pull.into_row or pull.batch_index == 0)
    for number in (*src, *dst):
        _need_int(number, 0, 2**64 - 1)


def _chunks(cache: Bytes, tensor: int, row: int, numbers: Any, nbytes: int | None) -> list[Bytes]:
    """What numbers name: rows, or with `nbytes` chunks of one row."""
    if nbytes is None:
        return [cache[tensor, :, number, :].reshape(-1) for number in numbers]
    whole = cache[tensor, :, row, :].reshape(-1)
    return [whole[place * nbytes:(place + 1) * nbytes] for place in range(len(numbers))]


def pull_blocks_bytes(src: Bytes | None, dst: Bytes, pull: PullBlocks) -> Bytes:
    """The destination after pull_blocks; ``src`` None means that the key names nothing. Raises Refused."""
    _check_lists(pull)
    _check_arguments(Pull(src_layer_range=pull.src_layer_range, dst_layer_range=pull.dst_layer_range, batch_index=pull.batch_index,
                          tensor_num_per_layer=pull.tensor_num_per_layer), dst.shape[0])
    count = max(len(pull.prompt_blocks), len(pull.decoder_blocks))
    _need(max((pull.batch_index,) if pull.into_row else pull.decoder_blocks) < dst.shape[2])
    into = _tensors(pull.dst_layer_range, pull.tensor_num_per_layer, dst.shape[0])
    if src is None or (pull.by_row and not 0 <= pull.src_row < src.shape[2]):
        raise Refused(NOT_EXIST)
    _need(pull.by_row or max(pull.prompt_blocks) < src.shape[2])
    src_nbytes, dst_nbytes = src.shape[1] * src.shape[3], dst.shape[1] * dst.shape[3]
    _need(count * dst_nbytes <= src_nbytes if pull.by_row else count * src_nbytes <= dst_nbytes if pull.into_row
          else src_nbytes == dst_nbytes)
    out_of = _tensors(pull.src_layer_range, pull.tensor_num_per_layer, src.shape[0])
    ranges_given = pull.src_layer_range is not None or pull.dst_layer_range is not None
    _need(not ranges_given or _divides(pull.tensor_num_per_layer, src.shape[0]))
    _need(len(out_of) == len(into))
    after = dst.copy()
    for src_tensor, dst_tensor in zip(out_of, into, strict=True):
        read = _chunks(src, src_tensor, pull.src_row, pull.prompt_blocks or range(count), dst_nbytes if pull.by_row else None)
        if pull.into_row:
            row = after[dst_tensor, :, pull.batch_index, :].reshape(-1)
            row[:count * src_nbytes] = np.concatenate(read)
            after[dst_tensor, :, pull.batch_index, :] = row.reshape(dst.shape[1], dst.shape[3])
            continue
        for number, block in zip(pull.decoder_blocks, read, strict=True):
            after[dst_tensor, :, number, :] = block.reshape(dst.shape[1], dst.shape[3])
    return after


def expected_pull_blocks(src: Bytes | None, dst: Bytes, pull: PullBlocks) -> tuple[str, Bytes]:
    """(answer, destination afterwards), as `expected_pull`."""
    try:
        return SUCCESS, pull_blocks_bytes(src, dst, pull)
    except Refused as refusal:
        return str(refusal), dst


def copied_blocks(cache: Bytes, info: dict[int, list[int]]) -> Bytes:
    """A cache after copy_blocks: each copy sees the earlier ones."""
    after = cache.copy()
    for src, targets in info.items():
        for dst in targets:
            after[:, :, int(dst), :] = after[:, :, int(src), :].copy()
    return after


def swapped_blocks(src: Bytes, dst: Bytes, src_to_dst: dict[int, int]) -> Bytes:
    """The destination after swap_blocks; blocks have the same bytes, in whatever pieces."""
    after = dst.copy()
    for one, other in src_to_dst.items():
        after[:, :, int(other), :] = src[:, :, int(one), :].reshape(dst.shape[0], dst.shape[1], dst.shape[3])
    return after


def expected_pull(src: Bytes | None, dst: Bytes, pull: Pull) -> tuple[str, Bytes]:
    """(answer, destination afterwards): a refused pull leaves the destination as it is."""
    try:
        return SUCCESS, pull_bytes(src, dst, pull)
    except Refused as refusal:
        return str(refusal), dst


def pattern(shape: Geometry, generation: int = 0) -> Bytes:
    """Byte i of tensor t, row b is (i + 31*t + 7*b + 101*generation) mod 251."""
    tensor, row, byte = np.ogrid[:shape.num_tensors, :shape.rows, :shape.stride]
    rows = (byte + 31 * tensor + 7 * row + 101 * generation) % 251
    pieces = rows.astype(np.uint8).reshape(shape.num_tensors, shape.rows, shape.outer, shape.inner)
    return np.ascontiguousarray(pieces.transpose(0, 2, 1, 3))


def noise(shape: Geometry, seed: int) -> Bytes:
    """Random bytes of that geometry: a wrong offset cannot look right by chance."""
    drawn = np.random.default_rng(seed).integers(0, 256, size=tuple(shape), dtype=np.uint8)
    return np.asarray(drawn, np.uint8)


def canary(shape: Geometry) -> Bytes:
    """What a destination holds before a pull: bytes that were not asked for must still be 0x5A afterwards."""
    return np.full(tuple(shape), 0x5A, dtype=np.uint8)
