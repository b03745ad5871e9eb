"""Keys: ways to write them, what is refused, equality, and the kinds of a CacheKey."""
from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from shmkv.errors import LLMNoneError, LLMParamError
from shmkv.keys import U64MAX, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex


def fields(key: CacheKey) -> tuple[int, ...]:
    return key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2, 3, 4), {}),
        ((), {"cluster_id": 1, "req_id": 2, "model_id": 3, "prefix_id": 4}),
        ((), {"prompt_cluster_id": 1, "req_id": 2, "model_id": 3, "prefix_id": 4}),
        ((1, 2), {"prefix_id": 4, "model_id": 3}),
    ],
)
def test_cache_key_spellings(args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    assert fields(CacheKey(*args, **kwargs)) == (1, 1, 2, 3, 4)


def test_cache_key_defaults() -> None:
    assert fields(CacheKey(1, 2)) == (1, 1, 2, 0, U64MAX)
    assert (BlocksCacheKey(7).cluster_id, BlocksCacheKey(7).model_id) == (7, 0)
    assert CacheKeyByIdAndIndex(1, 2).batch_index == 0


def test_of_two_spellings_cluster_id_wins() -> None:
    assert CacheKey(cluster_id=1, prompt_cluster_id=9, req_id=2).cluster_id == 1
    key = BlocksCacheKey(prompt_cluster_id=9, cluster_id=1)
    assert (key.cluster_id, repr(key)) == (1, "BlocksCacheKey(cluster_id=1, model_id=0)")


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "text"),
    [
        (CacheKey, (), {}, "cluster_id is required"),
        (CacheKey, (), {"req_id": 1}, "cluster_id is required"),
        (CacheKey, (1,), {}, "req_id is required"),
        (CacheKey, (1, 2), {"request": 1}, "Unsupported.*request"),
        (CacheKey, (1, 2, 3, 4, 5), {}, "at most 4"),
        (CacheKey, (1, 2, 3, 4), {"foo": 1}, "at most 4"),
        (CacheKey, (1, 2), {"req_id": 2}, "req_id is given by position and by keyword"),
        (CacheKey, (1, 2), {"prompt_cluster_id": 1}, "cluster_id is given by position and by keyword"),
        (BlocksCacheKey, (), {}, "cluster_id is required"),
        (BlocksCacheKey, (), {"model_id": 1}, "cluster_id is required"),
        (BlocksCacheKey, (1,), {"req_id": 1}, "Unsupported.*req_id"),
        (BlocksCacheKey, (1, 2, 3), {}, "at most 2"),
        (BlocksCacheKey, (1,), {"cluster_id": 1}, "by position and by keyword"),
    ],
)
def test_wrong_set_of_arguments(kind: Any, args: tuple[int, ...], kwargs: dict[str, int], text: str) -> None:
    with pytest.raises(LLMParamError, match=text):
        kind(*args, **kwargs)


@pytest.mark.parametrize("name", ["cluster_id", "req_id", "model_id", "prefix_id"])
def test_cache_key_numbers_are_uint64(name: str) -> None:
    given = {"cluster_id": 1, "req_id": 1, "model_id": 1, "prefix_id": 1}
    for value in (0, U64MAX, True):
        assert getattr(CacheKey(**{**given, name: value}), name) == value
    for value in (-1, 2**64):
        with pytest.raises(LLMParamError, match=f"'{name}'"):
            CacheKey(**{**given, name: value})
    for wrong in ("1", 1.0, np.uint64(1)):
        with pytest.raises(TypeError, match=f"'{name}' only support int"):
            CacheKey(**{**given, name: wrong})
    with pytest.raises(LLMNoneError, match=f"'{name}'"):
        CacheKey(**{**given, name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cluster_id", "model_id"])
def test_blocks_cache_key_numbers_are_uint64(name: str) -> None:
    given = {"cluster_id": 1, "model_id": 1}
    assert getattr(BlocksCacheKey(**{**given, name: U64MAX}), name) == U64MAX
    for value in (-1, 2**64):
        with pytest.raises(LLMParamError, match=f"'{name}'"):
            BlocksCacheKey(**{**given, name: value})
    with pytest.raises(LLMNoneError, match=f"'{name}'"):
        BlocksCacheKey(**{**given, name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("cluster_id", 0, 2**64 - 1), ("cache_id", -(2**63), 2**63 - 1), ("batch_index", 0, 2**32 - 1)],
)
def test_by_id_ranges(name: str, low: int, high: int) -> None:
    given: dict[str, Any] = {"cluster_id": 1, "cache_id": 2, "batch_index": 3}
    for value in (low, high):
        assert getattr(CacheKeyByIdAndIndex(**{**given, name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(LLMParamError, match=f"'{name}'"):
            CacheKeyByIdAndIndex(**{**given, name: value})
    for wrong in (None, "1"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            CacheKeyByIdAndIndex(**{**given, name: wrong})


def test_by_id_unknown_or_missing_arguments_are_type_errors() -> None:
    with pytest.raises(TypeError):
        CacheKeyByIdAndIndex(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        CacheKeyByIdAndIndex(1, 2, req_id=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("req_id", "prefix_id", "usable", "padding", "ambiguous"),
    [
        (1, U64MAX, True, False, False),
        (U64MAX, 1, True, False, False),
        (0, U64MAX, True, False, False),
        (U64MAX, U64MAX, False, True, False),
        (1, 1, False, False, True),
    ],
)
def test_kinds(req_id: int, prefix_id: int, usable: bool, padding: bool, ambiguous: bool) -> None:
    key = CacheKey(1, req_id, 0, prefix_id)
    assert (key.is_usable, key.is_padding, key.is_ambiguous) == (usable, padding, ambiguous)


@pytest.mark.parametrize(
    ("kind", "args", "others"),
    [
        (CacheKey, (1, 2, 3, 4), [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)]),
        (BlocksCacheKey, (1, 2), [(0, 2), (1, 0)]),
        (CacheKeyByIdAndIndex, (1, 2, 3), [(0, 2, 3), (1, 0, 3), (1, 2, 0)]),
    ],
)
def test_equality_is_by_value(kind: Any, args: tuple[int, ...], others: list[tuple[int, ...]]) -> None:
    key = kind(*args)
    for twin in (kind(*args), copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert twin == key
        assert hash(twin) == hash(key)
    for other in others:
        assert kind(*other) != key
    assert len({key, kind(*args), *(kind(*other) for other in others)}) == 1 + len(others)
    assert key != args


def test_keys_of_different_kinds_are_never_equal() -> None:
    assert BlocksCacheKey(1, 2) != CacheKeyByIdAndIndex(1, 2)
    assert CacheKeyByIdAndIndex(1, 2, 3) not in {CacheKey(1, 2, 3, 3), BlocksCacheKey(1)}


def test_spelling_does_not_matter_for_equality() -> None:
    assert CacheKey(1, 2) == CacheKey(prompt_cluster_id=1, req_id=2)
    assert BlocksCacheKey(1) == BlocksCacheKey(prompt_cluster_id=1)


def test_keys_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        CacheKey(1, 2).req_id = 3  # type: ignore[misc]


def test_repr() -> None:
    assert repr(CacheKey(1, 2)) == (
        "CacheKey(cluster_id=1, req_id=2, prefix_id=18446744073709551615, model_id=0)"
    )
    assert repr(BlocksCacheKey(prompt_cluster_id=3)) == "BlocksCacheKey(prompt_cluster_id=3, model_id=0)"
    assert repr(CacheKeyByIdAndIndex(1, 2)) == "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)"
