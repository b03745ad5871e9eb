"""docs/llm_datadist.md says what answers otherwise than in llm_datadist: each row of it, tried. The numbers are in the names."""
from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cache_bytes
import numpy as np
import pytest
import scripts
from guide_rows import DESC, ROWS, TRIED, U64MAX, Own, key
from peer import Namespace, StartPeer, prefix, req

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    Tensor,
    TransferConfig,
)

pytestmark = pytest.mark.timeout(120)
Here = Callable[..., Any]


@pytest.fixture
def own(here: Here) -> Own:
    return Own(here("PROMPT", 1, enable_switch_role=True))


def status_of(call: Callable[[], Any]) -> LLMStatusCode:
    with pytest.raises(LLMException) as caught:
        call()
    return caught.value.status_code


def test_each_row_has_its_test() -> None:
    assert TRIED == ROWS
    assert len(ROWS) > 60


# -- errors ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [ValueError, RuntimeError, LLMException, LLMParamError])
def test_e1_a_wrong_value_is_caught_by_all_of_its_names(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        CacheDesc(-1, [1], DataType.DT_INT8)
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID      # type: ignore[attr-defined]


def test_e2_an_error_does_not_say_success() -> None:
    assert LLMException("text").status_code == LLMStatusCode.LLM_FAILED
    assert status_of(lambda: CacheDesc(1, [0, 4], DataType.DT_INT8).size) == LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("call", [
    lambda own: LLMDataDist(None, 0), lambda own: BlocksCacheKey(None), lambda own: CacheDesc(1, [1], None),
    lambda own: own.manager.pull_cache(None, own.dst), lambda own: own.manager.pull_cache(key(7), None),
    lambda own: own.manager.swap_blocks(None, own.dst, {}), lambda own: own.manager.deallocate_cache(None),
    lambda own: own.dist.link_clusters(None), lambda own: own.dist.unlink_clusters([], force=None),
    lambda own: LLMClusterInfo().append_local_ip_info(None, 1)])
def test_e3_none_is_a_type_and_an_attribute_error(own: Own, call: Callable[[Own], Any]) -> None:
    with pytest.raises(TypeError) as caught:
        call(own)
    assert isinstance(caught.value, AttributeError)


@pytest.mark.parametrize("call", ["pull_cache", "pull_blocks"])
def test_e4_an_unknown_keyword_is_named(own: Own, call: str) -> None:
    arguments = {"pull_cache": (key(7), own.dst), "pull_blocks": (BlocksCacheKey(1), own.dst, [0], [0])}[call]
    with pytest.raises(TypeError, match="src_offset"):
        getattr(own.manager, call)(*arguments, src_offset=4)
    assert own.is_untouched()


def test_e5_before_init_and_after_finalize(own: Own) -> None:
    fresh = LLMDataDist(LLMRole.PROMPT, 5)
    with pytest.raises(RuntimeError):
        fresh.link_clusters([])
    assert status_of(lambda: fresh.kv_cache_manager) == LLMStatusCode.LLM_FAILED
    own.dist.finalize()
    assert not own.manager.is_initialized()
    for call in (lambda: own.manager.pull_cache(key(7), own.dst), lambda: own.manager.allocate_cache(DESC),
                 lambda: own.manager.deallocate_cache(own.dst)):
        assert status_of(call) == LLMStatusCode.LLM_ENGINE_FINALIZED


def test_e6_nothing_is_printed(own: Own, capfd: pytest.CaptureFixture[str]) -> None:
    for call in (lambda: own.manager.pull_cache(key(99), own.dst), lambda: own.manager.pull_cache(key(7), own.dst, size=-2)):
        status_of(call)
    own.dist.link_clusters([], 100)
    assert capfd.readouterr() == ("", "")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("shmkv").handlers)


def test_e7_importing_sets_no_environment_variable() -> None:
    code = "import os\nbefore = dict(os.environ)\nimport shmkv\nshmkv.install_as_llm_datadist()\nimport llm_datadist\n" \
           "print(dict(os.environ) == before)"
    assert scripts.run(code) == "True\n"


def test_e8_errors_keep_their_status_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(LLMException("text {0}", status_code=LLMStatusCode.LLM_LINK_BUSY)))
    assert (str(error), error.status_code) == ("text {0}", LLMStatusCode.LLM_LINK_BUSY)


# -- values ------------------------------------------------------------------------------------------------------------

def test_v1_update_dim_changes_what_follows_and_not_what_is_allocated(own: Own) -> None:
    desc = CacheDesc(2, [3, 4], DataType.DT_INT8)
    cache = own.manager.allocate_cache(desc)
    desc.update_dim(0, 5)
    assert (desc.batch_size, desc.size, desc.shape) == (5, 20, [5, 4])
    assert (cache.cache_desc.batch_size, cache.tensors[0].shape) == (3, (3, 4))


def test_v2_keys_are_values() -> None:
    assert CacheKey(1, 2) == CacheKey(cluster_id=1, req_id=2, model_id=0)
    assert len({BlocksCacheKey(3), BlocksCacheKey(prompt_cluster_id=3), BlocksCacheKey(4)}) == 2
    assert CacheKeyByIdAndIndex(1, 2) == CacheKeyByIdAndIndex(1, 2, 0) != CacheKeyByIdAndIndex(2, 2, 0)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_v3_blocks_keys_are_checked(number: int) -> None:
    for arguments in ({"cluster_id": number}, {"cluster_id": 1, "model_id": number}):
        with pytest.raises(LLMParamError):
            BlocksCacheKey(**arguments)


def test_v4_twice_given_is_refused() -> None:
    with pytest.raises(LLMParamError, match="by position and by keyword"):
        CacheKey(1, 2, cluster_id=1)
    with pytest.raises(LLMParamError, match="by position and by keyword"):
        BlocksCacheKey(1, cluster_id=1)


def test_v5_float16_tensors_keep_their_shape_and_copy() -> None:
    source = np.arange(6, dtype=np.float16).reshape(2, 3)
    tensor = Tensor(source)
    copied, shared = tensor.numpy(copy=True), tensor.numpy()
    assert copied.shape == shared.shape == (2, 3)
    copied[0, 0] = 9
    assert shared[0, 0] == 0
    assert not shared.flags.writeable


def test_v6_tensors_of_a_cache_are_live_and_read_only(own: Own) -> None:
    [tensor] = own.manager.get_cache_tensors(own.dst, 1)
    before = tensor.numpy()
    own.dst.tensors[1].numpy()[:] = 2.5
    assert (before == 2.5).all()
    assert not before.flags.writeable


def test_v7_options_are_what_is_set_now() -> None:
    config = LLMConfig()
    config.listen_ip_info = "127.0.0.1:1"
    assert "llm.listenIpInfo" in config.generate_options()
    config.listen_ip_info = ""
    assert "llm.listenIpInfo" not in config.generate_options()


def test_v8_fresh_memory_is_zero_and_so_is_cleared_memory(own: Own) -> None:
    odd = CacheDesc(3, [1, 12345], DataType.DT_INT8)
    cache = own.manager.allocate_cache(odd)
    assert not cache_bytes.read(cache).any()
    own.filled(cache)
    own.manager.deallocate_cache(cache)
    assert not cache_bytes.read(own.manager.allocate_cache(odd, zero=True)).any()


# -- pulls and copies --------------------------------------------------------------------------------------------------

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


# -- keys and memory ---------------------------------------------------------------------------------------------------

def test_k1_padding_and_blocks_keys_do_not_meet(own: Own) -> None:
    manager, padding = own.as_prompt(), CacheKey(1, U64MAX, prefix_id=U64MAX)
    blocks = own.filled(manager.allocate_blocks_cache(CacheDesc(1, [2, 4], DataType.DT_INT8), BlocksCacheKey(1)))
    padded = manager.allocate_cache(DESC, [padding, padding])
    manager.remove_cache_key(padding)
    target = own.as_decoder().allocate_blocks_cache(blocks.cache_desc)
    own.manager.pull_blocks(BlocksCacheKey(1), target, [0], [1])
    assert target.tensors[0].numpy()[1].tobytes() == blocks.tensors[0].numpy()[0].tobytes()
    assert status_of(lambda: own.manager.pull_cache(padding, own.dst)) == LLMStatusCode.LLM_PARAM_INVALID
    assert padded.cache_id > 0


def test_k2_every_key_of_a_list_stands_for_itself(own: Own) -> None:
    cache = own.filled(own.as_prompt().allocate_cache(DESC, [key(1, model_id=5), CacheKey(1, U64MAX, 6, 3)]), seed=6)
    manager = own.as_decoder()
    manager.pull_cache(key(1, model_id=5), own.dst, 0)
    manager.pull_cache(CacheKey(1, U64MAX, 6, 3), own.dst, 1)
    assert own.has(0, 0, cache)
    assert own.has(1, 1, cache)


def test_k3_more_keys_than_rows(own: Own) -> None:
    manager = own.as_prompt()
    assert status_of(lambda: manager.allocate_cache(DESC, [key(1), key(2), key(3)])) == LLMStatusCode.LLM_PARAM_INVALID


def test_k4_a_bound_key_is_refused_and_no_cache_made(own: Own) -> None:
    manager = own.as_prompt()
    caches = manager.stats()["caches"]
    assert status_of(lambda: manager.allocate_cache(DESC, [key(1), key(7)])) == LLMStatusCode.LLM_PARAM_INVALID
    assert manager.stats()["caches"] == caches
    manager.allocate_cache(DESC, [key(1)])


def test_k5_a_key_of_two_kinds(own: Own) -> None:
    manager = own.as_prompt()
    assert status_of(lambda: manager.allocate_cache(DESC, [CacheKey(1, 2, 0, 3)])) == LLMStatusCode.LLM_PARAM_INVALID


def test_k6_deallocating_twice(own: Own) -> None:
    own.manager.deallocate_cache(own.src)
    own.manager.deallocate_cache(own.src)
    assert own.src.per_device_tensor_addrs == []
    own.manager.pull_cache(key(7), own.dst)         # by its key it lives on


def test_k7_a_crashed_process(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2)
    source.call("allocate", name="kv", keys=[req(1, 7)])
    target.call("allocate", name="kv")
    left = namespace.segments()
    source.kill()
    answer = target.attempt("pull", key=req(1, 7), name="kv")
    assert answer.outcome == "LLM_WAIT_PROCESS_TIMEOUT"
    assert answer.ms < 10_000                       # of 20 s
    assert left <= namespace.segments()
    prompt(3)
    assert len(namespace.segments()) == len(left) - 1


def test_k8_a_forked_child(own: Own) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own.manager.pull_cache(key(7), own.dst)
        except LLMException as error:
            os.write(writer, error.status_code.name.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        assert answers.read() == b"LLM_FAILED"
    os.waitpid(child, 0)
    own.manager.pull_cache(key(7), own.dst)
    assert own.has(0, 0)


# -- pushes ------------------------------------------------------------------------------------------------------------

class Computed(LayerSynchronizer):
    """All layers are there, but for those that raise."""

    def __init__(self, raises: tuple[int, ...] = ()) -> None:
        self.raises = raises

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        if layer_index in self.raises:
            raise RuntimeError("cannot be computed")
        return True


@pytest.fixture
def pushing(own: Own) -> Callable[..., list[Any]]:
    """pushing(configs, synchronizer): the results of a push from `src` within the own cluster."""
    manager = own.as_prompt()

    def push(configs: list[TransferConfig], synchronizer: LayerSynchronizer | None = None, **blocks: Any) -> list[Any]:
        task = manager.transfer_cache_async(own.src, synchronizer or Computed(), configs, **blocks)
        assert task.synchronize(20_000) in (*(result for result in task.get_results() if result), LLMStatusCode.LLM_SUCCESS)
        return list(task.get_results())

    return push


def test_t1_a_synchronizer_that_raises(own: Own, pushing: Any, caplog: pytest.LogCaptureFixture) -> None:
    [addresses] = own.dst.per_device_tensor_addrs
    assert pushing([TransferConfig(1, addresses)], Computed(raises=(1,))) == [LLMStatusCode.LLM_FAILED]
    assert "cannot be computed" in caplog.text


def test_t2_configs_for_one_cluster_have_results_of_their_own(own: Own, pushing: Any) -> None:
    [addresses] = own.dst.per_device_tensor_addrs
    configs = [TransferConfig(1, addresses[:2], range(1)), TransferConfig(1, [1, 2], range(1, 2))]
    assert pushing(configs) == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID]


def test_t3_a_config_stays_as_it_was(own: Own, pushing: Any) -> None:
    config = TransferConfig(1, own.dst.per_device_tensor_addrs[0])
    assert pushing([config]) == [LLMStatusCode.LLM_SUCCESS]
    assert config.src_layer_range is None
    assert own.has(0, 0)


@pytest.mark.parametrize("shift", [-1, 17, 1 << 40])
def test_t4_addresses_are_not_trusted(own: Own, pushing: Any, shift: int) -> None:
    addresses = list(own.dst.per_device_tensor_addrs[0])
    addresses[3] += shift
    assert pushing([TransferConfig(1, addresses)]) == [LLMStatusCode.LLM_PARAM_INVALID]
    assert own.is_untouched()


@pytest.mark.parametrize("blocks", [([0, 2], [0, 1]), ([0, 1], [0, 2])])
def test_t5_all_blocks_are_looked_at(own: Own, pushing: Any, blocks: tuple[list[int], list[int]]) -> None:
    config = TransferConfig(1, own.dst.per_device_tensor_addrs[0])
    assert pushing([config], src_block_indices=blocks[0], dst_block_indices=blocks[1]) == [LLMStatusCode.LLM_PARAM_INVALID]
    assert own.is_untouched()


def test_t6_no_blocks_are_not_a_row(own: Own, pushing: Any) -> None:
    config = TransferConfig(1, own.dst.per_device_tensor_addrs[0])
    assert status_of(lambda: pushing([config], dst_block_indices=[])) == LLMStatusCode.LLM_PARAM_INVALID
    assert own.is_untouched()


# -- init, links and roles ---------------------------------------------------------------------------------------------

def cluster(cluster_id: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("10.1.2.3", 1)
    info.append_remote_ip_info("10.1.2.4", 2)
    return info


@pytest.fixture
def fresh(namespace: Namespace) -> Iterator[LLMDataDist]:
    """A prompt that is not initialised."""
    dist = LLMDataDist(LLMRole.PROMPT, 4)
    yield dist
    dist.finalize()


def test_l1_two_entries_in_the_callers_dict_and_no_file(fresh: LLMDataDist, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    options: dict[str, str] = {}
    fresh.init(options)
    assert options == {"llm.Role": "Prompt", "llm.ClusterInfo": '{"cluster_id": 4}'}
    assert list((tmp_path / "empty").iterdir()) == []


def test_l2_neither_device_nor_address_is_needed(fresh: LLMDataDist) -> None:
    fresh.init({})
    assert fresh.kv_cache_manager.allocate_cache(DESC).cache_id == 1


@pytest.mark.parametrize("text", ["nothing", "127.0.0.1", "127.0.0.1:70000"])
def test_l3_the_form_of_an_address_is_checked(fresh: LLMDataDist, text: str) -> None:
    assert status_of(lambda: fresh.init({"llm.listenIpInfo": text})) == LLMStatusCode.LLM_PARAM_INVALID


def test_l4_flow_graph_memory_is_no_limit(fresh: LLMDataDist) -> None:
    for text in ("1,2", "-1", "1.5"):
        assert status_of(lambda text=text: fresh.init({"ge.flowGraphMemMaxSize": text})) == LLMStatusCode.LLM_PARAM_INVALID
    fresh.init({"ge.flowGraphMemMaxSize": "10"})
    fresh.kv_cache_manager.allocate_cache(DESC)


def test_l5_devices_act_as_one(fresh: LLMDataDist) -> None:
    config = LLMConfig()
    config.device_id = [0, 1, 2]
    fresh.init(config.generate_options())
    cache = fresh.kv_cache_manager.allocate_cache(DESC)
    assert [len(addresses) for addresses in cache.per_device_tensor_addrs] == [4]
    assert len(fresh.kv_cache_manager.get_cache_tensors(cache)) == 1


def test_l6_an_id_that_is_in_use(fresh: LLMDataDist, prompt: StartPeer) -> None:
    other = prompt(4)
    assert status_of(lambda: fresh.init({})) == LLMStatusCode.LLM_FAILED
    other.kill()
    fresh.init({})


def test_l7_addresses_are_not_used(prompt: StartPeer, here: Here) -> None:
    prompt(1)
    done = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    assert here("DECODER", 2).link_clusters([cluster(1)], 10_000) == done


def test_l8_a_link_call_waits_milliseconds_for_another_one(here: Here) -> None:
    dist = here("DECODER", 2)
    first = threading.Thread(target=dist.link_clusters, args=([cluster(9)], 3000))
    first.start()
    status = LLMStatusCode.LLM_SUCCESS
    while first.is_alive() and status != LLMStatusCode.LLM_PROCESSING_LINK:     # until the other call has begun
        status, _ = dist.link_clusters([cluster(9)], 1)
    begin = time.monotonic()
    status, _ = dist.link_clusters([cluster(9)], 200)
    assert status == LLMStatusCode.LLM_PROCESSING_LINK
    assert time.monotonic() - begin >= 0.2
    first.join()


def test_l9_peers_that_cannot_be_linked(here: Here, namespace: Namespace) -> None:
    namespace.start_cluster("DECODER", 3)
    dist = here("DECODER", 2)
    assert dist.link_clusters([cluster(3)], 5000)[1] == [LLMStatusCode.LLM_LINK_FAILED]
    assert dist.link_clusters([cluster(9)], 50)[1] == [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT]


def test_l10_unlinking_the_dead(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2)
    source.kill()
    assert target.call("unlink", ids=[1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]


def test_l11_a_successor_of_a_dead_peer_needs_a_new_link(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2)
    target.call("allocate", name="kv")
    source.kill()
    prompt(1).call("allocate", name="kv", keys=[prefix(1, 3)])
    answer = target.attempt("pull", key=prefix(1, 3), name="kv")
    assert answer.outcome == "LLM_WAIT_PROCESS_TIMEOUT"
    assert answer.ms < 10_000
    target.call("unlink", ids=[1])
    target.call("link", ids=[1])
    target.call("pull", key=prefix(1, 3), name="kv")


@pytest.mark.parametrize(("options", "error"), [(None, TypeError), ({}, LLMParamError)])
def test_l12_a_prompt_needs_listen_ip_info(own: Own, options: dict[str, str] | None, error: type[Exception]) -> None:
    with pytest.raises(error, match="listenIpInfo"):
        own.dist.switch_role(LLMRole.PROMPT, options)


def test_l13_an_address_that_is_none() -> None:
    with pytest.raises(RuntimeError) as caught:
        LLMClusterInfo().append_local_ip_info("300.1.1.1", 1)
    assert isinstance(caught.value, LLMParamError)


def test_the_command_of_the_page_says_what_it_does() -> None:
    done = subprocess.run([sys.executable, "-m", "shmkv", "run", "--help"], capture_output=True, text=True, timeout=60)
    assert "--stub-npu" in done.stdout
