"""Some of the heads of a row: `HeadSlice` in bytes, and its runs against numpy slicing."""
from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from head_cases import HeadCase, Sided, head_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_bytes import places, shapes_of, spread, stretches
from reference import geometry

from shmkv import HeadSlice, LLMParamError, _plan

MANY = settings(max_examples=2000, deadline=None)
INVALID_RANGES = [range(0), range(2, 2), range(3, 1), range(0, 4, 2), range(-1, 1)]


def runs_of(case: HeadCase, src_row: int, dst_row: int) -> Any:
    wanted = HeadSlice(case.heads_dim(case.dst), case.src[2], case.src_heads, case.dst_heads)
    shapes = [shapes_of(case.geometry(side)) for side in (case.src, case.dst)]
    window = wanted.window(case.shape(case.dst), case.dst[1], case.itemsize)
    return _plan.runs(*shapes, size=window.groups * window.nbytes, src_offset=window.src_offset, dst_offset=window.dst_offset,
                      src_row=src_row, dst_row=dst_row, window=window.nbytes, src_period=window.src_period,
                      dst_period=window.dst_period)


def places_of(case: HeadCase, side: Sided, row: int, heads: range) -> list[int]:
    """Where each byte of these heads of a row stands, tensor by tensor, in the order of numpy's slice."""
    every = case.elements(side, places(case.geometry(side)))
    return [int(place) for place in every[case.index(side, row, heads)].reshape(-1)]


@MANY
@given(head_cases(), st.integers(0, 2), st.integers(0, 2))
def test_runs_are_those_of_numpy_slicing(case: HeadCase, src_row: int, dst_row: int) -> None:
    src_row, dst_row = src_row % case.src[0], dst_row % case.dst[0]
    found = runs_of(case, src_row, dst_row)
    assert isinstance(found, list), case
    wanted = list(zip(places_of(case, case.src, src_row, case.src_heads), places_of(case, case.dst, dst_row, case.dst_heads),
                      strict=True))
    assert sorted(spread(found)) == sorted(wanted)


@pytest.mark.parametrize(("dims", "place", "wanted"), [([6, 4], 1, 6), ([6, 4], 0, 1), ([2, 6, 4], 2, 12)], ids=str)
def test_each_group_of_heads_is_one_run(dims: list[int], place: int, wanted: int) -> None:
    """Tokens before heads: one a token; heads before tokens: one for all."""
    case = HeadCase(dims, place, (2, 0, 8), (2, 0, 4), range(4, 8), range(4), 2, 1)
    found = runs_of(case, 1, 0)
    assert len(found) == wanted
    assert stretches(spread(found)) == wanted


def test_all_heads_of_both_sides_are_the_row() -> None:
    case = HeadCase([6, 4], 1, (2, 0, 8), (2, 0, 8), range(8), range(8), 2, 3)
    assert spread(runs_of(case, 0, 1)) == spread(_plan.runs(
        *[shapes_of(geometry(3, [2, 6, 8, 4], 2))] * 2, dst_row=1))         # type: ignore[arg-type]


@pytest.mark.parametrize(("src_shape", "src_heads"), [
    ([2, 6, 8, 4], 7), ([2, 6, 8, 4], 16), ([2, 6, 8, 4], 4), ([2, 5, 8, 4], 8), ([2, 6, 8, 3], 8), ([2, 8, 6, 4], 6),
], ids=str)
def test_source_rows_that_are_no_groups_of_these_heads(src_shape: list[int], src_heads: int) -> None:
    window = HeadSlice(2, src_heads, range(2), range(2)).window([2, 6, 4, 4], 0, 1)
    src, dst = shapes_of(geometry(1, src_shape, 1)), shapes_of(geometry(1, [2, 6, 4, 4], 1))
    said = _plan.runs(src, dst, size=window.groups * window.nbytes, src_offset=window.src_offset, dst_offset=window.dst_offset,
                      window=window.nbytes, src_period=window.src_period, dst_period=window.dst_period)
    rows_have = int(np.prod(src_shape[1:]))
    assert (said == _plan.HEADS) == (rows_have != 6 * src_heads * 4)


@pytest.mark.parametrize("arguments", [
    (0,), (4,), (-1,), (2**31 - 1,), (1, 8, range(4)), (2, 3), (2, 8, range(8)), (2, 8, range(4, 9)), (2, None, range(2, 5)),
    (2, 8, range(4), range(1, 5)), (2, 8, range(3), range(4)), (2, 8, range(2**40, 2**40 + 4)), (2, 2**32 - 1, range(5)),
], ids=str)
def test_heads_that_are_not_there(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(LLMParamError):
        HeadSlice(*arguments).window([2, 6, 4, 4], 0, 2)


@pytest.mark.parametrize(("arguments", "name"), [
    ((2**31,), "head_dim_index"), ((2, 0), "src_heads"), ((2, -1), "src_heads"), ((2, 2**32), "src_heads"),
    *[((2, 8, each), "src_head_range") for each in INVALID_RANGES],
    *[((2, 8, None, each), "dst_head_range") for each in INVALID_RANGES],
], ids=str)
def test_values_that_no_slice_has(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(LLMParamError, match=name):
        HeadSlice(*arguments)


@pytest.mark.parametrize(("arguments", "name"), [
    ((None,), "head_dim_index"), (("2",), "head_dim_index"), ((np.int64(2),), "head_dim_index"), ((2, 8.0), "src_heads"),
    ((2, np.int32(8)), "src_heads"), ((2, 8, [0, 1]), "src_head_range"), ((2, 8, None, (0, 1)), "dst_head_range"),
    ((2, 8, 4), "src_head_range"),
], ids=str)
def test_types_that_no_slice_has(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(TypeError, match=name):
        HeadSlice(*arguments)


def test_sizes_beyond_64_bits_are_refused() -> None:
    with pytest.raises(LLMParamError, match="src_heads"):
        HeadSlice(1, 2**32 - 1, range(1), range(1)).window([1, 1, 2**31], 0, 16)


def test_more_groups_than_a_plan_may_have_are_no_memory() -> None:
    """A row in two pieces needs a span for each group: refused before any of the GiB is asked for."""
    groups = (1 << 24) + 2
    src, dst = [(0, 2 * groups, 2, 1, groups, 1)], [(0, groups, 1, 1, groups, 1)]
    assert _plan.runs(src, dst, size=groups, window=1, src_period=2) == -errno.ENOMEM
    few_src, few_dst = [(0, 16, 2, 1, 8, 1)], [(0, 8, 1, 1, 8, 1)]
    assert _plan.runs(few_src, few_dst, size=8, window=1, src_period=2) == [(2 * number, number, 1) for number in range(8)]


def test_slices_are_values() -> None:
    one, same, other = HeadSlice(2, 8, range(4)), HeadSlice(2, 8, range(0, 4, 1)), HeadSlice(2, 8, range(4, 8))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
