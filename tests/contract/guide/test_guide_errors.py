"""docs/llm_datadist.md, the rows of errors and values. The numbers are in the names."""
from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
import scripts
from guide_rows import DESC, Own, key, status_of

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    Tensor,
)

pytestmark = pytest.mark.timeout(120)


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
