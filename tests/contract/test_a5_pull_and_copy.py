"""Contract, appendix A5, items 1 and 2: pull and copy of contiguous caches, here inside one process."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from reference import canary, noise

from shmkv import (
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    Placement,
)

pytestmark = pytest.mark.timeout(60)
Here = Callable[..., Any]
DESC = CacheDesc(4, [2, 8], DataType.DT_FLOAT16)


@pytest.fixture
def pulling(here: Here) -> tuple[Any, KvCache, KvCache]:
    """A manager that became a decoder after binding CacheKey(1, 1) to row 0; that cache; a destination."""
    dist = here("PROMPT", 1, enable_switch_role=True)
    manager = dist.kv_cache_manager
    src, dst = manager.allocate_cache(DESC, [CacheKey(1, 1)]), manager.allocate_cache(DESC)
    cache_bytes.write(src, noise(cache_bytes.geometry_of(src), seed=3))
    cache_bytes.write(dst, canary(cache_bytes.geometry_of(dst)))
    dist.switch_role(LLMRole.DECODER)
    return manager, src, dst


def test_a5_1_size_below_minus_one(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, _, dst = pulling
    with pytest.raises(LLMException) as refusal:
        manager.pull_cache(CacheKey(1, 1), dst, size=-2)
    assert refusal.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert (cache_bytes.read(dst) == 0x5A).all()


def test_a5_1_pull_with_offsets_of_zero_does_not_consume(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, dst = pulling
    manager.pull_cache(CacheKey(1, 1), dst, 0, src_cache_offset=0, dst_cache_offset=0)
    manager.pull_cache(CacheKeyByIdAndIndex(1, src.cache_id, 0), dst, 1)
    wanted = cache_bytes.read(src)[:, :, 0]
    np.testing.assert_array_equal(cache_bytes.read(dst)[:, :, 0], wanted)
    np.testing.assert_array_equal(cache_bytes.read(dst)[:, :, 1], wanted)
    with pytest.raises(LLMException) as refusal:
        manager.pull_cache(CacheKey(1, 1), dst)
    assert refusal.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_a5_2_copy_cache_with_defaults(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, dst = pulling
    manager.copy_cache(dst, src)
    np.testing.assert_array_equal(cache_bytes.read(dst)[:, :, 0], cache_bytes.read(src)[:, :, 0])
    assert (cache_bytes.read(dst)[:, :, 1] == 0x5A).all()


def test_a5_2_copy_cache_between_rows_with_one_offset(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, dst = pulling
    manager.copy_cache(dst, src, 1, 0, offset=4, size=6, req_id=17)
    after = cache_bytes.read(dst)
    np.testing.assert_array_equal(after[:, 0, 1, 4:10], cache_bytes.read(src)[:, 0, 0, 4:10])
    assert (after[:, :, 0] == 0x5A).all()
    assert (after[:, 0, 1, :4] == 0x5A).all()
    assert (after[:, 0, 1, 10:] == 0x5A).all()


def test_a5_2_copy_cache_onto_itself(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, _ = pulling
    before = cache_bytes.read(src)
    manager.copy_cache(src, src, 1, 0)
    np.testing.assert_array_equal(cache_bytes.read(src)[:, :, 1], before[:, :, 0])


@pytest.mark.parametrize("arguments", [
    {"size": -2}, {"size": 0}, {"size": 17}, {"offset": 16}, {"offset": 8, "size": 9}, {"offset": -1},
    {"dst_batch_index": 2}, {"src_batch_index": 2}, {"src_batch_index": -1}, {"dst_batch_index": 2**32},
    {"offset": 2**63, "size": 2**63 - 1}, {"offset": 2**64 - 1}, {"offset": 2**64},
], ids=str)
def test_a5_2_copy_cache_outside_the_rows(pulling: tuple[Any, KvCache, KvCache],
                                          arguments: dict[str, Any]) -> None:
    manager, src, dst = pulling
    with pytest.raises(LLMParamError):
        manager.copy_cache(dst, src, **arguments)
    assert (cache_bytes.read(dst) == 0x5A).all()


@pytest.mark.parametrize("arguments", [
    {"size": "8"}, {"size": None}, {"offset": 0.0}, {"dst_batch_index": "0"}, {"src_batch_index": None},
    {"req_id": "1"}, {"size": np.int64(8)},
], ids=str)
def test_a5_2_copy_cache_with_wrong_types(pulling: tuple[Any, KvCache, KvCache],
                                          arguments: dict[str, Any]) -> None:
    manager, src, dst = pulling
    with pytest.raises(TypeError):
        manager.copy_cache(dst, src, **arguments)
    assert (cache_bytes.read(dst) == 0x5A).all()


def test_a5_2_copy_cache_wants_two_like_device_caches(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, dst = pulling
    shorter = manager.allocate_cache(CacheDesc(3, [2, 8], DataType.DT_FLOAT16))
    host = KvCache.create_cpu_cache(CacheDesc(4, [2, 8], DataType.DT_FLOAT16, Placement.HOST), [64] * 4)
    for one, other in ((dst, shorter), (shorter, src), (host, src), (dst, host)):
        with pytest.raises(LLMParamError):
            manager.copy_cache(one, other)
    for nothing in (None, "cache"):
        with pytest.raises(TypeError):
            manager.copy_cache(nothing, src)
        with pytest.raises(TypeError):
            manager.copy_cache(dst, nothing)
    assert (cache_bytes.read(dst) == 0x5A).all()
