"""Configs of a push: constructor and setters under the same rules."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmkv.errors import LLMNoneError, LLMParamError
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.transfer_config import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig

BY_ID = CacheKeyByIdAndIndex(2, 3)
BLOCKS = BlocksCacheKey(2)

# field, good values, values out of range, wrong types
RULES: list[tuple[str, list[Any], list[Any], list[Any]]] = [
    ("dst_cluster_id", [0, 2**64 - 1], [-1, 2**64], [None, "123", 1.0, np.uint64(1)]),
    ("dst_addrs", [[], [0, 2**64 - 1], (1, 2)], [[-1], [0, 2**64]], [None, "123", ["123"], [1, None], {1}]),
    (
        "src_layer_range",
        [None, range(1), range(3, 2**20)],
        [range(0, 4, 2), range(4, 0, -1), range(4, 1), range(0), range(-1, 1)],
        [[0, 1], 1, "range"],
    ),
    ("src_batch_index", [0, 2**32 - 1], [-1, 2**32], [None, "1", 1.0]),
]
FLAT = [(name, value, LLMParamError) for name, _, values, _ in RULES for value in values]
FLAT += [(name, value, TypeError) for name, _, _, values in RULES for value in values]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _, _ in RULES for value in good])
def test_transfer_config_reads_back(name: str, value: Any) -> None:
    given: dict[str, Any] = {"dst_cluster_id": 2, "dst_addrs": [1]}
    assert getattr(TransferConfig(**{**given, name: value}), name) == value
    config = TransferConfig(**given)
    setattr(config, name, value)
    assert getattr(config, name) == value


@pytest.mark.parametrize(("name", "value", "error"), FLAT)
def test_transfer_config_refuses(name: str, value: Any, error: type[Exception]) -> None:
    given: dict[str, Any] = {"dst_cluster_id": 2, "dst_addrs": [1]}
    config = TransferConfig(**given)
    before = repr(config)
    with pytest.raises(error, match=name):
        setattr(config, name, value)
    with pytest.raises(error, match=name):
        TransferConfig(**{**given, name: value})
    assert repr(config) == before


def test_transfer_config_has_no_destination_range() -> None:
    config = TransferConfig(2, [1], range(1))
    assert config.dst_layer_range is None
    assert repr(config) == (
        "TransferConfig(dst_cluster_id=2, dst_addrs=[1], src_layer_range=range(0, 1), src_batch_index=0)"
    )


def test_with_key_reads_back_and_follows_its_key() -> None:
    config = TransferWithCacheKeyConfig(BLOCKS, range(2), range(1, 3))
    assert (config.cache_key, config.dst_cluster_id, config.src_batch_index) == (BLOCKS, 2, 0)
    config.cache_key = CacheKeyByIdAndIndex(9, 1)
    config.src_batch_index = 2**32 - 1
    config.src_layer_range, config.dst_layer_range = range(3), range(4, 7)
    config.check_consistent()
    assert (config.dst_cluster_id, config.src_batch_index) == (9, 2**32 - 1)
    assert (config.src_layer_range, config.dst_layer_range) == (range(3), range(4, 7))


def test_with_key_repr() -> None:
    assert repr(TransferWithCacheKeyConfig(BLOCKS, range(1), range(1))) == (
        "TransferWithCacheKeyConfig(cache_key=BlocksCacheKey(cluster_id=2, model_id=0), "
        "src_layer_range=range(0, 1), dst_layer_range=range(0, 1), src_batch_index=0)"
    )


@pytest.mark.parametrize(
    ("key", "src", "dst", "row", "error"),
    [
        (None, range(1), range(1), 0, LLMNoneError),
        (CacheKey(2, 3), range(1), range(1), 0, TypeError),
        (BY_ID, None, range(1), 0, LLMNoneError),
        (BY_ID, range(1), None, 0, LLMNoneError),
        (BY_ID, [0], range(1), 0, TypeError),
        (BY_ID, range(1), range(2), 0, LLMParamError),
        (BY_ID, range(1, 3), range(1, 2), 0, LLMParamError),
        (BY_ID, range(0, 2, 2), range(1), 0, LLMParamError),
        (BY_ID, range(1), range(2, 2), 0, LLMParamError),
        (BY_ID, range(1), range(1), -1, LLMParamError),
        (BY_ID, range(1), range(1), "0", TypeError),
        (BLOCKS, range(1), range(1), 1, LLMParamError),
    ],
)
def test_with_key_refuses(key: Any, src: Any, dst: Any, row: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TransferWithCacheKeyConfig(key, src, dst, row)


def test_with_key_length_compares_the_ranges_themselves() -> None:
    config = TransferWithCacheKeyConfig(BY_ID, range(2, 4), range(2))
    assert config.dst_layer_range == range(2)


def test_with_key_setters_check_their_own_value() -> None:
    config = TransferWithCacheKeyConfig(BLOCKS, range(1), range(1))
    with pytest.raises(LLMParamError, match="src_batch_index"):
        config.src_batch_index = 1
    with pytest.raises(TypeError, match="cache_key"):
        config.cache_key = CacheKey(1, 2)  # type: ignore[assignment]
    for name in ("src_layer_range", "dst_layer_range"):
        with pytest.raises(LLMParamError, match=name):
            setattr(config, name, range(0))
        with pytest.raises(TypeError, match=name):
            setattr(config, name, [0])


def test_with_key_inconsistency_between_setters_is_found_at_use() -> None:
    config = TransferWithCacheKeyConfig(BY_ID, range(1), range(1), 1)
    config.src_layer_range = range(2)
    with pytest.raises(LLMParamError, match="equally long"):
        config.check_consistent()
    config.src_layer_range = None
    with pytest.raises(LLMNoneError, match="src_layer_range"):
        config.check_consistent()
    config.src_layer_range = range(1)
    config.cache_key = BLOCKS
    with pytest.raises(LLMParamError, match="src_batch_index"):
        config.check_consistent()


def test_layer_synchronizer_has_to_be_subclassed() -> None:
    with pytest.raises(TypeError):
        LayerSynchronizer()  # type: ignore[abstract]

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return layer_index == 0 and timeout_in_millis is None

    assert Ready().synchronize_layer(0, None)
