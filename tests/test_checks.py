"""Argument rules: both ends of every range, what counts as an int, what the messages say."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmkv import checks
from shmkv.errors import LLMException, LLMNoneError, LLMParamError, LLMStatusCode

WIDTHS = [
    (checks.check_uint8, 0, 2**8 - 1),
    (checks.check_uint16, 0, 2**16 - 1),
    (checks.check_uint32, 0, 2**32 - 1),
    (checks.check_uint64, 0, 2**64 - 1),
    (checks.check_int32, -(2**31), 2**31 - 1),
    (checks.check_int64, -(2**63), 2**63 - 1),
]
LISTS = [
    (checks.check_list_int32, -(2**31), 2**31 - 1),
    (checks.check_list_int64, -(2**63), 2**63 - 1),
    (checks.check_list_uint64, 0, 2**64 - 1),
]
NOT_INTS = ["4", 4.0, np.int64(4), np.uint8(4), [4], b"4"]


@pytest.mark.parametrize(("check", "low", "high"), WIDTHS)
def test_width_takes_both_ends_and_nothing_beyond(check: Callable[..., int], low: int, high: int) -> None:
    assert [check("n", low), check("n", high), check("n", True)] == [low, high, True]
    for value in (low - 1, high + 1, 10**30):
        with pytest.raises(LLMParamError, match=f"'n'.*{value}") as caught:
            check("n", value)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("value", NOT_INTS, ids=repr)
@pytest.mark.parametrize("check", [checks.check_int, *(row[0] for row in WIDTHS)])
def test_only_int_is_an_int(check: Callable[..., int], value: object) -> None:
    with pytest.raises(TypeError, match=r"'n' only support int, got .*4.* of type") as caught:
        check("n", value)
    assert not isinstance(caught.value, LLMException)


def test_numpy_integer_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"int64; convert it with int\(\.\.\.\)"):
        checks.check_uint32("batch_index", np.int64(1))
    with pytest.raises(TypeError, match=r"inner type only support int.*convert it with int"):
        checks.check_list_uint64("blocks", [0, np.int32(1)])
    with pytest.raises(TypeError, match="only support str") as caught:
        checks.check_str("name", np.int64(1))
    assert "convert" not in str(caught.value)


@pytest.mark.parametrize(
    "check",
    [row[0] for row in WIDTHS + LISTS]
    + [checks.check_int, checks.check_bool, checks.check_str]
    + [checks.check_layer_range, checks.check_copy_size]
    + [lambda name, value: checks.check_type(name, value, dict)]
    + [lambda name, value: checks.check_dict(name, value, int, int)],
)
def test_none_for_a_required_argument(check: Callable[..., Any]) -> None:
    with pytest.raises(LLMNoneError, match=r"'n' only support .*None"):
        check("n", None)


def test_check_not_none() -> None:
    assert checks.check_not_none("cache", 0) == 0
    with pytest.raises(LLMNoneError, match="'cache'"):
        checks.check_not_none("cache", None)


@pytest.mark.parametrize("value", [0, 1, "True", np.True_])
def test_bool_is_strict(value: object) -> None:
    assert checks.check_bool("force", True) is True
    with pytest.raises(TypeError, match="'force' only support bool"):
        checks.check_bool("force", value)


def test_check_type_names_every_wanted_type() -> None:
    assert checks.check_type("key", 1, str, int) == 1
    with pytest.raises(TypeError, match=r"'key' only support str or int, got 1.5 of type float"):
        checks.check_type("key", 1.5, str, int)


@pytest.mark.parametrize(("check", "low", "high"), LISTS)
def test_lists_check_every_element(check: Callable[..., Any], low: int, high: int) -> None:
    assert check("n", [low, high]) == [low, high]
    assert check("n", ()) == ()
    for value in (low - 1, high + 1):
        with pytest.raises(LLMParamError, match=r"'n\[2\]'"):
            check("n", (0, 1, value))
    for element in ("1", 1.0, None):
        with pytest.raises(TypeError, match=r"'n' inner type only support int.* at 1"):
            check("n", [0, element])


@pytest.mark.parametrize("value", ["12", {1}, {1: 1}, range(2), np.zeros(2, np.int64), 5])
def test_other_containers_are_not_lists(value: object) -> None:
    with pytest.raises(TypeError, match="'n' only support list or tuple"):
        checks.check_list_uint64("n", value)


def test_a_tuple_can_be_refused() -> None:
    assert checks.check_list_uint64("n", [1], containers=(list,)) == [1]
    with pytest.raises(TypeError, match="'n' only support list, got"):
        checks.check_list_uint64("n", (1,), containers=(list,))


def test_sequence_of_objects() -> None:
    assert checks.check_sequence("keys", ("a", b"b"), str, bytes) == ("a", b"b")
    with pytest.raises(TypeError, match="'keys' inner type only support str or bytes, got 1 of type int"):
        checks.check_sequence("keys", ["a", 1], str, bytes)
    with pytest.raises(LLMNoneError, match="inner type only support"):
        checks.check_sequence("keys", [None], str)


def test_dict_checks_keys_and_values() -> None:
    given = {1: [2], 3: []}
    assert checks.check_dict("map", given, int, list) is given
    with pytest.raises(TypeError, match="'map' only support dict"):
        checks.check_dict("map", [1], int, list)
    for wrong in ({"1": [2]}, {1: 2}, {1: "2"}):
        with pytest.raises(TypeError, match="'map' inner type only support"):
            checks.check_dict("map", wrong, int, list)


@pytest.mark.parametrize("layers", [range(1), range(3, 4), range(2**40), range(2, 3, 1)])
def test_layer_range_accepts(layers: range) -> None:
    assert checks.check_layer_range("src_layer_range", layers) == layers
    assert checks.check_optional_layer_range("src_layer_range", layers) == layers


@pytest.mark.parametrize(
    "layers",
    [range(0), range(2, 2), range(4, 1), range(-1, 2), range(0, 4, 2), range(0, 1, 2), range(4, 0, -1)],
    ids=repr,
)
def test_layer_range_refuses(layers: range) -> None:
    for check in (checks.check_layer_range, checks.check_optional_layer_range):
        with pytest.raises(LLMParamError, match=r"'src_layer_range'.*range"):
            check("src_layer_range", layers)


@pytest.mark.parametrize("value", [[0, 1], (0, 1), 1, "range(0, 1)", slice(0, 1)], ids=repr)
def test_layer_range_is_a_range(value: object) -> None:
    for check in (checks.check_layer_range, checks.check_optional_layer_range):
        with pytest.raises(TypeError, match="'src_layer_range' only support range"):
            check("src_layer_range", value)
    assert checks.check_optional_layer_range("src_layer_range", None) is None


def test_layer_range_below_a_limit() -> None:
    assert checks.check_layer_range("r", range(2**32 - 2, 2**32 - 1), below=2**32)
    with pytest.raises(LLMParamError, match="'r' must stay below 4294967296"):
        checks.check_optional_layer_range("r", range(2**32), below=2**32)


def test_copy_size_is_minus_one_or_positive() -> None:
    assert [checks.check_copy_size("size", size) for size in (-1, 1, 2**63 - 1)] == [-1, 1, 2**63 - 1]
    for size in (0, -2, -(2**63), 2**63):
        with pytest.raises(LLMParamError, match="'size'"):
            checks.check_copy_size("size", size)


def test_offset_is_none_or_not_negative() -> None:
    assert [checks.check_optional_offset("o", o) for o in (None, 0, 2**63 - 1)] == [None, 0, 2**63 - 1]
    for offset in (-1, 2**63):
        with pytest.raises(LLMParamError, match="'o'"):
            checks.check_optional_offset("o", offset)
    with pytest.raises(TypeError, match="'o' only support int"):
        checks.check_optional_offset("o", 1.0)


def test_positive() -> None:
    assert checks.check_positive("timeout", 1) == 1
    for value in (0, -1):
        with pytest.raises(LLMParamError, match=f"'timeout' must be greater than 0, got {value}"):
            checks.check_positive("timeout", value)


@pytest.mark.parametrize(
    ("layers", "per_layer", "tensors"),
    [(range(1, 2), 2, [2, 3]), (range(2), 1, [0, 1]), (range(1, 3), 4, [4, 5, 6, 7, 8, 9, 10, 11])],
)
def test_layers_to_tensors(layers: range, per_layer: int, tensors: list[int]) -> None:
    assert checks.layer_range_to_tensor_indices(layers, per_layer) == tensors


@pytest.mark.parametrize(
    ("per_layer", "error"),
    [(0, LLMParamError), (-1, LLMParamError), (2**32, LLMParamError), (1.0, TypeError)]
)
def test_layers_to_tensors_checks_its_factor(per_layer: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tensor_num_per_layer"):
        checks.layer_range_to_tensor_indices(range(1), per_layer)


@pytest.mark.parametrize(
    "value", [10**5000, [10**5000], "x" * 10**6, list(range(10**5)), "{0} {name}"], ids=range(5)
)
def test_a_message_stays_short(value: Any) -> None:
    with pytest.raises((TypeError, LLMParamError)) as caught:
        checks.check_list_int32("n", value if isinstance(value, list) and len(value) < 9 else (value,))
    assert len(str(caught.value)) < 400
    assert len(checks.shown(value)) < 300


def test_braces_in_a_value_are_shown_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"got '\{0\} \{name\}' of type str"):
        checks.check_int("n", "{0} {name}")
