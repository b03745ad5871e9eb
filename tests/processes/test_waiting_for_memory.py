"""Allocations that wait for memory: back-pressure with a deadline, and an event for everything that frees some."""
from __future__ import annotations

import json
import time
from typing import Any

import pytest
from memory import wait_until
from peer import Namespace, Peer, StartPeer, req
from reference import SUCCESS
from waiters import memory_waiters

pytestmark = pytest.mark.timeout(180)
T_MS = 20000
SMALL = {"num_tensors": 1, "shape": [1, 1 << 20], "dtype": "DT_INT8"}
SHORT = """
import errno
from shmkv import segment
real = segment.create_and_map
def short(name, nbytes, **how):
    if agent.dist._cluster.caches._pool.made_nbytes + nbytes > 4.5 * (1 << 20):
        raise OSError(errno.ENOSPC, "short")
    return real(name, nbytes, **how)
segment.create_and_map = short
"""


def _full(p: Peer) -> None:
    """Four caches with a key each, deallocated; there is no room for a fifth."""
    p.call("execute", code=SHORT)
    for number in range(4):
        p.call("allocate", name=f"c{number}", keys=[req(1, number)], **SMALL)
        p.call("deallocate", name=f"c{number}")


WAIT_IN_A_THREAD = f"""
import threading
manager = agent.dist.kv_cache_manager
agent.said = said = []
def wait():
    try:
        agent.caches["more"] = manager.allocate_cache(shmkv.CacheDesc(1, [1, 1 << 20], shmkv.DataType.DT_INT8), wait_ms={T_MS})
        said.append("done")
    except shmkv.LLMException as error:
        said.append(error.status_code.name)
agent.thread = threading.Thread(target=wait)
agent.thread.start()
"""


FREED = {
    "a reader consumes": "", "a reader consumes while it is stopped": "",
    "a key is removed": "manager.remove_cache_key(shmkv.CacheKey(1, 2, 0))",
    "a handle goes": "del agent.caches['last']", "a cache is deallocated": "agent.deallocate('last')",
    "a key's time ends": "manager.publish(agent.caches['last'], key_ttl_ms=1)",
}


@pytest.mark.parametrize("how", FREED)
def test_an_allocation_waits_for_memory(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, how: str) -> None:
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2)
    d.call("allocate", name="kv", **SMALL)
    _full(p)
    assert p.outcome("allocate", name="new", **SMALL) == "LLM_DEVICE_OUT_OF_MEMORY"
    p.call("remove_key", key=req(1, 0))
    p.call("allocate", name="last", **SMALL)
    p.call("execute", code=WAIT_IN_A_THREAD)
    wait_until(lambda: memory_waiters(namespace) == 1, "it waits")
    assert p.call("execute", code="result = agent.said") == []
    if FREED[how]:
        p.call("execute", code=f"manager = agent.dist.kv_cache_manager\n{FREED[how]}")
        if "time" in how:
            p.call("execute", code="manager = agent.dist.kv_cache_manager\nmanager.publish(agent.caches['last'])")
            p.call("bind", name="last", keys=[(0, req(1, 77))], key_ttl_ms=1)
            p.call("deallocate", name="last")
    else:
        if "stopped" in how:
            p.stop()
        assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
        p.cont()
    assert p.call("execute", code="agent.thread.join(15)\nresult = agent.said") == ["done"]
    assert memory_waiters(namespace) == 0


def test_an_allocation_that_waits_is_ended_by_finalize(namespace: Namespace, prompt: StartPeer) -> None:
    """By the one of another thread, at once."""
    p = prompt(1)
    _full(p)
    p.call("execute", code=WAIT_IN_A_THREAD)
    wait_until(lambda: memory_waiters(namespace) == 1, "it waits")
    began = time.monotonic()
    p.call("finalize")
    assert p.call("execute", code="agent.thread.join(15)\nresult = agent.said") == ["LLM_ENGINE_FINALIZED"]
    assert time.monotonic() - began < T_MS / 2000


@pytest.mark.parametrize("how", ["ends", "goes", "dies"])
def test_an_allocation_waits_for_a_lease(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, how: str) -> None:
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2)
    halves: dict[str, Any] = {"num_tensors": 2, "shape": [1, 1 << 19], "dtype": "DT_INT8"}
    d.call("allocate", name="kv", **halves)
    _full(p)
    p.call("remove_key", key=req(1, 0))
    p.call("allocate", name="held", keys=[req(1, 9)], publish=False, **halves)
    p.call("publish", name="held", layers=1, tensor_num_per_layer=1)
    d.call("execute", code="agent.layers = agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKey(1, 9, 0), agent.caches['kv'], "
           "tensor_num_per_layer=1)\nresult = next(agent.layers)")
    p.call("remove_key", key=req(1, 9))
    p.call("deallocate", name="held")
    p.send("allocate", name="more", wait_ms=T_MS, **SMALL)
    wait_until(lambda: memory_waiters(namespace) == 1, "it waits")
    assert not p.answers_within(0.1)
    if how == "ends":
        d.call("execute", code="agent.layers.close()")
    elif how == "goes":
        d.call("execute", code="del agent.layers")
    else:
        d.kill()
    answer = p.receive()
    assert answer.outcome == SUCCESS, answer.trace
    assert answer.ms < T_MS / 2
    assert memory_waiters(namespace) == 0


@pytest.mark.parametrize(("lend", "end"), [("view_cache", "agent.lent.close()"),
                                          ("fork_cache", "agent.dist.kv_cache_manager.deallocate_cache(agent.lent)")])
def test_an_allocation_waits_for_what_is_lent(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, lend: str,
                                              end: str) -> None:
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2)
    _full(p)
    d.call("execute", code=f"agent.lent = agent.dist.kv_cache_manager.{lend}(shmkv.CacheKey(1, 0, 0))")
    p.call("remove_key", key=req(1, 0))
    p.send("allocate", name="more", wait_ms=T_MS, **SMALL)
    wait_until(lambda: memory_waiters(namespace) == 1, "it waits")
    assert not p.answers_within(0.1)
    d.call("execute", code=end)
    answer = p.receive()
    assert answer.outcome == SUCCESS, answer.trace
    assert answer.ms < T_MS / 2
    assert memory_waiters(namespace) == 0


def test_an_allocation_that_waits_in_vain(namespace: Namespace, prompt: StartPeer) -> None:
    p = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"})
    _full(p)
    answer = p.attempt("allocate", name="new", wait_ms=200, **SMALL)
    assert answer.outcome == "LLM_DEVICE_OUT_OF_MEMORY", answer.trace
    assert answer.ms >= 200
    assert memory_waiters(namespace) == 0
    code = f"""
import signal
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    agent.allocate("new", wait_ms={T_MS}, **{json.dumps(SMALL)})
except KeyboardInterrupt:
    result = "interrupted"
"""
    assert p.call("execute", code=code) == "interrupted"
    assert memory_waiters(namespace) == 0
    p.call("remove_key", key=req(1, 1))
    assert p.outcome("allocate", name="new", **SMALL) == SUCCESS
