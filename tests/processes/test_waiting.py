"""Waits for keys, pulls that wait, allocations that wait: they end when there is something, at once when there will be nothing."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from memory import wait_until
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from waiters import until_waiting, waiters

pytestmark = pytest.mark.timeout(180)
T_MS = 20000
TIMED_OUT, NOT_EXIST, BUSY, NOT_LINKED = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_BUSY", "LLM_NOT_YET_LINK"
FINALIZED = "LLM_ENGINE_FINALIZED"
MANAGER = "manager = agent.dist.kv_cache_manager\n"


def key_code(key: list[Any]) -> str:
    kind, *values = key
    name = {"key": "CacheKey", "id": "CacheKeyByIdAndIndex", "blocks": "BlocksCacheKey"}[kind]
    return f"shmkv.{name}({', '.join(map(str, values))})"


def send_wait(d: Peer, key: list[Any], timeout_ms: int = T_MS) -> None:
    d.send("execute", code=f"{MANAGER}manager.wait_for_key({key_code(key)}, {timeout_ms})")


def send_pull(d: Peer, key: list[Any], name: str = "kv", **how: Any) -> None:
    d.send("pull", key=key, name=name, wait=True, **how)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv")
    return p, d


def publish(p: Peer, number: int, *, publish: bool = True) -> None:
    """A cache whose row 0 has the key `number` and its pattern."""
    p.call("allocate", name=f"kv{number}", keys=[req(1, number)], publish=False)
    p.call("fill", name=f"kv{number}", generation=number)
    if publish:
        p.call("publish", name=f"kv{number}")


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


# -- what will not come --------------------------------------------------------------------------------------------------

STATES = ["unbound", "bound", "some layers"]


def reach(namespace: Namespace, p: Peer, d: Peer, state: str, call: str) -> None:
    (send_pull if call == "pull" else send_wait)(d, req(1, 5))
    until_waiting(namespace)
    if state == "unbound":
        return
    publish(p, 5, publish=False)
    if state == "some layers":
        p.call("publish", name="kv5", layers=1)
    until_waiting(namespace)


ENDS = {
    "die": ("kill", TIMED_OUT), "finalize": ("finalize", TIMED_OUT), "unlink by the prompt": ("unlink", NOT_LINKED),
    "unlink by force": ("force", NOT_LINKED),
}


@pytest.mark.parametrize("call", ["wait", "pull"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ENDS)
def test_a_lost_peer_is_heard_of_at_once(namespace: Namespace, pair: tuple[Peer, Peer], call: str, state: str, end: str) -> None:
    p, d = pair
    reach(namespace, p, d, state, call)
    how, status = ENDS[end]
    if how == "kill":
        p.kill()
    elif how == "finalize":
        p.call("finalize")
    else:
        p.call("unlink", ids=[2], force=how == "force")
    answer = d.receive()
    assert answer.outcome == status, answer.trace
    assert answer.ms < T_MS / 2


@pytest.mark.parametrize("call", ["wait", "pull"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ["unlink", "force", "finalize"])
def test_the_own_process_ends_its_waits(namespace: Namespace, pair: tuple[Peer, Peer], call: str, state: str, end: str) -> None:
    """From another thread of the one that waits."""
    p, d = pair
    what = "pull_cache(key, agent.caches['kv'], wait=True)" if call == "pull" else f"wait_for_key(key, {T_MS})"
    d.call("execute", code=f"""
import threading
{MANAGER}key = shmkv.CacheKey(1, 5, 0)
agent.said = said = []
def wait():
    try:
        manager.{what}
        said.append("done")
    except shmkv.LLMException as error:
        said.append(error.status_code.name)
agent.thread = threading.Thread(target=wait)
agent.thread.start()
""")
    until_waiting(namespace)
    if state != "unbound":
        publish(p, 5, publish=False)
    if state == "some layers":
        p.call("publish", name="kv5", layers=1)
    until_waiting(namespace)
    if end == "finalize":
        d.call("finalize")
    else:
        assert d.call("unlink", ids=[1], force=end == "force") == [SUCCESS, [SUCCESS]]
    assert d.call("execute", code="agent.thread.join(10)\nresult = agent.said") in (
        [[FINALIZED]] if end == "finalize" else [[NOT_LINKED], [BUSY]])
    assert waiters(namespace) == 0
    if end != "finalize":
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "its side of the record was given back"
        p.call("allocate", name="other")
        assert d.outcome("pull", key=by_id(1, 1 if state == "unbound" else 2), name="kv") == SUCCESS
    if state != "unbound":
        p.call("remove_key", key=req(1, 5))
        p.call("deallocate", name="kv5")
        assert p.call("stats")["caches"] == (0 if end == "finalize" else 1), "no lease is left"


@pytest.mark.parametrize("call", ["wait", "pull"])
@pytest.mark.parametrize("end", ["remove", "unbind", "bind another", "deallocate all"])
@pytest.mark.parametrize("state", STATES[1:])
def test_a_key_that_ends_is_heard_of_at_once(namespace: Namespace, pair: tuple[Peer, Peer], call: str, end: str,
                                             state: str) -> None:
    p, d = pair
    reach(namespace, p, d, state, call)
    if end == "unbind":
        p.call("unbind", name="kv5", rows=[0])
    elif end == "bind another":
        p.call("bind", name="kv5", keys=[(0, req(1, 9))], publish=False)
    else:
        p.call("remove_key", key=req(1, 5))
    if end == "deallocate all":
        p.call("deallocate", name="kv5")
    answer = d.receive()
    assert answer.outcome == NOT_EXIST, answer.trace
    assert answer.ms < T_MS / 2
    assert waiters(namespace) == 0


def test_a_key_that_was_bound_and_removed_between_two_looks(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """The waiter is stopped all the while: the ring of ended keys tells it."""
    p, d = pair
    send_wait(d, req(1, 5))
    until_waiting(namespace)
    d.stop()
    publish(p, 5)
    p.call("remove_key", key=req(1, 5))
    d.cont()
    answer = d.receive()
    assert answer.outcome == NOT_EXIST, answer.trace
    assert answer.ms < T_MS / 2


def test_a_cache_that_is_waited_for_by_id_and_deallocated(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    for send in (send_wait, send_pull):
        number = p.call("allocate", name="new", publish=False)
        send(d, by_id(1, number))
        until_waiting(namespace)
        p.call("deallocate", name="new")
        answer = d.receive()
        assert answer.outcome == NOT_EXIST, answer.trace
        p.call("collect")
        assert p.call("stats")["caches"] == 0
    p.call("allocate", name="new")
    send_wait(d, by_id(1, 3, 2))
    assert d.receive().outcome == NOT_EXIST, "a row that the cache does not have"
    send_wait(d, by_id(1, 0))
    assert d.receive().outcome == NOT_EXIST


def test_another_decoder_consumes_the_key(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """Both waited for it: both may have it, it is consumed once, and who comes later hears so."""
    p, d, other = prompt(1), decoder(2), decoder(3)
    for peer in (d, other):
        peer.call("allocate", name="kv")
        send_pull(peer, req(1, 5))
    until_waiting(namespace, 2)
    publish(p, 5, publish=False)
    until_waiting(namespace, 2)
    p.call("publish", name="kv5")
    outcomes = [peer.receive().outcome for peer in (d, other)]
    assert SUCCESS in outcomes
    assert set(outcomes) <= {SUCCESS, NOT_EXIST}
    assert d.outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST


def test_not_linked_and_bad_arguments(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    send_wait(d, req(9, 5))
    assert d.receive().outcome == NOT_LINKED
    send_pull(d, req(9, 5))
    assert d.receive().outcome == NOT_LINKED
    send_pull(d, req(9, 5), batch_index=7)
    assert d.receive().outcome == "LLM_PARAM_INVALID", "the destination is looked at before the link"
    for code in ("wait_for_key(shmkv.CacheKey(1, 2, 0), -1)", "wait_for_key(shmkv.CacheKey(1, 2**64 - 1, 0), 5)",
                 "pull_cache(shmkv.CacheKey(1, 2, 0), agent.caches['kv'], wait=True, timeout_ms=-1)"):
        d.send("execute", code=f"{MANAGER}manager.{code}")
        assert d.receive().outcome == "LLM_PARAM_INVALID"
    for code in ("wait_for_key(5)", "pull_cache(shmkv.CacheKey(1, 2, 0), agent.caches['kv'], wait=1)"):
        d.send("execute", code=f"{MANAGER}manager.{code}")
        assert d.receive().outcome == "TypeError"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", ["wait", "pull"])
def test_the_deadline(namespace: Namespace, pair: tuple[Peer, Peer], call: str, state: str) -> None:
    p, d = pair
    if state != "unbound":
        publish(p, 5, publish=False)
    if state == "some layers":
        p.call("publish", name="kv5", layers=1)
    if call == "pull":
        send_pull(d, req(1, 5), timeout_ms=150)
    else:
        send_wait(d, req(1, 5), 150)
    answer = d.receive()
    assert answer.outcome == TIMED_OUT, answer.trace
    assert answer.ms >= 150
    assert "150 ms" in answer.text
    assert ("no such key" in answer.text) == (state == "unbound")
    if state == "unbound":
        publish(p, 5)
    else:
        p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS, "not consumed"
    p.call("deallocate", name="kv5")
    p.call("collect")
    assert p.call("stats")["caches"] == 0, "no lease is left"
    assert waiters(namespace) == 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", ["wait", "pull"])
def test_an_interrupt(namespace: Namespace, pair: tuple[Peer, Peer], call: str, state: str) -> None:
    p, d = pair
    what = "pull_cache(key, agent.caches['kv'], wait=True)" if call == "pull" else f"wait_for_key(key, {T_MS})"
    if state != "unbound":
        publish(p, 5, publish=False)
    if state == "some layers":
        p.call("publish", name="kv5", layers=1)
    said = d.call("execute", code=f"""
import signal, time
{MANAGER}key = shmkv.CacheKey(1, 5, 0)
result = []
for _ in range(5):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    began = time.monotonic()
    try:
        manager.{what}
    except KeyboardInterrupt:
        result.append((time.monotonic() - began) * 1000)
""")
    assert len(said) == 5
    assert max(said) < T_MS / 2
    assert waiters(namespace) == 0
    if state == "unbound":
        publish(p, 5)
    else:
        p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS, "nothing stays held, the key is not consumed"
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 0, "no lease is left"


def test_a_waiter_that_dies_costs_a_wake_and_nothing_else(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    p, d, other = prompt(1), decoder(2), decoder(3)
    for peer in (d, other):
        peer.call("allocate", name="kv")
    publish(p, 5, publish=False)
    p.call("publish", name="kv5", layers=1)
    send_pull(d, req(1, 5))
    until_waiting(namespace)
    d.kill()
    assert waiters(namespace) == 1, "it stays counted in"
    send_pull(other, req(1, 5))
    until_waiting(namespace, 2)
    p.call("publish", name="kv5")
    assert other.receive().outcome == SUCCESS
    p.call("deallocate", name="kv5")
    wait_until(lambda: (p.call("collect"), p.call("stats"))[1]["caches"] == 0, "the dead one's lease counts no more")


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
