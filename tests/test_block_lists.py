"""Lists of blocks become runs: against brute force over every byte's place, neighbours as one run, the order of the refusals."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from block_cases import BlockCase, blocks_to_blocks, random_block_case
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_bytes import Runs, places, shapes_of, spread, stretches
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, Geometry, expected_pull_blocks

from shmkv import _blocks, _plan

MANY = settings(max_examples=2000, deadline=None)
U32 = 2**32 - 1


def mode_of(case: BlockCase) -> int:
    return int(_blocks.FROM_ROW if case.pull.by_row else _blocks.TO_ROW if case.pull.into_row else _blocks.TO_BLOCKS)


def runs_of(case: BlockCase, gap: int = 0) -> Any:
    """The runs of a case whose numbers all fit 32 bits."""
    src, dst, pull = case.src.geometry, case.dst.geometry, case.pull
    count, per_layer = max(len(pull.prompt_blocks), len(pull.decoder_blocks)), pull.tensor_num_per_layer
    selected: dict[str, int] = {}
    for side, layers in (("src", pull.src_layer_range), ("dst", pull.dst_layer_range)):
        if layers is not None:
            selected |= {f"{side}_first": layers.start * per_layer, f"{side}_count": len(layers) * per_layer}
    return _blocks.runs(shapes_of(src, gap), shapes_of(dst, gap), list(pull.prompt_blocks) or list(range(count)),
                        list(pull.decoder_blocks) or list(range(count)), mode_of(case), src_row=pull.src_row,
                        dst_row=pull.batch_index, **selected)


def carried_out(case: BlockCase, runs: Runs, gap: int) -> Any:
    """Which place of the source each place of the destination holds afterwards, -1 = none; in the order of the runs."""
    into = places(case.dst.geometry, gap)
    held = np.full(int(into.max()) + 1, -1)
    for src, dst in spread(runs):
        held[dst] = src
    return held[into]


def is_well_formed(case: BlockCase) -> bool:
    """Do lists and ranges go together, which is looked at before there is a plan?"""
    pull, given = case.pull, [layers for layers in (case.pull.src_layer_range, case.pull.dst_layer_range) if layers is not None]
    listed = [len(numbers) for numbers in (pull.prompt_blocks, pull.decoder_blocks) if numbers]
    whole = all(side.num_tensors % pull.tensor_num_per_layer == 0 for side in (case.src, case.dst))
    return len(set(listed)) == 1 and len(listed) == 2 - (pull.by_row or pull.into_row) and len({*map(len, given)}) < 2 and (
        whole or not given) and (pull.into_row or pull.batch_index == 0)


@MANY
@given(st.data(), st.sampled_from([0, 1, 64]))
def test_every_byte_goes_where_the_twin_says(data: st.DataObject, gap: int) -> None:
    case = random_block_case(lambda low, high: data.draw(st.integers(low, high)))
    answer, wanted = expected_pull_blocks(places(case.src.geometry, gap), np.full(tuple(case.dst.geometry), -1), case.pull)
    if answer == NOT_EXIST or not is_well_formed(case):
        return
    found = runs_of(case, gap)
    if answer == PARAM_INVALID:
        assert found in _plan.ARGUMENT_FAULTS
        return
    assert all(nbytes > 0 for _, _, nbytes in found)
    np.testing.assert_array_equal(carried_out(case, found, gap), wanted)


@MANY
@given(st.data(), st.sampled_from([0, 1, 64]))
def test_neighbours_on_both_sides_are_one_run(data: st.DataObject, gap: int) -> None:
    case = blocks_to_blocks(lambda low, high: data.draw(st.integers(low, high)))
    found = runs_of(case, gap)
    assert len(found) == stretches(spread(found)) or case.dst.geometry.outer > 1


@pytest.mark.parametrize(("src", "dst", "wanted"), [
    ([0, 1, 2, 3], [4, 5, 6, 7], 1), ([0, 1, 3, 4], [4, 5, 6, 7], 2), ([0, 1, 2, 3], [4, 5, 7, 6], 3),
    ([3, 2, 1, 0], [3, 2, 1, 0], 4),
    ([2, 2, 2], [0, 1, 2], 3), ([0, 1, 2], [5, 5, 5], 3), ([7], [0], 1), ([6, 7, 0, 1], [0, 1, 2, 3], 2),
], ids=str)
def test_number_of_runs(src: list[int], dst: list[int], wanted: int) -> None:
    cache = Geometry(3, 1, 8, 64)
    runs = _blocks.runs(shapes_of(cache, 64), shapes_of(cache, 64), src, dst, _blocks.TO_BLOCKS)
    assert isinstance(runs, list)
    assert len(runs) == 3 * wanted
    assert sum(nbytes for _, _, nbytes in runs) == 3 * len(src) * 64


def test_whole_caches_are_one_run() -> None:
    cache = Geometry(3, 1, 8, 64)
    every = list(range(8))
    assert _blocks.runs(shapes_of(cache), shapes_of(cache), every, every, _blocks.TO_BLOCKS) == [(0, 0, 3 * 8 * 64)]


@pytest.mark.parametrize("mode", ["FROM_ROW", "TO_ROW"])
def test_a_row_and_blocks_in_order_are_one_run(mode: str) -> None:
    row, blocks = Geometry(1, 1, 3, 256), Geometry(1, 1, 8, 64)
    src, dst = (row, blocks) if mode == "FROM_ROW" else (blocks, row)
    chunks, numbers = [0, 1, 2, 3], [3, 4, 5, 6]
    lists = (chunks, numbers) if mode == "FROM_ROW" else (numbers, chunks)
    found = _blocks.runs(shapes_of(src), shapes_of(dst), *lists, getattr(_blocks, mode), src_row=2 * (mode == "FROM_ROW"),
                         dst_row=2 * (mode == "TO_ROW"))
    assert found == ([(512, 192, 256)] if mode == "FROM_ROW" else [(192, 512, 256)])


def test_blocks_of_a_row_in_pieces_end_where_the_piece_ends() -> None:
    src, dst = Geometry(1, 3, 2, 4), Geometry(1, 1, 4, 6)
    found = _blocks.runs(shapes_of(src), shapes_of(dst), [0, 1], [2, 0], _blocks.FROM_ROW, src_row=1)
    assert found == [(4, 12, 4), (12, 16, 2), (14, 0, 2), (20, 2, 4)]


def test_refusals_come_in_the_order_of_the_contract() -> None:
    small, big = shapes_of(Geometry(2, 1, 4, 8)), shapes_of(Geometry(2, 1, 4, 16))
    assert _blocks.runs(small, big, [4], [4], _blocks.TO_BLOCKS, dst_count=3) == _plan.DST_BLOCK
    assert _blocks.runs(small, big, [4], [3], _blocks.TO_BLOCKS, dst_count=3) == _plan.DST_RANGE
    assert _blocks.runs(small, big, [4], [3], _blocks.TO_BLOCKS, src_count=3) == _plan.SRC_BLOCK
    assert _blocks.runs(small, big, [3], [3], _blocks.TO_BLOCKS, src_count=3) == _plan.BLOCK_NBYTES
    assert _blocks.runs(small, small, [3], [3], _blocks.TO_BLOCKS, src_count=3) == _plan.SRC_RANGE
    assert _blocks.runs(small, small, [3], [3], _blocks.TO_BLOCKS, src_count=1) == _plan.COUNTS
    assert _blocks.runs(small, big, [0, 1], [0, 1], _blocks.TO_ROW, dst_row=4) == _plan.DST_ROW
    assert _blocks.runs(small, big, [0, 1, 2], [0, 1, 2], _blocks.TO_ROW) == _plan.BLOCKS_WINDOW
    assert _blocks.runs(big, small, [0, 1, 2], [0, 1, 2], _blocks.FROM_ROW) == _plan.BLOCKS_WINDOW
    assert _blocks.runs(small, big, [0], [0], _blocks.FROM_ROW) == _plan.BLOCKS_WINDOW


def test_fr_041_block_numbers_times_bytes_beyond_32_bits() -> None:
    gib = 1 << 30
    cache = [(4096, 9 * gib, 1, 9, gib)]
    found = _blocks.runs(cache, cache, [8, 0, 5], [1, 7, 4], _blocks.TO_BLOCKS)
    assert found == [(4096 + 8 * gib, 4096 + gib, gib), (4096, 4096 + 7 * gib, gib), (4096 + 5 * gib, 4096 + 4 * gib, gib)]
    row = [(4096, 18 * gib, 1, 2, 9 * gib)]
    assert _blocks.runs(row, cache, [8, 6], [0, 8], _blocks.FROM_ROW, src_row=1) == [
        (4096 + 17 * gib, 4096, gib), (4096 + 15 * gib, 4096 + 8 * gib, gib)]
    assert _blocks.runs(cache, row, [0, 8], [8, 6], _blocks.TO_ROW, dst_row=1) == [
        (4096, 4096 + 17 * gib, gib), (4096 + 8 * gib, 4096 + 15 * gib, gib)]


def test_numbers_at_their_limits_do_not_wrap() -> None:
    cache = [(0, 2**40, 1, 2**20, 2**20)]
    assert _blocks.runs(cache, cache, [U32], [0], _blocks.TO_BLOCKS) == _plan.SRC_BLOCK
    assert _blocks.runs(cache, cache, [0], [U32], _blocks.TO_BLOCKS) == _plan.DST_BLOCK
    assert _blocks.runs(cache, cache, [U32], [0], _blocks.FROM_ROW) == _plan.BLOCKS_WINDOW
    assert _blocks.runs(cache, cache, [0], [U32], _blocks.TO_ROW) == _plan.BLOCKS_WINDOW


@pytest.mark.parametrize(("src", "dst", "mode"), [([], [], 1), ([0], [], 1), ([0, 1], [0], 1), ([0], [0], 0), ([0], [0], 4)])
def test_lists_that_are_none(src: list[int], dst: list[int], mode: int) -> None:
    with pytest.raises(ValueError, match="lists of"):
        _blocks.BlockLists(src, dst, mode)


@pytest.mark.parametrize("number", [-1, 2**32, 2**64])
def test_numbers_beyond_32_bits_do_not_get_here(number: int) -> None:
    with pytest.raises(OverflowError):
        _blocks.BlockLists([number], [0], _blocks.TO_BLOCKS)
    with pytest.raises(OverflowError):
        _blocks.BlockLists([0], [number], _blocks.TO_BLOCKS)


def test_random_cases_reach_every_direction_and_answer() -> None:
    seen: set[tuple[int, str]] = set()
    for seed in range(500):
        case = random_block_case(random.Random(seed).randint)
        src, dst = case.src.geometry, case.dst.geometry
        seen.add((mode_of(case), expected_pull_blocks(places(src), np.full(tuple(dst), -1), case.pull)[0]))
    modes = (_blocks.TO_BLOCKS, _blocks.FROM_ROW, _blocks.TO_ROW)
    assert {(mode, answer) for mode in modes for answer in (SUCCESS, PARAM_INVALID)} <= seen
