"""Descriptions of caches whose tensors differ (`CacheDesc.of_tensors`) and where such tensors lie. Plain ones: test_types.py."""
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmkv.cache_desc import CacheDesc, Placement
from shmkv.cache_layout import layout
from shmkv.data_type import DataType, storage_dtype
from shmkv.errors import LLMNoneError, LLMParamError

BF16, INT8, FLOAT, FP8 = DataType.DT_BF16, DataType.DT_INT8, DataType.DT_FLOAT, DataType.DT_FLOAT8_E4M3FN
# A latent tensor, a shorter one, the state of a linear layer, bytes.
SHAPES = ([3, 1, 64, 16], (3, 1, 64, 8), [3, 2, 5], [3, 7])
KINDS = [BF16, BF16, FLOAT, INT8]


def mixed(**changes: Any) -> CacheDesc:
    return CacheDesc.of_tensors(**{"shapes": SHAPES, "data_types": KINDS, **changes})


def test_each_tensor_reads_back() -> None:
    made = mixed(placement=Placement.HOST, seq_len_dim_index=2, kv_tensor_format="ND")
    assert (made.num_tensors, made.batch_dim, made.batch_size, made.is_uniform) == (4, 0, 3, False)
    assert (made.placement, made.seq_len_dim_index, made.kv_tensor_format) == (Placement.HOST, 2, "ND")
    assert [made.tensor_shape(i) for i in range(4)] == [list(shape) for shape in SHAPES]
    assert [made.tensor_data_type(i) for i in range(4)] == KINDS
    assert [made.tensor_size(i) for i in range(4)] == [6144, 3072, 120, 21]
    assert [made.tensor_row_geometry(i) for i in range(4)] == [(1, 3, 2048), (1, 3, 1024), (1, 3, 40), (1, 3, 7)]


def test_one_element_type_is_for_all() -> None:
    made = mixed(data_types=FP8)
    assert {made.tensor_data_type(i) for i in range(4)} == {FP8} == {made.data_type}
    assert made.tensor_size(0) == 3 * 64 * 16


def test_tensors_that_are_alike_make_a_plain_description() -> None:
    plain = CacheDesc(3, [2, 8], BF16, seq_len_dim_index=1)
    made = CacheDesc.of_tensors([[2, 8], (2, 8), [2, 8]], [BF16] * 3, seq_len_dim_index=1)
    assert type(made) is CacheDesc
    assert (made.values(), repr(made), made.size) == (plain.values(), repr(plain), 32)


def test_a_plain_description_answers_for_each_tensor() -> None:
    plain = CacheDesc(3, [2, 5, 8], BF16, batch_dim_index=1)
    assert plain.is_uniform
    for place in range(3):
        assert (plain.tensor_shape(place), plain.tensor_data_type(place)) == ([2, 5, 8], BF16)
        assert (plain.tensor_size(place), plain.tensor_row_geometry(place)) == (plain.size, plain.row_geometry)
    plain.tensor_shape(0).append(9)
    assert plain.shape == [2, 5, 8]


@pytest.mark.parametrize("ask", ["tensor_shape", "tensor_data_type", "tensor_size", "tensor_row_geometry"])
@pytest.mark.parametrize(("index", "error"), [(4, LLMParamError), (-1, LLMParamError), ("0", TypeError), (None, LLMNoneError),
                                              (np.int64(0), TypeError)])
def test_there_is_no_such_tensor(ask: str, index: Any, error: type[Exception]) -> None:
    for made in (mixed(), CacheDesc(4, [2, 8], BF16)):
        with pytest.raises(error, match="'tensor_index'"):
            getattr(made, ask)(index)


@pytest.mark.parametrize(("ask", "instead"), [("size", "tensor_size"), ("row_geometry", "tensor_row_geometry"),
                                              ("shape", "tensor_shape"), ("data_type", "tensor_data_type")])
def test_what_differs_is_not_that_of_tensor_0(ask: str, instead: str) -> None:
    with pytest.raises(LLMParamError, match=rf"ask {instead}\(tensor_index\)"):
        getattr(mixed(), ask)


def test_what_does_not_differ_is_told() -> None:
    assert mixed(data_types=BF16).data_type is BF16
    assert CacheDesc.of_tensors([[2, 8]] * 2, [BF16, INT8]).shape == [2, 8]


@pytest.mark.parametrize(("changes", "named"), [
    ({"shapes": []}, "'shapes'"), ({"shapes": SHAPES[:3]}, "'data_types'.*got 3 and 4"), ({"data_types": []}, "'data_types'"),
    ({"shapes": [[3, 1], [2, 1], [3, 2], [3, 1]]}, r"'shapes' must have one batch size, got shapes\[1\] = \[2, 1\].* 3$"),
    ({"shapes": [[3, 1], [3, 1], [3], [3, 2]], "batch_dim_index": 1}, r"'batch_dim_index'.*got 1 for shapes\[2\] = \[3\]"),
    ({"shapes": [[3], [3, 1], [], [3]]}, r"'batch_dim_index'.*shapes\[2\] = \[\]"),
    ({"shapes": [[3], [3, 2**63], [3], [3]]}, r"'shapes\[1\]\[1\]'"),
    ({"batch_dim_index": 4}, "'batch_dim_index'"), ({"batch_dim_index": -1}, "'batch_dim_index'"),
    ({"seq_len_dim_index": 4}, "'seq_len_dim_index'"), ({"seq_len_dim_index": -2}, "'seq_len_dim_index'"),
], ids=str)
def test_refused_values(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LLMParamError, match=named):
        mixed(**changes)


@pytest.mark.parametrize(("changes", "named"), [
    ({"shapes": 8}, "'shapes'"), ({"shapes": [8]}, "'shapes' inner"), ({"shapes": [[3], [3.0], [3], [3]]}, r"'shapes\[1\]' inner"),
    ({"shapes": None}, "'shapes'"), ({"data_types": 27}, "'data_types' only support .*DataType"),
    ({"data_types": None}, "'data_types'"),
    ({"data_types": [BF16, BF16, 1, BF16]}, "'data_types' inner"), ({"placement": 1}, "'placement'"),
    ({"batch_dim_index": "0"}, "'batch_dim_index'"), ({"seq_len_dim_index": 0.0}, "'seq_len_dim_index'"),
    ({"kv_tensor_format": 1}, "'kv_tensor_format'"),
], ids=str)
def test_refused_types(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        mixed(**changes)


def test_update_dim_sets_the_batch_size_of_all() -> None:
    made = mixed()
    before = made.snapshot()
    made.update_dim(0, 5)
    assert (made.batch_size, made.tensor_shape(1), made.tensor_size(3)) == (5, [5, 1, 64, 8], 35)
    assert (before.batch_size, before.tensor_size(3)) == (3, 21)
    assert made.values() != before.values()
    for index, value, error in ((1, 5, LLMParamError), (4, 5, LLMParamError), ("0", 5, TypeError), (0, "5", TypeError),
                                (0, 2**63, LLMParamError)):
        with pytest.raises(error):
            made.update_dim(index, value)  # type: ignore[arg-type]
    assert made.batch_size == 5
    made.update_dim(0, 0)
    with pytest.raises(LLMParamError, match=r"shapes\[2\]"):
        made.tensor_size(2)
    with pytest.raises(LLMParamError, match=r"shapes\[0\]"):
        made.validate_for_allocation()


def test_a_later_change_of_the_callers_lists_changes_nothing() -> None:
    shapes, kinds = [[3, 4], [3, 5]], [BF16, INT8]
    made = CacheDesc.of_tensors(shapes, kinds)
    shapes[0][1], kinds[1] = 9, BF16
    assert (made.tensor_shape(0), made.tensor_data_type(1)) == ([3, 4], INT8)


def test_values_are_a_key_and_lead_back() -> None:
    made = mixed(kv_tensor_format="ND", seq_len_dim_index=2)
    for twin in (CacheDesc.from_values(made.values()), made.snapshot(), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (twin.values(), hash(twin.values()), repr(twin)) == (made.values(), hash(made.values()), repr(made))
    others = [mixed(), mixed(data_types=BF16), CacheDesc.of_tensors(SHAPES[::-1], KINDS), CacheDesc(4, [3, 1, 64, 16], BF16)]
    assert len({made.values(), *(other.values() for other in others)}) == 5


def test_repr_has_all_fields_and_stays_short() -> None:
    text = repr(mixed())
    for part in ("CacheDesc(num_tensors=4", "shapes=[[3, 1, 64, 16], [3, 1, 64, 8], [3, 2, 5], [3, 7]]",
                 "data_types=[DataType.DT_BF16, DataType.DT_BF16, DataType.DT_FLOAT, DataType.DT_INT8]",
                 "placement=Placement.DEVICE", "batch_dim_index=0", "seq_len_dim_index=-1", "kv_tensor_format=None"):
        assert part in text
    assert len(repr(CacheDesc.of_tensors([[3, 1, 64, 16 + i] for i in range(1000)], BF16))) < 1000


@pytest.mark.parametrize(("shapes", "named"), [
    ([[1], [1] * 32], r"'shapes\[1\]' must have at most 31"), ([[1], [1, 0]], r"'shapes\[1\]'"),
    ([[1, 2**62], [1, 2**62, 4]], r"'shapes\[1\]' exceeds"), ([[1, 2**62], [1, 2**62 - 1], [1, 3]], "'shapes' is too large"),
    ([[1, 2**63 - 1], [1]], "'shapes' is too large"),
])
def test_allocation_refuses(shapes: list[list[int]], named: str) -> None:
    with pytest.raises(LLMParamError, match=named):
        CacheDesc.of_tensors(shapes, INT8).validate_for_allocation()


def test_allocation_accepts_what_just_fits() -> None:
    desc = CacheDesc.of_tensors([[1, 2**62], [1, 2**62 - 128], [1] * 31], [INT8, INT8, DataType.DT_UINT8])
    desc.validate_for_allocation()
    assert layout(desc).nbytes < 2**63


def test_layout_gives_each_tensor_its_own_place_and_rows() -> None:
    found = layout(mixed())
    assert found.offsets == (4096, 4096 + 6144, 4096 + 9216, 4096 + 9344)
    assert (found.nbytes, found.rows, found.row_nbytes, found.tensors.count) == (9216 + 128 + 64, 3, (2048, 1024, 40, 7), 4)
    assert found.desc.values() == mixed().values()
    assert layout(mixed()) is found
    assert layout(mixed(data_types=BF16)) is not found


def test_rows_agree_with_numpy_slicing(rounds: Callable[[int], int]) -> None:
    rng = np.random.default_rng(5)
    for _ in range(rounds(40)):
        dim, rows = int(rng.integers(3)), int(rng.integers(1, 6))
        shapes = [[int(size) for size in rng.integers(1, 5, dim + int(rng.integers(1, 3)))] for _ in range(5)]
        for shape in shapes:
            shape[dim] = rows
        kinds = [list(DataType)[int(which)] for which in rng.integers(0, len(DataType), 5)]
        made = CacheDesc.of_tensors(shapes, kinds, batch_dim_index=dim)
        for place, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
            outer, found, inner = made.tensor_row_geometry(place)
            raw = rng.bytes(made.tensor_size(place))
            assert (found, outer * rows * inner) == (rows, len(raw))
            array = np.frombuffer(raw, f"V{storage_dtype(kind).itemsize}").reshape(shape)
            row = int(rng.integers(rows))
            pieces = [raw[(p * rows + row) * inner:][:inner] for p in range(outer)]
            assert b"".join(pieces) == array.take(row, axis=dim).tobytes()
