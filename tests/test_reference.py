"""The numpy twin against the contract's own table of numbers, and its generator of cases against vacuity."""
from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from pull_cases import random_case
from pull_table import DESTINATION_SHAPE, DESTINATION_TENSORS, TABLE, TableRow
from reference import (
    NOT_EXIST,
    PARAM_INVALID,
    SUCCESS,
    WRONG_TYPE,
    Geometry,
    Pull,
    canary,
    expected_pull,
    geometry,
    noise,
    pattern,
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_twin_answers_each_row_of_the_table(row: TableRow) -> None:
    src = noise(row.src_geometry, seed=1)
    dst = canary(geometry(DESTINATION_TENSORS, DESTINATION_SHAPE, 2))
    wanted = dst.copy()
    if row.move is not None:
        length = row.move.dst_to - row.move.dst_from
        for src_tensor, dst_tensor in row.move.tensors.items():
            window = src[src_tensor, 0, 0, row.move.src_from:row.move.src_from + length]
            wanted[dst_tensor, 0, row.pull.batch_index, row.move.dst_from:row.move.dst_to] = window
    answer, after = expected_pull(src, dst, row.pull)
    assert answer == row.answer
    np.testing.assert_array_equal(after, wanted)


@pytest.mark.parametrize(("pull", "answer"), [
    (Pull(size=0), PARAM_INVALID), (Pull(size=-2), PARAM_INVALID), (Pull(size=8.0), WRONG_TYPE),
    (Pull(batch_index=2), PARAM_INVALID), (Pull(batch_index="1"), WRONG_TYPE),
    (Pull(src_row=2), NOT_EXIST), (Pull(src_row=2, src_cache_offset=99), NOT_EXIST),
    (Pull(src_row=2, dst_cache_offset=99), PARAM_INVALID),
    (Pull(src_layer_range=range(2, 2)), PARAM_INVALID), (Pull(src_layer_range=[0, 1]), WRONG_TYPE),
    (Pull(src_layer_range=range(0, 2, 2), dst_layer_range=range(1)), PARAM_INVALID),
    (Pull(tensor_num_per_layer=5), PARAM_INVALID), (Pull(tensor_num_per_layer=3), SUCCESS),
    (Pull(src_layer_range=range(1), dst_layer_range=range(1), tensor_num_per_layer=3), PARAM_INVALID),
])
def test_twin_refuses_what_the_contract_refuses(pull: Pull, answer: str) -> None:
    shape = geometry(4, [2, 8], 2)
    dst = canary(shape)
    said, after = expected_pull(noise(shape, seed=2), dst, pull)
    assert said == answer
    assert np.array_equal(after, dst) == (answer != SUCCESS)


def test_twin_slices_the_batch_dimension_in_the_middle() -> None:
    elements = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    src = elements.reshape(1, 2, 3, 4)
    dst = canary(geometry(1, [5, 8], 1))
    _, after = expected_pull(src, dst, Pull(src_row=1, batch_index=4))
    np.testing.assert_array_equal(after[0, 0, 4], elements[:, 1, :].reshape(-1))
    assert (after[0, 0, :4] == 0x5A).all()


def test_pattern_is_counted_in_row_bytes() -> None:
    shape = Geometry(num_tensors=3, outer=2, rows=4, inner=5)
    cache = pattern(shape, generation=2)
    assert cache.shape == tuple(shape)
    assert cache[2, 1, 3, 4] == (9 + 31 * 2 + 7 * 3 + 101 * 2) % 251


def test_random_cases_reach_every_answer() -> None:
    answers: Counter[str] = Counter()
    moved = 0
    for seed in range(600):
        case = random_case(random.Random(seed).randint)
        dst = canary(case.dst.geometry)
        answer, after = expected_pull(noise(case.src.geometry, seed), dst, case.pull)
        answers[answer] += 1
        moved += int((after != dst).any())
    assert answers[SUCCESS] > 200
    assert answers[PARAM_INVALID] > 60
    assert answers[NOT_EXIST] > 5
    assert moved > 150
