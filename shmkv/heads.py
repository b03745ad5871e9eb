"""Some of the heads of a row: what a rank of a tensor-parallel group pulls from a cache that holds all heads, or into one."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shmkv.checks import INT64_MAX, check_int32, check_optional_layer_range, check_positive, check_uint32, shown
from shmkv.errors import LLMParamError


class HeadWindow(NamedTuple):
    """A slice of heads in bytes of a row: `groups` times `nbytes`, the first at `src_offset` and `dst_offset`, the others
    `src_period` and `dst_period` behind each other."""

    groups: int
    nbytes: int
    src_offset: int
    dst_offset: int
    src_period: int
    dst_period: int


@dataclass(frozen=True)
class HeadSlice:
    """Heads `src_head_range` of the source's rows go to heads `dst_head_range` of the destination's rows.

    `head_dim_index` is the dim of the *destination's* shape that counts its heads, in (tokens, heads, dim) and (heads, tokens, dim)
    alike. The source's rows have the same dims but for `src_heads` heads. A range that is None stands for all heads of that side, a
    `src_heads` that is None for as many as the destination has.

    Rank r of 2 that has half of 8 heads: ``HeadSlice(2, src_heads=8, src_head_range=range(4 * r, 4 * r + 4))``. A decoder that
    has all 8 heads and pulls from prompt rank r: ``HeadSlice(2, src_heads=4, dst_head_range=range(4 * r, 4 * r + 4))``.

    Raises:
        TypeError: wrong type of an argument.
        LLMParamError: value out of range.
    """

    head_dim_index: int
    src_heads: int | None = None
    src_head_range: range | None = None
    dst_head_range: range | None = None

    def __post_init__(self) -> None:
        check_int32("head_dim_index", self.head_dim_index)
        if self.src_heads is not None:
            check_positive("src_heads", check_uint32("src_heads", self.src_heads))
        check_optional_layer_range("src_head_range", self.src_head_range)
        check_optional_layer_range("dst_head_range", self.dst_head_range)

    def window(self, shape: Sequence[int], batch_dim: int, itemsize: int) -> HeadWindow:
        """The bytes of it in rows of a destination tensor of `shape`. LLMParamError if the heads are not there or differ in
        number."""
        dim = self.head_dim_index
        if not 0 <= dim < len(shape) or dim == batch_dim:
            raise LLMParamError(f"argument 'head_dim_index' must be a dim of shape {shown(list(shape))} other than the batch "
                                f"dimension {batch_dim}, got {dim}")
        src_heads = shape[dim] if self.src_heads is None else self.src_heads
        src = _heads("src_head_range", self.src_head_range, src_heads)
        dst = _heads("dst_head_range", self.dst_head_range, shape[dim])
        if len(src) != len(dst):
            raise LLMParamError(f"heads {src} of the source and {dst} of the destination differ in number")
        row = [1 if place == batch_dim else size for place, size in enumerate(shape)]
        each = math.prod(row[dim + 1:]) * itemsize
        if src_heads * each > INT64_MAX:
            raise LLMParamError(f"argument 'src_heads' is too large: {src_heads} x {each} bytes")
        return HeadWindow(math.prod(row[:dim]), len(src) * each, src.start * each, dst.start * each, src_heads * each,
                          shape[dim] * each)


def _heads(name: str, heads: range | None, count: int) -> range:
    if heads is None:
        return range(count)
    if heads.stop > count:
        raise LLMParamError(f"argument '{name}' must stay within {count} heads, got {heads}")
    return heads
