"""Where rows lie in strided memory, against numpy: the bytes of each row in C order, and what is refused."""
from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmkv import LLMParamError
from shmkv.strided_rows import RowLayout, dense_rows, first_overlap, strided_rows
from shmkv.types import CacheDesc, DataType

WHERE = "argument 'buffers' (tensor 0)"


def rows_in(shape: Any, strides: Any, itemsize: int = 1, batch: int = 0, leading: int = 0) -> RowLayout:
    return strided_rows(shape, strides, itemsize, batch, leading, WHERE)


def bytes_of(layout: RowLayout) -> list[list[int]]:
    """The offsets of each row's bytes, in order."""
    return [[layout.offset + piece * layout.piece_pitch + row * layout.row_pitch + byte
             for piece in range(layout.outer) for byte in range(layout.inner)] for row in range(layout.rows)]


def bytes_by_numpy(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, batch: int) -> list[list[int]]:
    """The same from shape and strides alone."""
    offsets = np.zeros(shape, np.int64)
    for axis, (dim, stride) in enumerate(zip(shape, strides, strict=True)):
        offsets += (np.arange(dim) * stride).reshape(-1, *[1] * (len(shape) - axis - 1))
    rows = np.moveaxis(offsets, batch, 0).reshape(shape[batch], -1)
    found: list[list[int]] = (rows[:, :, None] + np.arange(itemsize)).reshape(shape[batch], -1).tolist()
    return found


def is_acceptable(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, batch: int) -> bool:
    """The rule, told axis by axis and byte by byte."""
    if 0 in shape or any(stride < 0 for dim, stride in zip(shape, strides, strict=True) if dim > 1):
        return False
    behind = math.prod(shape[batch + 1:]) * itemsize
    pieces = np.array(bytes_by_numpy(shape, strides, itemsize, batch)).reshape(shape[batch], -1, behind)
    if (pieces - pieces[:, :, :1] != np.arange(behind)).any() or len(np.unique(pieces)) != pieces.size:
        return False
    steps = np.diff(pieces[0, :, 0])
    return len(set(steps.tolist())) <= 1


# -- forms that are accepted ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("shape", "batch"), [([4, 8], 0), ([3, 4, 8], 1), ([2, 3, 4], 2), ([7], 0), ([1, 1, 5], 1)])
def test_dense_memory_lies_as_an_allocated_tensor_does(shape: list[int], batch: int) -> None:
    strides = np.zeros(shape, "f4").strides
    layout = rows_in(shape, strides, 4, batch)
    geometry = CacheDesc(1, shape, DataType.DT_FLOAT, batch_dim_index=batch).row_geometry
    assert layout.is_dense
    assert (layout.outer, layout.rows, layout.inner) == tuple(geometry)
    assert layout == dense_rows(0, shape, 4, batch)
    assert layout.nbytes == 4 * math.prod(shape)


@pytest.mark.parametrize(("array", "expected"), [
    (np.zeros((4, 64), "i1")[:, :40], RowLayout(0, 232, 1, 4, 40, 64, 256)),
    (np.zeros((8, 4), "f4")[::2], RowLayout(0, 112, 1, 4, 16, 32, 128)),
    (np.zeros((10, 2, 3, 4), "i1")[:, 0], RowLayout(0, 228, 1, 10, 12, 24, 240)),
    (np.zeros((4, 1, 8), "i1")[::3, ::1, 2:], RowLayout(0, 30, 1, 2, 6, 24, 48)),
])
def test_rows_further_apart_than_they_are_long(array: Any, expected: RowLayout) -> None:
    assert rows_in(array.shape, array.strides, array.itemsize) == expected
    assert not expected.is_dense


def test_pieces_further_apart_than_they_are_long() -> None:
    window = np.zeros((6, 5, 8), "i1")[::2, 1:4]
    assert rows_in(window.shape, window.strides, 1, 1) == RowLayout(0, 184, 3, 3, 8, 8, 80)


def test_pieces_of_a_row_that_touch_are_one() -> None:
    swapped = np.zeros((4, 3, 8), "i1").transpose(1, 0, 2)      # the rows lie in front
    assert rows_in(swapped.shape, swapped.strides, 1, 1) == dense_rows(0, [4, 24], 1, 0)


def test_several_axes_before_the_batch_dim_are_one() -> None:
    whole = np.zeros((2, 3, 4, 5, 8), "i1")[:, :, :, 1:3]
    assert rows_in(whole.shape, whole.strides, 1, 3) == RowLayout(0, 936, 24, 2, 8, 8, 40)


@pytest.mark.parametrize("odd", [0, -8, 3, 10**6])
def test_strides_of_axes_of_size_one_do_not_count(odd: int) -> None:
    assert rows_in([4, 1, 8], [8, odd, 1]) == rows_in([1, 4, 1, 8], [odd, 8, odd, 1], 1, 1) == dense_rows(0, [4, 8], 1, 0)
    assert rows_in([1, 8], [odd, 1]) == dense_rows(0, [1, 8], 1, 0)
    assert rows_in([2, 3, 1], [3, 1, odd], 1, 1) == dense_rows(0, [2, 3], 1, 1)


def test_leading_axes_count_tensors_and_leave_the_rows_alone() -> None:
    kv = np.zeros((5, 2, 4, 8), "i1")
    assert rows_in(kv.shape, kv.strides, 1, 2, 2) == dense_rows(0, [4, 8], 1, 0)


def test_rows_between_the_pieces_of_others() -> None:
    """Three columns of pieces, rows half a step further on: nothing overlaps although the extents of rows do."""
    assert rows_in([3, 2, 4], [20, 10, 1], 1, 1) == RowLayout(0, 54, 3, 2, 4, 10, 20)
    assert rows_in([3, 3, 4], [30, 34, 1], 1, 1).row_pitch == 34


# -- refusals, each with its axis and strides ------------------------------------------------------------------------------

@pytest.mark.parametrize(("array", "batch", "text"), [
    (np.zeros((4, 8), "f4", order="F"), 0, "axis 1 has a stride of 16 bytes, expected 4: behind the batch dim (axis 0) the bytes"),
    (np.zeros((4, 8), "f4").T, 0, "axis 1 has a stride of 32 bytes, expected 4"),
    (np.zeros((4, 8), "f4")[:, ::2], 0, "axis 1 has a stride of 8 bytes, expected 4"),
    (np.zeros((4, 6, 8), "f4")[:, :3, :4], 0, "axis 1 has a stride of 32 bytes, expected 16"),
    (np.zeros((4, 8), "f4")[:, ::-1], 0, "axis 1 has a stride of -4 bytes, expected 4: the axis runs backwards"),
    (np.zeros((4, 8), "f4")[::-1], 0, "axis 0 has a stride of -32 bytes, expected 32: the axis runs backwards"),
    (np.broadcast_to(np.zeros(8, "f4"), (4, 8)), 0, "axis 0 has a stride of 0 bytes, expected more: it is a broadcast"),
    (np.broadcast_to(np.zeros((4, 1), "f4"), (4, 8)), 0, "axis 1 has a stride of 0 bytes, expected more: it is a broadcast"),
    (np.zeros((0, 8), "f4"), 0, "is empty: axis 0 of shape [0, 8] is 0, expected 1 or more"),
    (np.zeros((4, 0), "f4"), 0, "is empty: axis 1 of shape [4, 0] is 0"),
    (np.zeros((2, 3, 4, 8), "f4")[:, :2], 2, "axis 0 has a stride of 384 bytes, expected 256: the axes before the batch dim "),
])
def test_rows_that_do_not_lie_together(array: Any, batch: int, text: str) -> None:
    with pytest.raises(LLMParamError) as caught:
        rows_in(array.shape, array.strides, 4, batch)
    assert str(caught.value).startswith(WHERE)
    assert text in str(caught.value)


@pytest.mark.parametrize(("shape", "strides", "batch", "text"), [
    ([4, 8], [7, 1], 0, "axis 0 has a stride of 7 bytes, expected 8 or more: rows share bytes"),
    ([3, 4, 8], [7, 100, 1], 1, "axis 0 has a stride of 7 bytes, expected 8 or more"),
    ([3, 1, 4, 8], [7, 9, 100, 1], 2, "axis 0 has a stride of 7 bytes, expected 8 or more"),
    ([3, 4, 8], [16, 8, 1], 1, "axis 0 has a stride of 16 bytes, expected 32 or more"),
    ([3, 4, 8], [8, 16, 1], 1, "axis 1 has a stride of 16 bytes, expected 24 or more"),
    ([3, 3, 4], [30, 33, 1], 1, "axis 1 has a stride of 33 bytes, expected 64 or more"),
    ([3, 2, 4], [20, 17, 1], 1, "axis 0 has a stride of 20 bytes, expected 21 or more"),
])
def test_rows_that_share_bytes(shape: list[int], strides: list[int], batch: int, text: str) -> None:
    with pytest.raises(LLMParamError) as caught:
        rows_in(shape, strides, 1, batch)
    assert text in str(caught.value)


def test_strides_that_reach_beyond_int64() -> None:
    with pytest.raises(LLMParamError, match=r"further than 2\*\*63 - 1 bytes"):
        rows_in([4, 8], [2**62, 1])


# -- against numpy --------------------------------------------------------------------------------------------------------

@st.composite
def windows(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int]:
    """(a view of an array, batch axis): sliced, transposed, broadcast, with axes that were added."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    array = np.zeros(shape, draw(st.sampled_from(["i1", "f2", "f4"])), order=draw(st.sampled_from("CCCF")))
    steps = st.sampled_from([1, 1, 1, 2, 3, -1])
    for axis, dim in enumerate(shape):
        if draw(st.booleans()):
            first = draw(st.integers(0, dim - 1))
            window = slice(first, draw(st.integers(first + 1, dim)))
            array = array[(slice(None),) * axis + (window,)][(slice(None),) * axis + (slice(None, None, draw(steps)),)]
    if draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.expand_dims(array, draw(st.integers(0, array.ndim)))
    if draw(st.sampled_from([False, False, False, True])):
        array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    return array, draw(st.integers(0, array.ndim - 1))


Found = tuple[list[list[int]], int] | str


def found_rows(*memory: Any) -> Found:
    """The bytes of each row and the bytes in all, or "refused" for a shape whose strides are refused."""
    try:
        layout = rows_in(*memory)
    except LLMParamError as error:
        return "refused" if re.search(r"stride|empty", str(error)) else str(error)
    is_plain = layout.outer == 1 or layout.piece_pitch != layout.inner or layout.is_dense
    return (bytes_of(layout), layout.nbytes) if is_plain else f"{layout} has pieces that are one"


def expected_rows(*memory: Any) -> Found:
    """The same by numpy."""
    if not is_acceptable(*memory):
        return "refused"
    rows = bytes_by_numpy(*memory)
    return rows, max(map(max, rows)) + 1


@settings(max_examples=1000, deadline=None)
@given(windows())
def test_views_of_arrays_against_numpy(window: tuple[np.ndarray[Any, Any], int]) -> None:
    array, batch = window
    memory = array.shape, array.strides, array.itemsize, batch
    assert found_rows(*memory) == expected_rows(*memory)


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 40), st.integers(0, 40), st.integers(1, 3))
@example(3, 3, 1, 30, 34, 4)
@example(4, 4, 1, 6, 9, 3)
@example(5, 2, 1, 2, 3, 1)
def test_any_two_pitches_against_numpy(outer: int, rows: int, inner: int, piece_pitch: int, row_pitch: int, itemsize: int) -> None:
    memory = (outer, rows, inner), (piece_pitch, row_pitch, itemsize), itemsize, 1
    assert found_rows(*memory) == expected_rows(*memory)


# -- tensors among each other ---------------------------------------------------------------------------------------------

layouts = st.builds(
    lambda offset, outer, rows, inner, gap, more: RowLayout(
        offset, ((outer - 1) * (rows * (inner + gap) + more)) + (rows - 1) * (inner + gap) + inner, outer, rows, inner, inner + gap,
        rows * (inner + gap) + more),
    st.integers(0, 150), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 12), st.integers(0, 12))


def shared_by_bytes(tensors: list[RowLayout]) -> set[tuple[int, int]]:
    owned = [{byte for row in bytes_of(tensor) for byte in row} for tensor in tensors]
    return {(one, two) for two in range(len(owned)) for one in range(two) if owned[one] & owned[two]}


@settings(max_examples=500, deadline=None)
@given(st.lists(layouts, min_size=1, max_size=5))
def test_overlap_against_sets_of_bytes(tensors: list[RowLayout]) -> None:
    shared = shared_by_bytes(tensors)
    found = first_overlap(tensors)
    assert found in shared if shared else found is None


@settings(max_examples=500, deadline=None)
@given(st.integers(8, 40), st.lists(st.tuples(st.integers(0, 120), st.integers(1, 4), st.integers(1, 12)), min_size=2, max_size=4))
def test_overlap_in_one_pitch_against_sets_of_bytes(pitch: int, wanted: list[tuple[int, int, int]]) -> None:
    tensors = [RowLayout(offset, (rows - 1) * pitch + min(inner, pitch), 1, rows, min(inner, pitch), pitch, rows * pitch)
               for offset, rows, inner in wanted]
    shared = shared_by_bytes(tensors)
    found = first_overlap(tensors)
    assert found in shared if shared else found is None


def test_interleaved_tensors_share_nothing() -> None:
    keys = [RowLayout(64 * number, 512 * 99 + 64, 1, 100, 64, 512, 51200) for number in range(8)]
    assert first_overlap(keys) is None
    assert first_overlap([*keys, keys[3]]) == (3, 8)
    assert first_overlap([*keys[:4], keys[4]._replace(offset=keys[4].offset - 8), *keys[5:]]) == (3, 4)
    assert first_overlap([*keys[:7], keys[7]._replace(offset=keys[7].offset + 8)]) == (0, 7)


def test_pieces_are_looked_at_only_where_it_matters() -> None:
    """No piece is looked at: with this many it would take gigabytes."""
    many = RowLayout(0, 2**40 - 1, 1, 2**39, 1, 2, 2**40)
    assert first_overlap([many, many._replace(offset=2**40), many._replace(offset=2**41)]) is None
    assert first_overlap([many, many._replace(offset=1)]) is None
    assert first_overlap([many, many]) == (0, 1)
    dense = dense_rows(2**39, [2**39, 2, 1], 1, 1)
    assert first_overlap([dense, dense_rows(0, [2**39 + 1], 1, 0)]) == (0, 1)
