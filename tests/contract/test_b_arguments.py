"""Contract, appendix B11 and B12, for the arguments of pull_cache: which class each wrong argument raises."""
from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from reference import canary, noise

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMException,
    LLMParamError,
    LLMStatusCode,
    Placement,
)

pytestmark = pytest.mark.timeout(60)
Here = Callable[..., Any]
INTEGERS = ["batch_index", "size", "src_cache_offset", "dst_cache_offset", "tensor_num_per_layer"]
RANGES = ["src_layer_range", "dst_layer_range"]


class SelfPull:
    """pull_cache of row 0 of one cache of this process into row 0 of another; arguments can be replaced."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.src, self.dst = (manager.allocate_cache(CacheDesc(4, [2, 8], DataType.DT_FLOAT16))
                              for _ in range(2))
        cache_bytes.write(self.src, noise(cache_bytes.geometry_of(self.src), seed=5))
        cache_bytes.write(self.dst, canary(cache_bytes.geometry_of(self.dst)))

    def __call__(self, **arguments: Any) -> None:
        row = CacheKeyByIdAndIndex(1, self.src.cache_id, 0)
        key, cache = arguments.pop("cache_key", row), arguments.pop("kv_cache", self.dst)
        self._manager.pull_cache(key, cache, **arguments)

    def refuses(self, error: type[Exception], **arguments: Any) -> Exception:
        """The error of that class that these arguments raise; nothing may have been copied."""
        with pytest.raises(error) as refusal:
            self(**arguments)
        assert (cache_bytes.read(self.dst) == 0x5A).all()
        return refusal.value


@pytest.fixture
def pull(here: Here) -> SelfPull:
    return SelfPull(here("DECODER").kv_cache_manager)


@pytest.mark.parametrize("keyword", ["src_offset", "src_batch_index", "layer_range", "timeout"])
def test_b11_unknown_keyword_is_named(pull: SelfPull, keyword: str) -> None:
    assert keyword in str(pull.refuses(TypeError, **{keyword: 4}))


@pytest.mark.parametrize("argument", ["cache_key", "kv_cache", "batch_index", "size", "tensor_num_per_layer"])
def test_b11_none_for_a_required_argument(pull: SelfPull, argument: str) -> None:
    error = pull.refuses(TypeError, **{argument: None})
    assert isinstance(error, AttributeError)
    assert argument in str(error)


@pytest.mark.parametrize("argument", INTEGERS)
@pytest.mark.parametrize("value", ["1", 1.0, [1], b"1", np.int64(1), np.uint8(1)], ids=repr)
def test_b11_integers_are_int(pull: SelfPull, argument: str, value: Any) -> None:
    text = str(pull.refuses(TypeError, **{argument: value}))
    assert "only support" in text
    assert argument in text


@pytest.mark.parametrize("argument", INTEGERS)
def test_b11_numpy_integer_is_told_to_use_int(pull: SelfPull, argument: str) -> None:
    assert "int(" in str(pull.refuses(TypeError, **{argument: np.int32(1)}))


def test_b11_bool_is_an_integer(pull: SelfPull) -> None:
    pull(batch_index=True, size=True, src_cache_offset=True, dst_cache_offset=True, tensor_num_per_layer=True)
    after, source = cache_bytes.read(pull.dst), cache_bytes.read(pull.src)
    np.testing.assert_array_equal(after[:, 0, 1, 1], source[:, 0, 0, 1])
    after[:, 0, 1, 1] = 0x5A
    assert (after == 0x5A).all()


@pytest.mark.parametrize(("argument", "values"), [
    ("batch_index", [-1, 2, 2**31, 2**32 - 1, 2**32, 2**64]),
    ("size", [-2, 0, 17, -2**63, 2**63 - 1, 2**63, 2**64]),
    ("src_cache_offset", [-1, 16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64]),
    ("dst_cache_offset", [-1, 16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64]),
    ("tensor_num_per_layer", [-1, 0, 5, 2**32 - 1, 2**32, 2**64]),
])
def test_b11_integers_out_of_range(pull: SelfPull, argument: str, values: list[int]) -> None:
    for value in values:
        error = pull.refuses(LLMParamError, **{argument: value})
        assert argument in str(error)
        assert str(value) in str(error)


@pytest.mark.parametrize("argument", RANGES)
@pytest.mark.parametrize("value", [[0, 1], (0, 1), slice(0, 1), 1, "0:1", np.arange(2)], ids=repr)
def test_b11_layer_ranges_are_ranges(pull: SelfPull, argument: str, value: Any) -> None:
    text = str(pull.refuses(TypeError, **{argument: value}))
    assert "only support" in text
    assert argument in text


@pytest.mark.parametrize("argument", RANGES)
@pytest.mark.parametrize("value", [
    range(0), range(1, 1), range(2, 1), range(0, 2, 2), range(1, -1, -1), range(-1, 1), range(-2, -1),
    range(2**32, 2**32 + 2), range(2**64, 2**64 + 2),
], ids=repr)
def test_b11_layer_ranges_out_of_range(pull: SelfPull, argument: str, value: range) -> None:
    text = str(pull.refuses(LLMParamError, **{argument: value}))
    assert argument in text
    assert str(value) in text


@pytest.mark.parametrize(("src", "dst"), [(range(1), range(2)), (range(2), range(1))])
def test_b11_ranges_of_different_length(pull: SelfPull, src: range, dst: range) -> None:
    error = pull.refuses(LLMParamError, src_layer_range=src, dst_layer_range=dst)
    assert "layer_range" in str(error)


@pytest.mark.parametrize("key", ["key", 1, (1, 1, 0), BlocksCacheKey(1)], ids=repr)
def test_b11_wrong_type_of_key(pull: SelfPull, key: Any) -> None:
    assert "only support" in str(pull.refuses(TypeError, cache_key=key))


@pytest.mark.parametrize("key", [CacheKey(1, 2**64 - 1), CacheKey(1, 1, 0, 1)], ids=["padding", "ambiguous"])
def test_b11_key_that_cannot_be_pulled(pull: SelfPull, key: CacheKey) -> None:
    error = pull.refuses(LLMException, cache_key=key)
    assert isinstance(error, LLMParamError)


def test_b11_wrong_type_of_destination(pull: SelfPull) -> None:
    for cache in ("cache", 1, pull.src.cache_desc):
        assert "only support" in str(pull.refuses(TypeError, kv_cache=cache))


def test_b11_host_destination(pull: SelfPull) -> None:
    host = KvCache.create_cpu_cache(CacheDesc(4, [2, 8], DataType.DT_FLOAT16, Placement.HOST), [64] * 4)
    error = pull.refuses(ValueError, kv_cache=host)
    assert isinstance(error, LLMParamError)


def test_b11_braces_in_a_value_do_no_harm(pull: SelfPull) -> None:
    assert "{0}" in str(pull.refuses(TypeError, size="{0}{name}"))


def test_b12_value_error_is_caught_by_both_clauses(pull: SelfPull) -> None:
    for error in (ValueError, LLMException, RuntimeError):
        caught = pull.refuses(error, size=-2)
        assert isinstance(caught, LLMException)
        assert caught.status_code == LLMStatusCode.LLM_PARAM_INVALID


def test_b12_errors_of_the_plan_are_value_errors_too(pull: SelfPull) -> None:
    for arguments in ({"dst_cache_offset": 16}, {"src_cache_offset": 4}, {"src_layer_range": range(2, 4)},
                      {"src_layer_range": range(1)}, {"batch_index": 2}):
        caught = pull.refuses(ValueError, **arguments)
        assert isinstance(caught, LLMParamError)


@pytest.mark.parametrize(("arguments", "status"), [
    ({"size": -2}, "LLM_PARAM_INVALID"), ({"src_cache_offset": 4}, "LLM_PARAM_INVALID"),
    ({"cache_key": CacheKeyByIdAndIndex(1, 99)}, "LLM_KV_CACHE_NOT_EXIST"),
    ({"cache_key": CacheKey(7, 1)}, "LLM_NOT_YET_LINK"),
], ids=["argument", "window", "not there", "not linked"])
def test_b12_status_survives_pickling(pull: SelfPull, arguments: dict[str, Any], status: str) -> None:
    error = pull.refuses(LLMException, **arguments)
    twin = pickle.loads(pickle.dumps(error))
    assert isinstance(twin, LLMException)
    assert type(twin) is type(error)
    assert (str(twin), twin.status_code.name) == (str(error), status)


def test_b12_type_errors_survive_pickling(pull: SelfPull) -> None:
    for arguments in ({"size": "8"}, {"cache_key": None}):
        error = pull.refuses(TypeError, **arguments)
        twin = pickle.loads(pickle.dumps(error))
        assert (type(twin), str(twin)) == (type(error), str(error))
