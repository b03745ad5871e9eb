"""finalize(drain_ms=...): others may fetch what is there before it goes."""
from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import memory
import pytest
from peer import Namespace, Peer, StartPeer, prefix, req
from reference import SUCCESS
from waiters import waiters

from shmkv import CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode

pytestmark = pytest.mark.timeout(120)
SHAPE: dict[str, Any] = {"num_tensors": 2, "shape": [2, 64], "dtype": "DT_INT8"}
LONG_MS = 60_000
WATCHDOG_MS = 20_000


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", **SHAPE)
    return p, d


def test_ends_as_soon_as_the_last_request_is_fetched(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2)], **SHAPE)
    p.call("deallocate", name="kv")
    p.send("finalize", drain_ms=LONG_MS)
    assert [d.outcome("pull", key=req(1, number), name="kv") for number in (1, 2)] == [SUCCESS] * 2
    answer = p.receive()
    assert (answer.outcome, answer.value) == (SUCCESS, [])
    assert answer.ms < LONG_MS / 2


def test_says_what_nobody_fetched(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2)], **SHAPE)
    p.call("execute", code="""
import logging
class Kept(logging.Handler):
    def emit(self, record):
        agent.said = [*getattr(agent, "said", []), record.getMessage()]
logging.getLogger("shmkv").addHandler(Kept())
""")
    assert d.outcome("pull", key=req(1, 2), name="kv") == SUCCESS
    answer = p.attempt("finalize", drain_ms=100)
    assert (answer.value, answer.ms >= 100) == ([1], True)
    said = p.call("execute", code="result = agent.said")
    assert said == ["cluster 1 ends with 1 request keys that nobody fetched: req_id 1 (model_id 0)"]


def test_what_cannot_be_fetched_is_told_and_not_waited_for(prompt: StartPeer) -> None:
    """Not published, and its owner takes no calls any more; or a prefix, which nobody consumes."""
    p = prompt(1)
    p.call("allocate", name="a", keys=[req(1, 1), prefix(1, 9)], publish=False, **SHAPE)
    p.call("publish", name="a", rows=[0], layers=1, tensor_num_per_layer=1)
    p.call("publish", name="a", rows=[1])
    answer = p.attempt("finalize", drain_ms=LONG_MS)
    assert (answer.value, answer.ms < LONG_MS / 2) == ([1], True)


def test_keys_expire_while_it_waits(prompt: StartPeer) -> None:
    p = prompt(1)
    p.call("allocate", name="a", keys=[req(1, 1)], key_ttl_ms=300, **SHAPE)
    answer = p.attempt("finalize", drain_ms=LONG_MS)
    assert (answer.value, answer.ms < LONG_MS / 2) == ([], True)


def test_without_it_nothing_is_waited_for(prompt: StartPeer) -> None:
    p = prompt(1)
    p.call("allocate", name="a", keys=[req(1, 1)], **SHAPE)
    answer = p.attempt("finalize")
    assert (answer.value, answer.ms < WATCHDOG_MS / 2) == (None, True)


def test_own_calls_are_refused_meanwhile(pair: tuple[Peer, Peer]) -> None:
    """And those of others go on: the request is fetched at the end, by a link that was made after all that."""
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1)], **SHAPE)
    d.call("unlink", ids=[1])
    p.call("execute", code="""
import threading
agent.ending = threading.Thread(target=lambda: agent.finalize(drain_ms=60_000))
agent.manager = agent.dist.kv_cache_manager
agent.ending.start()
while agent.manager.is_initialized():
    pass
""")
    manager_calls = {
        "allocate": "agent.manager.allocate_cache(shmkv.CacheDesc(1, [1, 8], shmkv.DataType.DT_INT8))",
        "publish": "agent.manager.publish(agent.caches['kv'])", "stats": "agent.manager.stats()",
        "remove": "agent.manager.remove_cache_key(shmkv.CacheKey(1, 1))", "again": "agent.dist.kv_cache_manager",
    }
    said = {name: p.outcome("execute", code=code) for name, code in manager_calls.items()}
    assert said == dict.fromkeys(manager_calls, "LLM_ENGINE_FINALIZED")
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
    p.call("execute", code="agent.ending.join(20)\nassert not agent.ending.is_alive()")


def test_own_pull_that_runs_is_waited_for(pair: tuple[Peer, Peer]) -> None:
    """It waits for the link, which the peer seems to hold; meanwhile new ones are refused, prepared or not."""
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2)], **SHAPE)
    refused, came = d.call("execute", code=f"""
import ctypes, threading, time
handle = agent.dist._links.handle(1)
word = ctypes.c_uint32.from_address(handle.address + {memory.OFFSETS['LinkRecord', 'word']})
manager, cache, came = agent.dist.kv_cache_manager, agent.caches["kv"], []
prepared = manager.prepare_pull(cache)
prepared(shmkv.CacheKey(1, 1))        # it has a link from now on
word.value = 1
def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, came
        time.sleep(0.001)
def start(call):
    thread = threading.Thread(target=lambda: came.append(call()))
    thread.start()
    return thread
pulling = start(lambda: manager.pull_cache(shmkv.CacheKey(1, 2), cache))
until(lambda: handle.users)
ending = start(lambda: agent.finalize(drain_ms=60_000))
until(lambda: handle.is_closing)
refused = []
for call in (lambda: prepared(shmkv.CacheKey(1, 2)), lambda: manager.pull_cache(shmkv.CacheKey(1, 2), cache)):
    try:
        call()
    except shmkv.LLMException as error:
        refused.append(error.status_code.name)
assert came == [] and pulling.is_alive() and ending.is_alive()
word.value = 0
for thread in (pulling, ending):
    thread.join(20)
    assert not thread.is_alive()
result = [refused, came]
""")
    assert refused == ["LLM_LINK_BUSY", "LLM_ENGINE_FINALIZED"]
    assert came == [None, []]


WAITING = """
import asyncio
import threading
agent.link, manager, kv, key = agent.dist._links.handle(1), agent.dist.kv_cache_manager, agent.caches["kv"], shmkv.CacheKey
async def five():
    await asyncio.gather(*(manager.pull_cache_async(key(1, 2**64 - 1, prefix_id=9), kv, wait=True) for _ in range(5)))
def wait():
    try:
        {wait}
        agent.said.append("done")
    except shmkv.LLMException as error:
        agent.said.append(error.status_code.name)
agent.said, agent.manager = [], manager
agent.pulling = threading.Thread(target=wait)
agent.pulling.start()
"""
PULL = "manager.pull_cache(key(1, 1), kv, wait=True)"
MANY = "manager.pull_many([shmkv.PullRequest(key(1, 1), kv), shmkv.PullRequest(key(1, 2), kv, 1)], wait=True)"
LAYERS = "assert list(manager.pull_layers(key(1, 1), kv, tensor_num_per_layer=1)) == [0, 1]"
PULLS = {"pull_cache": (PULL, 1), "pull_many": (MANY, 2), "pull_layers": (LAYERS, 1),
         "more than there are threads": ("asyncio.run(five())", 5)}       # and how many rows they wait for
BEGUN = "result = sum(getattr(wait, 'is_pulling', False) for wait, _ in agent.manager._waits._all())"
WAIT_FOR_KEY = "manager.wait_for_key(key(1, 1), 60_000)"


def drains_while_waiting(namespace: Namespace, d: Peer, drain_ms: int, wait: str, pulls: int = 1) -> None:
    """A thread of D waits, in so many pulls that have begun, and another one drains."""
    d.call("execute", code=WAITING.format(wait=wait))
    memory.wait_until(lambda: waiters(namespace) > 0 and d.call("execute", code=BEGUN) == pulls, f"{pulls} pulls wait")
    d.call("execute", code=f"""
import threading
agent.ending = threading.Thread(target=agent.finalize, kwargs={{"drain_ms": {drain_ms}}})
agent.ending.start()
""")
    memory.wait_until(lambda: d.call("execute", code="result = agent.link.is_closing"), "it drains")


def said_at_the_end(d: Peer) -> list[str]:
    said: list[str] = d.call("execute", code="""
for thread in (agent.pulling, agent.ending):
    thread.join(20)
    assert not thread.is_alive()
result = agent.said
""")
    return said


@pytest.mark.parametrize("how", PULLS)
def test_an_own_pull_that_waits_may_end(namespace: Namespace, pair: tuple[Peer, Peer], how: str) -> None:
    """What comes for it while its cluster drains is copied, layer by layer; the drain ends with it, and new pulls are refused."""
    p, d = pair
    p.call("allocate", name="a", keys=[req(1, 1), req(1, 2)], publish=False, **SHAPE)
    p.call("allocate", name="b", keys=[prefix(1, 9)], publish=False, **SHAPE)
    drains_while_waiting(namespace, d, LONG_MS, *PULLS[how])
    new = "agent.manager.pull_cache(shmkv.CacheKey(1, 1), agent.caches['kv'], wait=True, timeout_ms=20_000)"
    assert d.outcome("execute", code=new) == "LLM_ENGINE_FINALIZED"
    for name in ("a", "b"):
        p.call("publish", name=name, layers=1, tensor_num_per_layer=1)
        p.call("publish", name=name)
    assert said_at_the_end(d) == ["done"]


def test_an_own_pull_that_is_between_two_layers_may_end(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """Nothing of it runs or waits while the caller is busy with a layer."""
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1)], publish=False, **SHAPE)
    p.call("publish", name="kv", layers=1, tensor_num_per_layer=1)
    d.call("execute", code=f"""
import threading
agent.link, agent.manager = agent.dist._links.handle(1), agent.dist.kv_cache_manager
agent.layers = agent.manager.pull_layers(shmkv.CacheKey(1, 1), agent.caches["kv"], tensor_num_per_layer=1)
assert next(agent.layers) == 0
agent.ending = threading.Thread(target=agent.finalize, kwargs={{"drain_ms": {LONG_MS}}})
agent.ending.start()
""")
    memory.wait_until(lambda: d.call("execute", code="result = agent.link.is_closing"), "it drains")
    p.call("publish", name="kv")
    assert d.call("execute", code="""
rest = list(agent.layers)
agent.ending.join(20)
result = [rest, agent.ending.is_alive()]
""") == [[1], False]


def test_a_pull_that_the_draining_handler_interrupted_is_not_waited_for(pair: tuple[Peer, Peer]) -> None:
    """It could not go on before the handler is back."""
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1)], publish=False, **SHAPE)
    outcome, seconds = d.call("execute", code=f"""
import signal, time
def handler(*_):
    begin = time.monotonic()
    agent.finalize(drain_ms={WATCHDOG_MS})
    agent.seconds = time.monotonic() - begin
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKey(1, 1), agent.caches["kv"], wait=True, timeout_ms=60_000)
    outcome = None
except shmkv.LLMException as error:
    outcome = error.status_code.name
result = [outcome, agent.seconds]
""")
    assert outcome == "LLM_ENGINE_FINALIZED"
    assert seconds < WATCHDOG_MS / 1000 / 2


def test_an_own_pull_that_waits_hears_of_the_end(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """And not that the link is busy."""
    p, d = pair
    p.call("allocate", name="kv", keys=[req(1, 1)], publish=False, **SHAPE)
    drains_while_waiting(namespace, d, 300, PULL)
    assert said_at_the_end(d) == ["LLM_ENGINE_FINALIZED"]


def test_who_waits_for_a_key_alone_is_not_waited_for(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """It could not pull what it waits for."""
    _, d = pair
    drains_while_waiting(namespace, d, LONG_MS, WAIT_FOR_KEY, pulls=0)
    assert said_at_the_end(d) == ["LLM_ENGINE_FINALIZED"]


def test_interrupted_it_ends_at_the_second_call(here: Callable[..., Any]) -> None:
    dist = here("PROMPT")
    manager = dist.kv_cache_manager
    manager.allocate_cache(CacheDesc(1, [1, 8], DataType.DT_INT8), [CacheKey(1, 5)])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            dist.finalize(drain_ms=LONG_MS)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(LLMException) as caught:
        manager.stats()
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert dist.finalize() is None


@pytest.mark.parametrize(("value", "error"), [(-1, LLMException), (1.0, TypeError)])
def test_time_is_checked(here: Callable[..., Any], value: Any, error: type[Exception]) -> None:
    dist = here("PROMPT")
    with pytest.raises(error):
        dist.finalize(drain_ms=value)
    assert dist.kv_cache_manager.is_initialized()
