"""Waits that fail: at once when there will be nothing, at the deadline, by an interrupt; and nothing is left of them."""
from __future__ import annotations

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
