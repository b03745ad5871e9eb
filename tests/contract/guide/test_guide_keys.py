"""docs/llm_datadist.md, the rows of keys and memory. The numbers are in the names."""
from __future__ import annotations

import os

import pytest
from guide_rows import DESC, U64MAX, Own, key, status_of
from peer import Namespace, StartPeer, req

from shmkv import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode

pytestmark = pytest.mark.timeout(120)


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
