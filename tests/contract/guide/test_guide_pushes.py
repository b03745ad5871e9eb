"""docs/llm_datadist.md, the rows of pushes. The numbers are in the names."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from guide_rows import Own, status_of

from shmkv import LayerSynchronizer, LLMStatusCode, TransferConfig

pytestmark = pytest.mark.timeout(120)


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


def test_t7_finalize_waits_for_a_transfer_so_long_and_no_longer(here: Callable[..., Any]) -> None:
    own = Own(here("PROMPT", 1, enable_switch_role=True, sync_kv_timeout=300))
    asked, computed, ended = threading.Event(), threading.Event(), threading.Event()

    class Late(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            if layer_index == 1:
                asked.set()
                computed.wait(20)
                ended.set()
            return True

    [addresses] = own.dst.per_device_tensor_addrs
    configs = [TransferConfig(1, addresses[:2], range(1)), TransferConfig(1, addresses)]
    task = own.as_prompt().transfer_cache_async(own.src, Late(), configs)
    assert asked.wait(20)
    [first, *_, last] = (tensor.numpy() for tensor in own.dst.tensors)
    began = time.monotonic()
    own.dist.finalize()
    assert time.monotonic() - began >= 0.3
    assert task.get_results() == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ENGINE_FINALIZED]
    computed.set()
    assert ended.wait(20)
    assert task.synchronize(20_000) == LLMStatusCode.LLM_ENGINE_FINALIZED
    assert (first[0] != last[0]).any()
    assert (last.view("u1") == 0x5A).all(), "the layer that came too late was not pushed"
