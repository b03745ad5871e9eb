"""Selections become runs: against brute force over every byte's place, and the order of the refusals."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_bytes import spread

from shmkv import _plan

I63 = 2**63 - 1
U32 = 2**32 - 1
MANY = settings(max_examples=2000, deadline=None)


@dataclass(frozen=True)
class Cache:
    """Tensors of one geometry, `pitch` bytes apart, the first at `start`."""

    num_tensors: int
    outer: int
    rows: int
    inner: int
    start: int = 0
    gap: int = 0

    @property
    def each(self) -> int:
        return self.outer * self.rows * self.inner

    @property
    def stride(self) -> int:
        return self.outer * self.inner

    @property
    def shapes(self) -> list[tuple[int, int, int, int, int]]:
        return [(self.start + i * (self.each + self.gap), self.each, self.outer, self.rows, self.inner)
                for i in range(self.num_tensors)]

    def row(self, tensor: int, row: int) -> Any:
        """Where each byte of a row stands, by slicing an array of places."""
        first = self.start + tensor * (self.each + self.gap)
        places = np.arange(first, first + self.each).reshape(self.outer, self.rows, self.inner)
        return places[:, row, :].reshape(-1)


@dataclass(frozen=True)
class Want:
    """The arguments of `_plan.runs`."""

    size: int = -1
    src_offset: int = 0
    dst_offset: int = 0
    src_row: int = 0
    dst_row: int = 0
    src_first: int = 0
    dst_first: int = 0
    src_count: int = -1
    dst_count: int = -1


def caches() -> st.SearchStrategy[Cache]:
    small = st.integers(1, 5)
    return st.builds(Cache, small, small, small, st.integers(1, 9), st.integers(0, 3), st.sampled_from([0, 0, 1, 64]))


def wishes(top: int) -> st.SearchStrategy[Want]:
    near, maybe = st.integers(0, top), st.one_of(st.just(-1), st.integers(0, top))
    zero = st.one_of(st.just(0), near)
    return st.builds(Want, maybe, zero, zero, st.just(0), zero, zero, zero, maybe, maybe)


def brute_force(src: Cache, dst: Cache, want: Want) -> list[tuple[int, int]] | int:
    """(source place, destination place) of every byte, in order, or the first refusal."""
    if want.dst_row >= dst.rows:
        return int(_plan.DST_ROW)
    dst_count = dst.num_tensors if want.dst_count < 0 else want.dst_count
    if dst_count == 0 or want.dst_first + dst_count > dst.num_tensors:
        return int(_plan.DST_RANGE)
    length = dst.stride - want.dst_offset if want.size < 0 else want.size
    if length <= 0 or want.dst_offset + length > dst.stride:
        return int(_plan.DST_WINDOW)
    if want.src_offset + length > src.stride:
        return int(_plan.SRC_WINDOW)
    src_count = src.num_tensors if want.src_count < 0 else want.src_count
    if src_count == 0 or want.src_first + src_count > src.num_tensors:
        return int(_plan.SRC_RANGE)
    if src_count != dst_count:
        return int(_plan.COUNTS)
    pairs: list[tuple[int, int]] = []
    for i in range(src_count):
        out_of = src.row(want.src_first + i, want.src_row)[want.src_offset:want.src_offset + length]
        into = dst.row(want.dst_first + i, want.dst_row)[want.dst_offset:want.dst_offset + length]
        pairs += zip(out_of.tolist(), into.tolist(), strict=True)
    return pairs


def plan(src: Cache, dst: Cache, want: Want) -> Any:
    return _plan.runs(src.shapes, dst.shapes, **vars(want))


@MANY
@given(caches(), caches(), wishes(12), st.integers(0, 4))
def test_runs_are_those_of_brute_force(src: Cache, dst: Cache, want: Want, src_row: int) -> None:
    want = replace(want, src_row=src_row % src.rows)
    found = plan(src, dst, want)
    expected = brute_force(src, dst, want)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert all(nbytes > 0 for _, _, nbytes in found)
        assert spread(found) == expected


@st.composite
def fitting(draw: st.DrawFn) -> tuple[Cache, Cache, Want]:
    """A selection that has to work."""
    src, dst, count = draw(caches()), draw(caches()), draw(st.integers(1, 5))
    src = replace(src, num_tensors=count + draw(st.integers(0, 2)))
    dst = replace(dst, num_tensors=count + draw(st.integers(0, 2)))
    length = draw(st.integers(1, min(src.stride, dst.stride)))
    return src, dst, Want(
        length, draw(st.integers(0, src.stride - length)), draw(st.integers(0, dst.stride - length)),
        draw(st.integers(0, src.rows - 1)), draw(st.integers(0, dst.rows - 1)),
        draw(st.integers(0, src.num_tensors - count)), draw(st.integers(0, dst.num_tensors - count)), count, count)


@MANY
@given(fitting())
def test_runs_of_fitting_selections(case: tuple[Cache, Cache, Want]) -> None:
    src, dst, want = case
    found = plan(src, dst, want)
    assert spread(found) == brute_force(src, dst, want)
    assert sum(nbytes for _, _, nbytes in found) == want.size * want.src_count


def test_runs_merge_where_both_sides_touch() -> None:
    packed = Cache(4, 1, 1, 64)
    assert plan(packed, packed, Want()) == [(0, 0, 256)]
    gappy = replace(packed, gap=64)
    assert plan(gappy, packed, Want()) == [(128 * i, 64 * i, 64) for i in range(4)]
    assert plan(packed, gappy, Want()) == [(64 * i, 128 * i, 64) for i in range(4)]
    assert plan(gappy, gappy, Want()) == [(128 * i, 128 * i, 64) for i in range(4)]


def test_runs_of_a_middle_batch_dimension_end_where_either_piece_ends() -> None:
    src, dst = Cache(1, 3, 2, 4), Cache(1, 2, 1, 6)
    assert plan(src, dst, Want(src_row=1)) == [(4, 0, 4), (12, 4, 2), (14, 6, 2), (20, 8, 4)]


def test_refusals_come_in_the_order_of_the_contract() -> None:
    cache = Cache(2, 1, 2, 8)
    wrong = {"dst_row": 2, "dst_count": 3, "size": 9, "src_offset": 9, "src_count": 3}
    order = [_plan.DST_ROW, _plan.DST_RANGE, _plan.DST_WINDOW, _plan.SRC_WINDOW, _plan.SRC_RANGE]
    for name, answer in zip(list(wrong), order, strict=True):
        assert plan(cache, cache, Want(**wrong)) == answer
        del wrong[name]
    assert plan(cache, cache, Want(src_count=1)) == _plan.COUNTS
    assert plan(cache, cache, Want()) == [(0, 0, 8), (16, 16, 8)]


def test_numbers_at_their_limits_do_not_wrap() -> None:
    cache = Cache(2, 3, 2, 8)
    for want, answer in [
        (Want(size=I63), _plan.DST_WINDOW), (Want(dst_offset=I63), _plan.DST_WINDOW),
        (Want(dst_offset=I63, size=I63), _plan.DST_WINDOW), (Want(dst_offset=2**64 - 1, size=1), _plan.DST_WINDOW),
        (Want(src_offset=I63), _plan.SRC_WINDOW), (Want(src_offset=2**64 - 24), _plan.SRC_WINDOW),
        (Want(dst_first=U32, dst_count=I63 - U32), _plan.DST_RANGE), (Want(src_first=U32), _plan.SRC_RANGE),
        (Want(src_first=U32, src_count=2), _plan.SRC_RANGE), (Want(dst_row=U32), _plan.DST_ROW),
    ]:
        assert plan(cache, cache, want) == answer, want


def test_empty_selections_are_refused() -> None:
    cache = Cache(2, 1, 2, 8)
    assert plan(cache, cache, Want(dst_count=0)) == _plan.DST_RANGE
    assert plan(cache, cache, Want(src_count=0)) == _plan.SRC_RANGE
    assert plan(cache, cache, Want(size=0)) == _plan.DST_WINDOW
    assert plan(cache, cache, Want(dst_offset=8)) == _plan.DST_WINDOW


def test_argument_faults_are_told_from_damage() -> None:
    assert _plan.DAMAGED not in _plan.ARGUMENT_FAULTS
    assert {_plan.DST_ROW, _plan.COUNTS, _plan.DIVISOR} < _plan.ARGUMENT_FAULTS
    assert all(-1300 < status <= -1201 for status in _plan.ARGUMENT_FAULTS)
