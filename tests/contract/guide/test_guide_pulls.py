"""docs/llm_datadist.md, the rows of pulls and copies. The numbers are in the names."""
from __future__ import annotations

import cache_bytes
import numpy as np
import pytest
from guide_rows import DESC, U64MAX, Own, key, status_of
from peer import StartPeer, req

from shmkv import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("side", ["src_layer_range", "dst_layer_range"])
def test_p1_an_empty_range_is_refused(own: Own, side: str) -> None:
    assert status_of(lambda: own.manager.pull_cache(key(7), own.dst, **{side: range(2, 2)})) == LLMStatusCode.LLM_PARAM_INVALID
    assert own.is_untouched()


@pytest.mark.parametrize("options", [
    {"src_layer_range": range(0, 2, 2), "dst_layer_range": range(0, 2, 2)},
    {"src_layer_range": range(3), "dst_layer_range": range(3)},
    {"src_layer_range": range(1), "dst_layer_range": range(2)}, {"dst_layer_range": range(2, 3), "src_layer_range": range(1)},
    {"src_layer_range": range(-1, 1), "dst_layer_range": range(2)}])
def test_p2_ranges_are_checked_first(own: Own, options: dict[str, range]) -> None:
    assert status_of(lambda: own.manager.pull_cache(key(7), own.dst, **options)) == LLMStatusCode.LLM_PARAM_INVALID
    assert own.is_untouched()
    own.manager.pull_cache(key(7), own.dst)
    assert own.has(0, 0)


@pytest.mark.parametrize(("number", "ranges", "is_taken"), [
    (2, {}, True), (4, {}, True), (3, {}, True), (5, {}, False),
    (1, {"src_layer_range": range(4), "dst_layer_range": range(4)}, True),
    (3, {"src_layer_range": range(1), "dst_layer_range": range(1)}, False),
    (4, {"src_layer_range": range(1), "dst_layer_range": range(1)}, True)])
def test_p3_tensors_of_a_layer(own: Own, number: int, ranges: dict[str, range], is_taken: bool) -> None:
    def pull() -> None:
        own.manager.pull_cache(key(7), own.dst, tensor_num_per_layer=number, **ranges)

    if is_taken:
        pull()
        assert own.has(0, 0)
    else:
        assert status_of(pull) == LLMStatusCode.LLM_PARAM_INVALID


def test_p3_two_is_taken_for_an_odd_number_of_tensors(own: Own) -> None:
    odd = CacheDesc(5, [1, 8], DataType.DT_INT8)
    source = own.filled(own.manager.allocate_cache(odd))
    target = own.manager.allocate_cache(odd)
    own.manager.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id), target, src_layer_range=range(1, 2), dst_layer_range=range(1))
    np.testing.assert_array_equal(cache_bytes.read(target)[:2], cache_bytes.read(source)[2:4])


def test_p4_a_failed_pull_keeps_the_key(own: Own) -> None:
    small = own.manager.allocate_cache(CacheDesc(4, [1, 4], DataType.DT_FLOAT16))
    other = own.manager.allocate_cache(CacheDesc(2, [1, 8], DataType.DT_FLOAT16))
    for options in ({"src_cache_offset": 12}, {"size": 100}):
        assert status_of(lambda options=options: own.manager.pull_cache(key(7), own.dst, **options)) \
            == LLMStatusCode.LLM_PARAM_INVALID
    assert status_of(lambda: own.manager.pull_cache(key(7), other)) == LLMStatusCode.LLM_PARAM_INVALID
    assert status_of(lambda: own.manager.pull_cache(key(7), small, size=16)) == LLMStatusCode.LLM_PARAM_INVALID
    own.manager.pull_cache(key(7), own.dst)
    assert status_of(lambda: own.manager.pull_cache(key(7), own.dst)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_p5_a_row_with_a_prefix_key_by_id(own: Own) -> None:
    shared = CacheKey(1, U64MAX, prefix_id=4)
    cache = own.filled(own.as_prompt().allocate_cache(DESC, [shared]), seed=8)
    manager = own.as_decoder()
    for _ in range(2):
        manager.pull_cache(CacheKeyByIdAndIndex(1, cache.cache_id, 0), own.dst)
        assert own.has(0, 0, cache)
    manager.pull_cache(shared, own.dst, 1)
    assert own.has(1, 0, cache)


def test_p6_rows_are_those_of_batch_dim_index(own: Own) -> None:
    across = own.filled(own.manager.allocate_cache(CacheDesc(4, [4, 3, 2], DataType.DT_FLOAT16, batch_dim_index=1)), seed=2)
    own.manager.pull_cache(CacheKeyByIdAndIndex(1, across.cache_id, 2), own.dst, 1)
    for number, tensor in enumerate(own.dst.tensors):
        assert tensor.numpy()[1].tobytes() == np.ascontiguousarray(across.tensors[number].numpy()[:, 2]).tobytes()


@pytest.mark.parametrize("offset", [16, 17, 2**62])
def test_p7_an_offset_at_the_end_of_the_row(own: Own, offset: int) -> None:
    assert status_of(lambda: own.manager.pull_cache(key(7), own.dst, dst_cache_offset=offset)) == LLMStatusCode.LLM_PARAM_INVALID
    assert own.is_untouched()


def test_p8_threads_pull_side_by_side(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2)
    source.call("allocate", name="kv", shape=(8, 64), keys=[req(1, number) for number in range(8)])
    source.call("noise", name="kv", seed=4)
    target.call("allocate", name="kv", shape=(8, 64))
    batches = [[("pull", {"key": req(1, row), "name": "kv", "batch_index": row})] for row in range(8)]
    assert [answer.outcome for [answer] in target.parallel(batches)] == ["LLM_SUCCESS"] * 8
    np.testing.assert_array_equal(target.read("kv"), source.read("kv"))


def test_p9_a_timeout_leaves_link_and_key(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2, sync_kv_timeout=1, env={"SHMKV_COPY_THREADS": "1"})
    big = {"shape": (1, 1 << 25), "dtype": "DT_INT8", "num_tensors": 4}
    source.call("allocate", name="kv", keys=[req(1, 7)], **big)
    target.call("allocate", name="kv", **big)
    assert target.outcome("pull", key=req(1, 7), name="kv") == "LLM_WAIT_PROCESS_TIMEOUT"
    target.call("check_link", cluster_id=1)
    source.call("noise", name="kv", seed=2)
    other = decoder(3)
    other.call("allocate", name="kv", **big)
    other.call("pull", key=req(1, 7), name="kv")


def test_p10_the_own_cluster_needs_no_link(own: Own) -> None:
    own.manager.pull_cache(key(8), own.dst)
    assert own.has(0, 1)


@pytest.mark.parametrize(("shape", "source", "target"), [([4, 8], [0], [0]), ([4, 16], [-1], [0]), ([4, 16], [0], [-1])])
def test_p11_blocks_are_alike_and_numbers_checked(own: Own, shape: list[int], source: list[int], target: list[int]) -> None:
    kept = own.as_prompt().allocate_blocks_cache(CacheDesc(2, [4, 16], DataType.DT_INT8), BlocksCacheKey(1))
    cache = own.as_decoder().allocate_blocks_cache(CacheDesc(2, shape, DataType.DT_INT8))
    assert status_of(lambda: own.manager.pull_blocks(BlocksCacheKey(1), cache, source, target)) == LLMStatusCode.LLM_PARAM_INVALID
    own.manager.pull_blocks(BlocksCacheKey(1), own.manager.allocate_blocks_cache(kept.cache_desc), [3], [0])


def test_p12_copy_blocks_looks_first(own: Own) -> None:
    cache = own.filled(own.manager.allocate_blocks_cache(CacheDesc(2, [4, 16], DataType.DT_INT8)))
    before = cache_bytes.read(cache)
    assert status_of(lambda: own.manager.copy_blocks(cache, {0: [1], 2: [4]})) == LLMStatusCode.LLM_PARAM_INVALID
    np.testing.assert_array_equal(cache_bytes.read(cache), before)


def test_p13_a_row_into_blocks(own: Own) -> None:
    cache = own.manager.allocate_blocks_cache(CacheDesc(4, [4, 4], DataType.DT_FLOAT16))
    own.manager.pull_blocks(key(7), cache, [], [3, 1])
    for number, tensor in enumerate(cache.tensors):
        assert tensor.numpy()[[3, 1]].tobytes() == own.src.tensors[number].numpy()[0].tobytes()
