"""Waits for keys and pulls that wait: they end when there is something."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from memory import wait_until
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from waiters import MANAGER, T_MS, publish, send_pull, send_wait, until_waiting, waiters

pytestmark = pytest.mark.timeout(180)
TIMED_OUT, NOT_EXIST, BUSY, NOT_LINKED = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_BUSY", "LLM_NOT_YET_LINK"
FINALIZED = "LLM_ENGINE_FINALIZED"


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv")
    return p, d


# -- what comes ----------------------------------------------------------------------------------------------------------

def test_a_key_that_is_there_is_answered_at_once(pair: tuple[Peer, Peer], namespace: Namespace) -> None:
    p, d = pair
    publish(p, 5)
    send_wait(d, req(1, 5), 1)
    assert d.receive().outcome == SUCCESS
    send_pull(d, req(1, 5))
    answer = d.receive()
    assert answer.outcome == SUCCESS, answer.trace
    assert np.array_equal(d.read("kv")[:, :, 0], p.read("kv5")[:, :, 0])
    assert d.outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST, "consumed"
    assert waiters(namespace) == 0


@pytest.mark.parametrize("key", [req(1, 5), by_id(1, 1), ["blocks", 1, 7]], ids=["key", "id", "blocks"])
def test_a_key_is_waited_for_until_it_is_bound_and_published(namespace: Namespace, pair: tuple[Peer, Peer], key: list[Any]) -> None:
    p, d = pair
    send_wait(d, key)
    until_waiting(namespace)
    if key[0] == "blocks":
        p.call("execute", code="desc = shmkv.CacheDesc(4, [3, 8], shmkv.DataType.DT_FLOAT16)\nagent.caches['kv5'] = "
               "agent.dist.kv_cache_manager.allocate_blocks_cache(desc, shmkv.BlocksCacheKey(1, 7), publish=False)")
    else:
        publish(p, 5, publish=False)
    until_waiting(namespace)
    p.call("publish", name="kv5", layers=1)
    assert not d.answers_within(0.1)
    p.call("publish", name="kv5", rows=[0])
    if key[0] == "blocks":
        assert not d.answers_within(0.1)
        p.call("publish", name="kv5")
    answer = d.receive()
    assert answer.outcome == SUCCESS, answer.trace
    assert waiters(namespace) == 0


@pytest.mark.parametrize("how", [{}, {"size": 8}, {"src_cache_offset": 4, "dst_cache_offset": 4}, {"src_layer_range": range(1, 2),
                                 "dst_layer_range": range(1)}], ids=["all", "size", "offsets", "ranges"])
def test_a_pull_that_waits_gives_what_the_plain_pull_gives(namespace: Namespace, pair: tuple[Peer, Peer],
                                                           how: dict[str, Any]) -> None:
    p, d = pair
    d.call("allocate", name="plain")
    for name in ("kv", "plain"):
        d.call("canary", name=name)
    send_pull(d, req(1, 5), batch_index=1, **how)
    until_waiting(namespace)
    publish(p, 5, publish=False)
    p.call("publish", name="kv5", layers=1)
    p.call("publish", name="kv5")
    answer = d.receive()
    assert answer.outcome == SUCCESS, answer.trace
    consumed = d.outcome("pull", key=req(1, 5), name="plain", batch_index=1, **how)
    assert consumed == (NOT_EXIST if how.keys() <= {"size"} else SUCCESS)
    if consumed == SUCCESS:
        assert d.call("digest", name="kv") == d.call("digest", name="plain")
    assert waiters(namespace) == 0


def test_a_pull_that_waits_copies_each_layer_when_it_is_published(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """Seen by another thread of the decoder, while the call waits for the next layer."""
    p, d = pair
    publish(p, 5, publish=False)
    wanted = p.read("kv5")[:, :, 0]
    d.call("canary", name="kv")
    before = d.read("kv")[:, :, 0]
    d.call("execute", code=f"""
import threading
{MANAGER}
def pull():
    try:
        manager.pull_cache(shmkv.CacheKey(1, 5, 0), agent.caches["kv"], wait=True)
        agent.outcome = "LLM_SUCCESS"
    except shmkv.LLMException as error:
        agent.outcome = str(error)
agent.outcome = "waits"
agent.thread = threading.Thread(target=pull)
agent.thread.start()
""")
    for layer in range(2):
        until_waiting(namespace)
        assert d.call("execute", code="result = agent.outcome") == "waits"
        p.call("publish", name="kv5", layers=layer + 1)
        wait_until(lambda layer=layer: np.array_equal(d.read("kv")[:2 * layer + 2, :, 0], wanted[:2 * layer + 2]), "its bytes")
        if layer == 0:
            until_waiting(namespace)
            assert d.call("execute", code="result = agent.outcome") == "waits"
            assert np.array_equal(d.read("kv")[2:, :, 0], before[2:]), "the other layer was not touched"
            assert p.call("execute", code="result = agent.dist.kv_cache_manager.contains(shmkv.CacheKey(1, 5, 0))") is False
    assert d.call("execute", code="agent.thread.join(15)\nresult = agent.outcome") == SUCCESS
    assert d.outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST, "consumed by the last layer"
    assert waiters(namespace) == 0


def test_many_wait_for_many(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """Threads of two processes, more than there are leases for; published in another order than they asked."""
    p = prompt(1)
    decoders = [decoder(2, env={"SHMKV_MAX_LEASES": "3"}), decoder(3)]
    code = """
import threading
def one(number, said):
    cache = manager.allocate_cache(shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_FLOAT16))
    try:
        manager.pull_cache(shmkv.CacheKey(1, number, 0), cache, wait=True)
        said[number] = cache.tensors[1].numpy()[0].tobytes().hex()
    except shmkv.LLMException as error:
        said[number] = error.status_code.name + " " + str(error)
said = {}
threads = [threading.Thread(target=one, args=(number, said)) for number in numbers]
for thread in threads: thread.start()
for thread in threads: thread.join()
result = said
"""
    numbers = [list(range(10, 22)), list(range(30, 42))]
    for d, wanted in zip(decoders, numbers, strict=True):
        d.send("execute", code=f"{MANAGER}numbers = {wanted}{code}")
    until_waiting(namespace, 24)
    everything = list(np.random.default_rng(1).permutation(numbers[0] + numbers[1]))
    for number in everything[:12]:
        publish(p, int(number))
    for number in everything[12:]:
        publish(p, int(number), publish=False)
    for number in everything[12:]:
        p.call("publish", name=f"kv{number}")
    for d, wanted in zip(decoders, numbers, strict=True):
        said = d.receive().value
        assert {int(number) for number in said} == set(wanted)
        for number, text in said.items():
            if text.startswith(BUSY):
                assert d is decoders[0]
                assert "SHMKV_MAX_LEASES" in text
            else:
                assert text == p.read(f"kv{number}")[1, 0, 0].tobytes().hex()
    assert waiters(namespace) == 0


def test_a_key_that_was_consumed_before_may_come_again(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    for round_ in range(5):
        publish(p, 5)
        assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS
        if round_ % 2:
            p.call("collect")
        send_pull(d, req(1, 5))
        until_waiting(namespace)
        p.call("bind", name="kv5", keys=[(0, req(1, 6))])       # whoever waits for a key looks, and goes on waiting
        p.call("remove_key", key=req(1, 6))
        assert not d.answers_within(0.05)
        p.call("bind", name="kv5", keys=[(0, req(1, 5))])
        answer = d.receive()
        assert answer.outcome == SUCCESS, answer.trace
        p.call("deallocate", name="kv5")


def test_own_rows_are_waited_for_too(namespace: Namespace, decoder: StartPeer) -> None:
    d = decoder(2, link=())
    d.call("allocate", name="src", publish=False)
    d.call("allocate", name="kv")
    d.call("fill", name="src", generation=3)
    said = d.call("execute", code=f"""
import threading, time
{MANAGER}key = shmkv.CacheKeyByIdAndIndex(2, 1, 0)
said = []
def wait(what):
    try:
        said.append(what() or "done")
    except shmkv.LLMException as error:
        said.append(error.status_code.name)
threads = [threading.Thread(target=wait, args=(what,)) for what in (
    lambda: manager.wait_for_key(key, {T_MS}), lambda: manager.pull_cache(key, agent.caches["kv"], wait=True),
    lambda: str(list(manager.pull_layers(key, agent.caches["kv"], 1))))]
for thread in threads: thread.start()
publisher = manager.layer_publisher(agent.caches["src"])
time.sleep(0.05)
publisher(1)
time.sleep(0.05)
publisher(0)
for thread in threads: thread.join()
result = sorted(said)
""")
    assert said == ["[0, 1]", "done", "done"]
    kv, src = d.read("kv"), d.read("src")
    assert np.array_equal(kv[:, :, 0], src[:, :, 0])
    assert np.array_equal(kv[:, :, 1], src[:, :, 0])
    send_wait(d, by_id(2, 9), 50)
    assert d.receive().outcome == TIMED_OUT
    assert waiters(namespace, 2) == 0
