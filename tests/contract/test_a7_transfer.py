"""Contract, appendix A7: transfer_cache_async between real processes. Item 7 is of the second generation of the API."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Answer, Peer, StartPeer

pytestmark = pytest.mark.timeout(60)
OK, INVALID, TIMEOUT = "LLM_SUCCESS", "LLM_PARAM_INVALID", "LLM_WAIT_PROCESS_TIMEOUT"
TENSORS, SHAPE = 10, (2, 16)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """A prompt with 10 tensors, a linked decoder with as many."""
    source, target = prompt(), decoder()
    source.call("allocate", name="src", num_tensors=TENSORS, shape=SHAPE)
    source.call("noise", name="src", seed=7)
    source.call("listen")
    target.call("allocate", name="dst", num_tensors=TENSORS, shape=SHAPE)
    target.call("canary", name="dst")
    return source, target


def config(target: Peer, layers: range | None, row: int = 0) -> list[Any]:
    addresses = target.call("addresses", name="dst")
    chosen = range(TENSORS // 2) if layers is None else layers
    return [2, addresses[2 * chosen.start:2 * chosen.stop], layers, row]


def test_a7_1_waits_that_are_too_short_and_the_end(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("push", name="src", configs=[config(target, range(2)), config(target, range(2, 3))], slow=[0])
    assert source.call("synchronize", timeout=0) == TIMEOUT
    assert source.call("results", timeout=0) == [TIMEOUT, TIMEOUT]
    source.call("computed", layer=0)
    assert source.call("synchronize", timeout=20000) == OK
    assert source.call("results", timeout=0) == [OK, OK]
    assert source.call("asked") == [[0, None], [1, None], [2, None]]
    wanted, found = source.read("src"), target.read("dst")
    np.testing.assert_array_equal(found[:6, :, 0], wanted[:6, :, 0])
    assert (found[6:] == 0x5A).all()
    assert (found[:, :, 1] == 0x5A).all()


def test_a7_1_configs_may_be_a_tuple(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    addresses = target.call("addresses", name="dst")
    code = f"""
class Ready(shmkv.LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        return True
config = shmkv.TransferConfig(2, tuple({addresses}))
task = agent.dist.kv_cache_manager.transfer_cache_async(agent.caches["src"], Ready(), (config, config))
result = [task.synchronize().name, [each.name for each in task.get_results()], repr(config)]
"""
    status, results, shown = source.call("execute", code=code)
    assert (status, results) == (OK, [OK, OK])
    assert "src_layer_range=None" in shown              # the range that was not given is not written into the caller's config


def test_a7_2_a_config_without_a_range_covers_all_layers(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("push", name="src", configs=[config(target, None, 1)])
    assert source.call("synchronize") == OK
    np.testing.assert_array_equal(target.read("dst")[:, :, 0], source.read("src")[:, :, 1])
    assert [layer for layer, _ in source.call("asked")] == list(range(5))


@pytest.mark.parametrize("nbytes", [32, 0, None])
def test_a7_2_blocks(pair: tuple[Peer, Peer], nbytes: int | None) -> None:
    source, target = pair
    source.call("push", name="src", configs=[config(target, None)], src_block_indices=[0, 1], dst_block_indices=[0, 1],
                dst_block_memory_size=nbytes)
    assert source.call("synchronize") == OK
    np.testing.assert_array_equal(target.read("dst"), source.read("src"))


def test_a7_3_a_synchronizer_that_says_no(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    configs = [config(target, range(2)), config(target, range(2, 3)), config(target, range(1))]
    source.call("push", name="src", configs=configs, fails=[1])
    assert source.call("synchronize") == INVALID
    assert source.call("results") == [INVALID, None, OK]
    assert [layer for layer, _ in source.call("asked")] == [0, 1]
    assert (target.read("dst")[2:] == 0x5A).all()


def test_a7_4_a_status_of_one_config_ends_the_others(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    unlinked = [77, *config(target, range(2))[1:]]
    source.call("push", name="src", configs=[unlinked, config(target, range(2, 3))])
    assert source.call("results") == ["LLM_NOT_YET_LINK", None]
    assert source.call("synchronize") == "LLM_NOT_YET_LINK"


LISTS: list[tuple[dict[str, Any], str, str]] = [
    ({"src_block_indices": [0]}, "LLMException", "transfer from blocks to cache is not supported"),
    ({"src_block_indices": [0], "dst_block_indices": []}, "LLMException", "transfer from blocks to cache is not supported"),
    ({"src_block_indices": [0, 1], "dst_block_indices": [0, "1"]}, "TypeError", "dst_block_indices"),
    ({"src_block_indices": [0, "1"], "dst_block_indices": [0, 1]}, "TypeError", "src_block_indices"),
    ({"src_block_indices": [-1], "dst_block_indices": [0]}, "ValueError", "src_block_indices"),
    ({"src_block_indices": [0], "dst_block_indices": [-1]}, "ValueError", "dst_block_indices"),
    ({"src_block_indices": [0], "dst_block_indices": [2**64]}, "ValueError", "dst_block_indices"),
    ({"src_block_indices": [0, 1], "dst_block_indices": [0]}, "LLMException", "same number"),
    ({"src_block_indices": [], "dst_block_indices": [], "dst_block_memory_size": 1}, "LLMException", "dst_block"),
    ({"src_block_indices": [], "dst_block_indices": []}, "LLMException", "dst_block"),
    ({"dst_block_indices": []}, "LLMException", "dst_block_indices"),
    ({"dst_block_indices": [0]}, "LLMException", "dst_block_indices"),
    ({"dst_block_memory_size": 32}, "LLMException", "dst_block_memory_size"),
    ({"src_block_indices": [0], "dst_block_indices": [0], "dst_block_memory_size": -1}, "ValueError", "dst_block_memory_size"),
    ({"src_block_indices": [0], "dst_block_indices": [0], "dst_block_memory_size": "1"}, "TypeError", "dst_block_memory_size"),
    ({"src_block_indices": 0, "dst_block_indices": [0]}, "TypeError", "src_block_indices"),
    ({"src_block_indices": [0], "dst_block_indices": {"0": 0}}, "TypeError", "dst_block_indices"),
]


@pytest.mark.parametrize(("more", "kind", "text"), LISTS, ids=[f"{more}" for more, _, _ in LISTS])
def test_a7_5_lists_of_blocks(pair: tuple[Peer, Peer], more: dict[str, Any], kind: str, text: str) -> None:
    source, target = pair
    answer = source.attempt("push", name="src", configs=[config(target, None)], **more)
    assert kind in answer.kinds, answer.trace
    assert text in answer.text
    if kind != "TypeError":
        assert answer.status == INVALID
    assert (target.read("dst") == 0x5A).all()


def call(source: Peer, arguments: str) -> Answer:
    """transfer_cache_async with these arguments, as Python text; nothing of it may run."""
    code = f"""
class Ready(shmkv.LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        raise SystemExit("no layer is asked for")
src, ready, manager = agent.caches["src"], Ready(), agent.dist.kv_cache_manager
config = shmkv.TransferConfig
host = shmkv.KvCache.create_cpu_cache(shmkv.CacheDesc(2, [2, 8], shmkv.DataType.DT_INT8, shmkv.Placement.HOST), [64, 128])
odd = manager.allocate_cache(shmkv.CacheDesc(3, [2, 8], shmkv.DataType.DT_INT8))
gone = manager.allocate_cache(shmkv.CacheDesc(2, [2, 8], shmkv.DataType.DT_INT8))
manager.deallocate_cache(gone)
manager.transfer_cache_async({arguments})
"""
    return source.attempt("execute", code=code)


@pytest.mark.parametrize("arguments", [
    "'cache', ready, []", "None, ready, []", "src, None, []", "src, 'ready', []", "src, lambda layer, timeout: True, []",
    "src, ready, None", "src, ready, [None]", "src, ready, config(2, [1] * 10)", "src, ready, {config(2, [1] * 10)}",
    "src, ready, [shmkv.TransferWithCacheKeyConfig(shmkv.BlocksCacheKey(2, 0), range(1), range(1))]",
    "src, ready, [], src_block_indices=True", "src, ready, [], no_such_argument=1", "src, ready",
])
def test_a7_6_wrong_types(pair: tuple[Peer, Peer], arguments: str) -> None:
    answer = call(pair[0], arguments)
    assert "TypeError" in answer.kinds, answer.trace


@pytest.mark.parametrize("arguments", [
    "src, ready, [config(2, [1] * 10, range(1, 6))]", "src, ready, [config(2, [1] * 9)]", "src, ready, [config(2, [1] * 11)]",
    "src, ready, [config(2, [1] * 4, range(1))]", "src, ready, [config(2, [], None)]", "odd, ready, []", "host, ready, []",
    "src, ready, [config(2, [1] * 10, None, 1)], [0], [0]",
    "src, ready, [config(2, [1] * 10), config(2, [1])]",
])
def test_values_that_do_not_fit_are_refused_before_anything_runs(pair: tuple[Peer, Peer], arguments: str) -> None:
    answer = call(pair[0], arguments)
    assert answer.outcome == INVALID, answer.trace
    assert "ValueError" in answer.kinds


def test_a_deallocated_source_is_not_there(pair: tuple[Peer, Peer]) -> None:
    assert call(pair[0], "gone, ready, [config(2, [1, 2])]").outcome == "LLM_KV_CACHE_NOT_EXIST"


def test_the_first_fault_in_the_order_of_the_contract_is_named(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    assert "src_cache" in call(source, "None, None, None, 0, 0, 'x'").text
    assert "src_block_indices" in call(source, "src, None, None, 0, 0, 'x'").text
    assert "dst_block_memory_size" in call(source, "src, None, None, [0], None, 'x'").text
    assert "not supported" in call(source, "src, None, None, [0], None, 1").text
    assert "layer_synchronizer" in call(source, "src, None, None, [0], [0], 1").text
    assert "transfer_configs" in call(source, "src, ready, None, None, None, 1").text
    assert "dst_block_memory_size" in call(source, "odd, ready, [config(2, [1])], None, None, 1").text
    assert "even number" in call(source, "odd, ready, [config(2, [1])]").text
    role = target.attempt("execute", code="agent.dist.kv_cache_manager.transfer_cache_async(None, None, None)")
    assert role.outcome == INVALID
    assert "needs role" in role.text


@pytest.mark.parametrize(("timeout", "kind"), [("1", "TypeError"), (1.0, "TypeError"), (-1, "ValueError"), (2**32, "ValueError")])
def test_timeouts_of_a_task_are_checked(pair: tuple[Peer, Peer], timeout: Any, kind: str) -> None:
    source, target = pair
    source.call("push", name="src", configs=[config(target, None)])
    for question in ("synchronize", "results"):
        assert kind in source.attempt(question, timeout=timeout).kinds


def test_no_configs_are_a_success_without_a_question(pair: tuple[Peer, Peer]) -> None:
    source, _ = pair
    source.call("push", name="src", configs=[])
    assert (source.call("synchronize"), source.call("results"), source.call("asked")) == (OK, [], [])
