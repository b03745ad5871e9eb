"""Where the rows of a tensor lie in strided memory, and whether tensors share bytes. Numbers only: nothing is read or held.

A tensor may be a window on something bigger as long as the bytes of a row, from the batch dim on, lie together: the dims after the
batch dim are C-contiguous, the batch dim has any positive pitch, the dims before it one pitch between them. Strides of dims of size
1 mean nothing and do not count.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmkv.checks import INT64_MAX
from shmkv.errors import LLMParamError


class RowLayout(NamedTuple):
    """One tensor seen as rows; all but the three counts are bytes.

    Row ``b`` is `outer` pieces of `inner` bytes; piece ``p`` begins at ``offset + p * piece_pitch + b * row_pitch``. `nbytes` is
    the extent, from the first byte to the last: more than the bytes of the rows where there are gaps. Where there is one row or
    one piece only, its pitch is what it would be in dense memory.
    """

    offset: int
    nbytes: int
    outer: int
    rows: int
    inner: int
    row_pitch: int
    piece_pitch: int

    @property
    def is_dense(self) -> bool:
        """Do the rows lie as in a tensor that was allocated: no gaps, pieces of neighbouring rows side by side?"""
        return self.row_pitch == self.inner and self.piece_pitch == self.rows * self.inner


def dense_rows(offset: int, shape: Sequence[int], itemsize: int, batch_dim: int) -> RowLayout:
    """The rows of a C-contiguous tensor that begins at `offset`."""
    outer, rows = math.prod(shape[:batch_dim]), shape[batch_dim]
    inner = math.prod(shape[batch_dim + 1:]) * itemsize
    return RowLayout(offset, outer * rows * inner, outer, rows, inner, inner, rows * inner)


def strided_rows(shape: Sequence[int], strides: Sequence[int], itemsize: int, batch_axis: int, leading: int,
                 where: str) -> RowLayout:
    """The rows of the first tensor, at offset 0, in memory of which `leading` axes count tensors.

    `strides` are bytes, `batch_axis` counts the leading axes in. LLMParamError, beginning with `where` and naming the axis, unless
    the bytes of each row lie together and no two rows share one.
    """
    check_axes(shape, strides, where)
    inner = _contiguous(shape, strides, itemsize, batch_axis, where)
    rows = shape[batch_axis]
    row_pitch = strides[batch_axis] if rows > 1 else inner
    outer, piece_pitch = _pieces(shape, strides, leading, batch_axis, where)
    if outer == 1:
        piece_pitch = rows * row_pitch
    nbytes = (outer - 1) * piece_pitch + (rows - 1) * row_pitch + inner
    if nbytes > INT64_MAX:
        raise LLMParamError(f"{where}: strides {list(strides)} of shape {list(shape)} reach further than 2**63 - 1 bytes")
    layout = RowLayout(0, nbytes, outer, rows, inner, row_pitch, piece_pitch)
    if _rows_overlap(layout):
        axis, least = _guilty(layout, batch_axis, _innermost(shape, leading, batch_axis))
        raise LLMParamError(f"{where}: {_axis(axis, strides)}, expected {least} or more: rows share bytes")
    return layout if layout.is_dense else _joined(layout)


def check_axes(shape: Sequence[int], strides: Sequence[int], where: str) -> None:
    """LLMParamError unless there are elements, and each next one on an axis lies further on."""
    if 0 in shape:
        raise LLMParamError(f"{where} is empty: axis {list(shape).index(0)} of shape {list(shape)} is 0, expected 1 or more")
    for axis, (dim, stride) in enumerate(zip(shape, strides, strict=True)):
        if dim > 1 and stride == 0:
            raise LLMParamError(f"{where}: {_axis(axis, strides)}, expected more: it is a broadcast, whose rows share bytes")
        if dim > 1 and stride < 0:
            raise LLMParamError(f"{where}: {_axis(axis, strides)}, expected {-stride}: the axis runs backwards")


def _axis(axis: int, strides: Sequence[int]) -> str:
    return f"axis {axis} has a stride of {strides[axis]} bytes"


def _contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int, batch_axis: int, where: str) -> int:
    """Bytes of a piece: all that is behind the batch axis."""
    nbytes = itemsize
    for axis in range(len(shape) - 1, batch_axis, -1):
        if shape[axis] > 1 and strides[axis] != nbytes:
            raise LLMParamError(f"{where}: {_axis(axis, strides)}, expected {nbytes}: behind the batch dim (axis {batch_axis}) the "
                                "bytes of a row have to lie together in C order")
        nbytes *= shape[axis]
    return nbytes


def _innermost(shape: Sequence[int], leading: int, batch_axis: int) -> int:
    """The last axis before the batch axis that has a stride at all."""
    return next((axis for axis in range(batch_axis - 1, leading - 1, -1) if shape[axis] > 1), batch_axis)


def _pieces(shape: Sequence[int], strides: Sequence[int], leading: int, batch_axis: int, where: str) -> tuple[int, int]:
    """(number of pieces, their pitch): the axes before the batch axis, which have to be one axis in fact."""
    outer, pitch = 1, 0
    for axis in range(batch_axis - 1, leading - 1, -1):
        if shape[axis] > 1:
            pitch = pitch or strides[axis]
            if strides[axis] != outer * pitch:
                raise LLMParamError(f"{where}: {_axis(axis, strides)}, expected {outer * pitch}: the axes before the batch dim "
                                    f"(axis {batch_axis}) have to have one pitch")
            outer *= shape[axis]
    return outer, pitch


def _guilty(layout: RowLayout, batch_axis: int, piece_axis: int) -> tuple[int, int]:
    """(axis, least stride) of rows that overlap: the axis with the smaller steps, unless those are big enough."""
    axes = [(layout.row_pitch, layout.rows, batch_axis), (layout.piece_pitch, layout.outer, piece_axis)]
    small, *big = sorted(axis for axis in axes if axis[1] > 1)
    if small[0] < layout.inner:
        return small[2], layout.inner
    return big[0][2], (small[1] - 1) * small[0] + layout.inner


def _joined(layout: RowLayout) -> RowLayout:
    """Pieces of a row that touch are one."""
    if layout.outer == 1 or layout.piece_pitch != layout.inner:
        return layout
    return layout._replace(outer=1, inner=layout.outer * layout.inner, piece_pitch=layout.rows * layout.row_pitch)


def _rows_overlap(layout: RowLayout) -> bool:
    """Is there a byte that belongs to two pieces?"""
    (small, few), (big, many) = sorted([(layout.piece_pitch, layout.outer), (layout.row_pitch, layout.rows)])
    if (few == 1 or small >= layout.inner) and (many == 1 or big >= (few - 1) * small + layout.inner):
        return False
    if (few > 1 and small < layout.inner) or (many > 1 and big < layout.inner):
        return True
    # The pieces of two axes interleave: a step on the big one may come near a number of steps back on the small one.
    ahead = np.arange(1, many, dtype=np.int64) * big
    below = np.minimum(ahead // small, few - 1)
    above = np.minimum(below + 1, few - 1)
    return bool(((ahead - below * small < layout.inner) | (np.abs(above * small - ahead) < layout.inner)).any())


# -- several tensors ------------------------------------------------------------------------------------------------------

def first_overlap(tensors: Sequence[RowLayout]) -> tuple[int, int] | None:
    """The numbers of two tensors that share a byte, or None. Gaps do not count: interleaved tensors share nothing."""
    for group in _touching(tensors):
        for one, two in pairwise(group):
            if tensors[one].offset == tensors[two].offset:
                return one, two
        if not _interleaved([tensors[number] for number in group]):
            found = _shared_piece(tensors, group)
            if found:
                return found
    return None


def _touching(tensors: Sequence[RowLayout]) -> Iterator[list[int]]:
    """Groups of two or more tensors whose extents overlap in a chain."""
    group: list[int] = []
    end = -1
    for number in sorted(range(len(tensors)), key=lambda number: tensors[number].offset):
        if tensors[number].offset >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        end = max(end, tensors[number].offset + tensors[number].nbytes)
    if len(group) > 1:
        yield group


def _interleaved(tensors: Sequence[RowLayout]) -> bool:
    """Do the tensors share one pitch, in which each has a place of its own? A quick yes; no means nothing."""
    pitches = {_biggest(tensor) for tensor in tensors}
    if len(pitches) != 1:
        return False
    pitch = pitches.pop()
    places = sorted((tensor.offset % pitch, _cell(tensor, pitch)) for tensor in tensors)
    ends = [start + nbytes for start, nbytes in places]
    return all(end <= start for end, (start, _) in zip(ends, [*places[1:], (places[0][0] + pitch, 0)], strict=True))


def _biggest(tensor: RowLayout) -> int:
    """The bigger pitch, of those that are used."""
    return max(tensor.row_pitch if tensor.rows > 1 else 1, tensor.piece_pitch if tensor.outer > 1 else 1)


def _cell(tensor: RowLayout, pitch: int) -> int:
    """The extent of one step of the biggest pitch."""
    count = tensor.rows if tensor.rows > 1 and tensor.row_pitch == pitch else tensor.outer
    return tensor.nbytes - (count - 1) * pitch


def _without_gaps(tensor: RowLayout) -> RowLayout:
    """One piece for a tensor that owns all bytes of its extent."""
    full = tensor.nbytes == tensor.outer * tensor.rows * tensor.inner
    return dense_rows(tensor.offset, [1, tensor.nbytes], 1, 0) if full else tensor


def _starts(tensor: RowLayout) -> NDArray[np.int64]:
    """Where the pieces begin."""
    pieces = np.arange(tensor.outer, dtype=np.int64)[:, None] * tensor.piece_pitch
    return (tensor.offset + pieces + np.arange(tensor.rows, dtype=np.int64) * tensor.row_pitch).reshape(-1)


def _shared_piece(tensors: Sequence[RowLayout], group: Sequence[int]) -> tuple[int, int] | None:
    """Exact: all pieces by where they begin. Of two that share a byte, the next one after the first does too."""
    whole = [_without_gaps(tensors[number]) for number in group]
    starts = np.concatenate([_starts(tensor) for tensor in whole])
    order = np.argsort(starts, kind="stable")
    counts = [tensor.outer * tensor.rows for tensor in whole]
    ends = (starts + np.repeat([tensor.inner for tensor in whole], counts))[order]
    shared = np.flatnonzero(ends[:-1] > starts[order][1:])
    if not shared.size:
        return None
    owners = np.repeat(group, counts)[order]
    first, second = sorted((int(owners[shared[0]]), int(owners[shared[0] + 1])))
    return first, second
