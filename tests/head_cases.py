"""Random slices of heads, and what numpy's slicing makes of them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from pull_cases import Draw
from reference import Geometry, geometry

Sided = tuple[int, int, int]
"""Of one side: rows, the batch dimension, heads."""


@dataclass(frozen=True)
class HeadCase:
    """`dims` of a row but for the heads, at which place among them the heads stand, and which heads go where."""

    dims: list[int]
    place: int
    src: Sided
    dst: Sided
    src_heads: range
    dst_heads: range
    itemsize: int
    num_tensors: int

    def shape(self, side: Sided) -> list[int]:
        """Of a tensor of that side."""
        rows, batch_dim, count = side
        row = [*self.dims[:self.place], count, *self.dims[self.place:]]
        return [*row[:batch_dim], rows, *row[batch_dim:]]

    def geometry(self, side: Sided) -> Geometry:
        """Of the cache of that side."""
        return geometry(self.num_tensors, self.shape(side), self.itemsize, side[1])

    def heads_dim(self, side: Sided) -> int:
        """Which dim of `shape` counts the heads."""
        return self.place + (side[1] <= self.place)

    def index(self, side: Sided, row: int, heads: range) -> tuple[Any, ...]:
        """These heads of a row in an array (tensors, *shape, bytes of an element)."""
        place: list[Any] = [slice(None)] * (len(self.dims) + 4)
        place[1 + side[1]] = row
        place[1 + self.heads_dim(side)] = slice(heads.start, heads.stop)
        return tuple(place)

    def elements(self, side: Sided, content: Any) -> Any:
        """The bytes of a cache as such an array, on the same memory."""
        return content.reshape(self.num_tensors, *self.shape(side), self.itemsize)

    def pulled(self, src: Any, dst: Any, src_row: int, dst_row: int) -> Any:
        """The destination afterwards, in the shape in which the twin has caches."""
        after = dst.copy()
        # One index between slices may move its axis; as both sides lose it before they are compared, the order stays.
        taken = np.ascontiguousarray(self.elements(self.src, src)[self.index(self.src, src_row, self.src_heads)])
        self.elements(self.dst, after)[self.index(self.dst, dst_row, self.dst_heads)] = taken
        return after


def head_case(draw: Draw, num_dims: int | None = None) -> HeadCase:
    """A slice that fits: both sides may have more heads than are taken, and their batch anywhere."""
    dims = [draw(1, 4) for _ in range(draw(0, 3) if num_dims is None else num_dims)]
    taken = draw(1, 4)
    sides: list[Sided] = []
    ranges: list[range] = []
    for _ in range(2):
        count = taken + draw(0, 4)
        start = draw(0, count - taken)
        sides.append((draw(1, 3), draw(0, len(dims) + 1), count))
        ranges.append(range(start, start + taken))
    return HeadCase(dims, draw(0, len(dims)), sides[0], sides[1], ranges[0], ranges[1], (1, 2, 4)[draw(0, 2)], draw(1, 3))


@st.composite
def head_cases(draw: st.DrawFn) -> HeadCase:
    """The same for hypothesis."""
    return head_case(lambda low, high: draw(st.integers(low, high)))
