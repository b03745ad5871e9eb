"""Calls for asyncio: the loop never blocks, cancelled calls leave nothing, and more waits than threads hold up nobody."""
from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from event_loop import LOOP, begin, end, finish, pulling
from memory import wait_until
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from waiters import until_waiting, waiters

pytestmark = pytest.mark.timeout(180)
LONG_MS = 20000
TIMED_OUT, NOT_EXIST = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_KV_CACHE_NOT_EXIST"


def start_pair(prompt: StartPeer, decoder: StartPeer, threads: int) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2, env={"SHMKV_ASYNC_THREADS": str(threads)})
    d.call("allocate", name="kv", num_tensors=12, shape=[2, 64])
    d.call("execute", code=LOOP)
    return p, d


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    return start_pair(prompt, decoder, 2)


def allocate(p: Peer, number: int, layers: int = 6, **more: Any) -> None:
    p.call("allocate", name=f"kv{number}", keys=[req(1, number)], publish=False, num_tensors=12, shape=[2, 64], **more)
    p.call("fill", name=f"kv{number}", generation=number)
    p.call("publish", name=f"kv{number}", layers=layers)


def test_pulls_and_waits(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    begin(d, "at once", pulling(5, ""))
    assert end(d, "at once") == NOT_EXIST, "as without asyncio"
    # Of a key that nobody pulls: a wait for one that is consumed before it looks ends with LLM_KV_CACHE_NOT_EXIST.
    begin(d, "key", "manager.wait_for_key_async(shmkv.CacheKey(1, 7, 0))")
    begin(d, "short", "manager.wait_for_key_async(shmkv.CacheKey(1, 6, 0), 50)")
    assert end(d, "short") == TIMED_OUT
    allocate(p, 7, layers=3)
    allocate(p, 5, layers=3)
    begin(d, "unpublished", pulling(5, ""))
    assert end(d, "unpublished") == NOT_EXIST
    begin(d, "pull", pulling(5))
    until_waiting(namespace, 2)
    p.call("publish", name="kv7")
    assert end(d, "key") == "None"
    p.call("publish", name="kv5")
    assert end(d, "pull") == "None"
    assert np.array_equal(d.read("kv")[:, :, 0], p.read("kv5")[:, :, 0])
    begin(d, "again", pulling(5, ""))
    assert end(d, "again") == NOT_EXIST, "consumed"
    finish(d)
    code = "import asyncio\nasyncio.run(agent.dist.kv_cache_manager.wait_for_key_async(5))"
    assert d.outcome("execute", code=code) == "TypeError"
    assert waiters(namespace) == 0


def test_layers(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    begin(d, "layers", "agent.layers(manager.pull_layers_async(shmkv.CacheKey(1, 5, 0), agent.caches['kv'], 1))")
    until_waiting(namespace)
    allocate(p, 5, layers=2)
    wait_until(lambda: d.call("execute", code="result = getattr(agent, 'found', [])") == [0, 1], "two layers")
    begin(d, "other", pulling(6, ""))
    assert end(d, "other") == NOT_EXIST, "the loop goes on"
    p.call("publish", name="kv5")
    assert end(d, "layers") == str(list(range(6)))
    assert np.array_equal(d.read("kv")[:, :, 1], p.read("kv5")[:, :, 0])
    finish(d)


@pytest.mark.parametrize("state", ["unbound", "bound", "some layers"])
@pytest.mark.parametrize("call", ["pull", "layers", "key"])
def test_a_cancelled_call_leaves_nothing(namespace: Namespace, pair: tuple[Peer, Peer], call: str, state: str) -> None:
    p, d = pair
    if state != "unbound":
        allocate(p, 5, layers=3 if state == "some layers" else 0)
    calls = {"pull": pulling(5), "layers": "agent.layers(manager.pull_layers_async(shmkv.CacheKey(1, 5, 0), agent.caches['kv']))",
             "key": "manager.wait_for_key_async(shmkv.CacheKey(1, 5, 0))"}
    begin(d, "one", calls[call])
    until_waiting(namespace)
    d.call("execute", code="agent.cancel('one')")
    assert end(d, "one") == "cancelled"
    assert waiters(namespace) == 0
    if state == "unbound":
        allocate(p, 5)
    else:
        p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS, "the lock is free, the key not consumed"
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 0, "no lease is left"
    finish(d)


@pytest.mark.parametrize("count", [1, 2])
def test_more_waits_than_threads(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, count: int) -> None:
    """The key of the last one comes first; a pull that has nothing to wait for is not held up."""
    p, d = start_pair(prompt, decoder, count)
    for number in range(10, 30):
        begin(d, f"w{number}", f"manager.wait_for_key_async(shmkv.CacheKey(1, {number}, 0))")
    allocate(p, 5)
    begin(d, "ready", pulling(5, ""))
    assert end(d, "ready") == "None"
    threads = d.call("execute", code="import threading\nresult = [t.name for t in threading.enumerate()]")
    assert threads.count("shmkv-turns") == count
    d.call("execute", code="agent.cancel('w15')\nagent.cancel('w16')")
    assert {end(d, "w15"), end(d, "w16")} == {"cancelled"}
    for number in reversed(range(10, 30)):
        if number not in (15, 16):
            allocate(p, number)
            assert end(d, f"w{number}") == "None"
    finish(d)
    assert waiters(namespace) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_each_of_many_has_its_own_deadline(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, count: int) -> None:
    """One thread sleeps for all of them; it wakes up for the earliest."""
    _, d = start_pair(prompt, decoder, count)
    for number in range(12):
        begin(d, f"long{number}", f"manager.wait_for_key_async(shmkv.CacheKey(1, {100 + number}, 0), {LONG_MS})")
    for number in reversed(range(6)):
        begin(d, f"short{number}", f"manager.wait_for_key_async(shmkv.CacheKey(1, {200 + number}, 0), {100 + 50 * number})")
    began = time.monotonic()
    assert {end(d, f"short{number}") for number in range(6)} == {TIMED_OUT}
    assert time.monotonic() - began < LONG_MS / 2000
    until_waiting(namespace, 12)
    for number in range(12):
        d.call("execute", code=f"agent.cancel('long{number}')")
    assert {end(d, f"long{number}") for number in range(12)} == {"cancelled"}
    assert waiters(namespace) == 0, "nobody is counted in for one that was cancelled while all were slept for"
    begin(d, "next", "manager.wait_for_key_async(shmkv.CacheKey(1, 7, 0), 50)")
    assert end(d, "next") == TIMED_OUT, "the thread that slept for them is there for others"
    finish(d)


def test_layers_that_are_slept_for(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """One thread; each layer ends the sleep for all, and its lease goes with the cancellation."""
    p, d = start_pair(prompt, decoder, 1)
    for number in range(8):
        begin(d, f"w{number}", f"manager.wait_for_key_async(shmkv.CacheKey(1, {10 + number}, 0))")
    begin(d, "layers", "agent.layers(manager.pull_layers_async(shmkv.CacheKey(1, 5, 0), agent.caches['kv'], 1))")
    until_waiting(namespace, 9)
    allocate(p, 5, layers=0)
    for layers in range(1, 5):
        p.call("publish", name="kv5", layers=layers)
        wait_until(lambda wanted=layers: d.call("execute", code="result = getattr(agent, 'found', [])") == list(range(wanted)),
                   f"{layers} layers")
    until_waiting(namespace, 9)
    d.call("execute", code="agent.cancel('layers')")
    assert end(d, "layers") == "cancelled"
    p.call("remove_key", key=req(1, 5))
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 0, "no lease is left"
    d.call("finalize")
    assert {end(d, f"w{number}") for number in range(8)} == {"LLM_ENGINE_FINALIZED"}
    finish(d)
    assert waiters(namespace) == 0


def test_finalize_ends_at_once_what_is_slept_for(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """And does not wait for the deadline of pulls, of 20 s."""
    _, d = start_pair(prompt, decoder, 1)
    names = [f"w{number}" for number in range(3)]
    for number, name in enumerate(names):
        begin(d, name, f"manager.wait_for_key_async(shmkv.CacheKey(1, {10 + number}, 0), {LONG_MS})")
    until_waiting(namespace, len(names))
    began = time.monotonic()
    d.call("finalize")
    assert time.monotonic() - began < LONG_MS / 2000
    assert {end(d, name) for name in names} == {"LLM_ENGINE_FINALIZED"}
    finish(d)


@pytest.mark.parametrize("how", ["die", "finalize", "own finalize", "own unlink"])
def test_the_end_of_a_link(namespace: Namespace, pair: tuple[Peer, Peer], how: str) -> None:
    p, d = pair
    allocate(p, 5, layers=2)
    for number in range(8):
        begin(d, f"w{number}", f"manager.wait_for_key_async(shmkv.CacheKey(1, {10 + number}, 0))")
    begin(d, "layers", "agent.layers(manager.pull_layers_async(shmkv.CacheKey(1, 5, 0), agent.caches['kv']))")
    wait_until(lambda: d.call("execute", code="result = getattr(agent, 'found', [])") == [0, 1], "two layers")
    names = [f"w{number}" for number in range(8)] + ["layers"]
    if how == "die":
        p.kill()
        expected = {TIMED_OUT}
    elif how == "finalize":
        p.call("finalize")
        expected = {TIMED_OUT}
    elif how == "own unlink":
        d.call("unlink", ids=[1])
        expected = {"LLM_NOT_YET_LINK", "LLM_LINK_BUSY"}
    else:
        d.call("finalize")
        expected = {"LLM_ENGINE_FINALIZED"}
    assert {end(d, name) for name in names} <= expected
    finish(d)
    if how == "own finalize":
        threads = d.call("execute", code="import threading\nresult = [t.name for t in threading.enumerate()]")
        assert not {"shmkv-turns", "shmkv-peer-watch"} & set(threads), "gone at finalize"
        assert waiters(namespace) == 0


def test_a_wait_for_the_lock_is_cancelled(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """The link's lock is held by a process that is stopped: no wait for a key, but its end is as quick."""
    p, d = pair
    allocate(p, 5)
    hold = """
import ctypes, memory
from shmkv import _link_record
from shmkv._futex import LockWord
region = agent.dist._cluster.directory.region
word = memory.word(region, "LinkRecord", _link_record.find(region, 2)[0][0], "LinkRecord", "word")
agent.word = LockWord(region, ctypes.addressof(word), 0)
result = agent.word.acquire(10000)
"""
    assert p.call("execute", code=hold) is True
    p.stop()
    begin(d, "one", pulling(5, ""))
    d.call("execute", code="agent.cancel('one')")
    assert end(d, "one") == "cancelled"
    p.cont()
    p.call("execute", code="agent.word.release()")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS
    finish(d)


def test_asyncio_run_and_ctrl_c(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """SIGINT in `asyncio.run` on the main thread cancels the call."""
    p, d = pair
    finish(d)
    said = d.call("execute", code="""
import asyncio, os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    asyncio.run(agent.dist.kv_cache_manager.wait_for_key_async(shmkv.CacheKey(1, 5, 0)))
except KeyboardInterrupt:
    result = "interrupted"
""")
    assert said == "interrupted"
    assert waiters(namespace) == 0
    p.call("allocate", name="kv5")
    assert d.outcome("pull", key=by_id(1, 1), name="kv", src_layer_range=range(2), dst_layer_range=range(2), size=8) == SUCCESS
