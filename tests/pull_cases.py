"""Random pulls: one generator that draws its numbers from random.Random or from hypothesis."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reference import Geometry, Pull, geometry

Draw = Callable[[int, int], int]
"""draw(low, high) answers an int with both ends possible."""

ITEM_BYTES = {"DT_INT8": 1, "DT_FLOAT16": 2, "DT_BF16": 2, "DT_FLOAT": 4, "DT_DOUBLE": 8, "DT_STRING": 16}


@dataclass(frozen=True)
class Side:
    """What a CacheDesc says, in plain values."""

    num_tensors: int
    shape: list[int]
    dtype: str
    batch_dim: int

    @property
    def geometry(self) -> Geometry:
        return geometry(self.num_tensors, self.shape, ITEM_BYTES[self.dtype], self.batch_dim)


@dataclass(frozen=True)
class Case:
    """One pull between two caches."""

    src: Side
    dst: Side
    pull: Pull


def _side(draw: Draw, num_tensors: int) -> Side:
    dims = draw(1, 4)
    shape = [draw(1, 5) for _ in range(dims)]
    return Side(num_tensors, shape, list(ITEM_BYTES)[draw(0, len(ITEM_BYTES) - 1)], draw(0, dims - 1))


def _offset(draw: Draw, offset: int) -> int | None:
    """An offset of 0 may also be said by leaving it out."""
    return None if offset == 0 and draw(0, 1) else offset


def _fitting_layers(draw: Draw, wanted: int, present: int) -> range | None:
    if wanted == present and draw(0, 1):
        return None
    start = draw(0, present - wanted)
    return range(start, start + wanted)


def _fitting(draw: Draw, one_cache: bool = False) -> Case:
    """A pull that has to work: windows inside both rows, as many tensors on both sides."""
    per_layer = draw(1, 3)
    layers = draw(1, 3)
    src_layers = dst_layers = layers + draw(0, 2)
    src = dst = _side(draw, src_layers * per_layer)
    if not one_cache:
        dst_layers = layers + draw(0, 2)
        dst = _side(draw, dst_layers * per_layer)
    longest = min(src.geometry.stride, dst.geometry.stride)
    length = draw(1, longest)
    src_offset, dst_offset = draw(0, src.geometry.stride - length), draw(0, dst.geometry.stride - length)
    to_the_end = dst_offset + length == dst.geometry.stride
    return Case(src, dst, Pull(
        src_row=draw(0, src.geometry.rows - 1),
        batch_index=draw(0, dst.geometry.rows - 1),
        size=-1 if to_the_end and draw(0, 3) else length,
        src_layer_range=_fitting_layers(draw, layers, src_layers),
        dst_layer_range=_fitting_layers(draw, layers, dst_layers),
        src_cache_offset=_offset(draw, src_offset),
        dst_cache_offset=_offset(draw, dst_offset),
        tensor_num_per_layer=per_layer,
    ))


def _whole_rows(draw: Draw) -> Case:
    """Full rows between caches of the same row size and any layout: where a strided copy goes wrong first."""
    src = _side(draw, draw(1, 4))
    shape = [src.shape[src.batch_dim], *src.shape[:src.batch_dim], *src.shape[src.batch_dim + 1:]]
    dst = Side(src.num_tensors, shape, src.dtype, 0)
    if draw(0, 1):
        src, dst = dst, src
    rows = src.geometry.rows - 1
    return Case(src, dst, Pull(src_row=draw(0, rows), batch_index=draw(0, rows)))


def _wild_layers(draw: Draw) -> range | None:
    start = draw(0, 3)
    return range(start, start + draw(0, 3)) if draw(0, 1) else None


def _wild(draw: Draw) -> Case:
    """Arguments drawn without looking at each other: mostly errors."""
    src, dst = _side(draw, draw(1, 6)), _side(draw, draw(1, 6))
    return Case(src, dst, Pull(
        src_row=draw(0, src.geometry.rows),
        batch_index=draw(0, dst.geometry.rows - (draw(0, 3) > 0)),
        size=-1 if draw(0, 2) else draw(0, dst.geometry.stride + 2),
        src_layer_range=_wild_layers(draw),
        dst_layer_range=_wild_layers(draw),
        src_cache_offset=draw(0, src.geometry.stride) if draw(0, 2) == 0 else None,
        dst_cache_offset=draw(0, dst.geometry.stride + 1) if draw(0, 2) == 0 else None,
        tensor_num_per_layer=2 if draw(0, 1) else draw(1, 4),
    ))


def case_in_one_cache(draw: Draw) -> Case:
    """A pull whose source and destination are one cache, and whose windows overlap as often as not."""
    return _fitting(draw, one_cache=True)


def random_case(draw: Draw) -> Case:
    """One case: half of them have to work, the others mostly must not."""
    kind = draw(0, 3)
    if kind == 0:
        return _whole_rows(draw)
    return _fitting(draw) if kind == 1 else _wild(draw)
