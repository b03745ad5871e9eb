"""Signals in the waits that FR-066 does not name: the queue of threads, the poll for a peer, the cold lock, finalize.

An interrupt comes out as KeyboardInterrupt, a handler that returns lets the wait go on to its first deadline, and nothing stays
held.
"""
from __future__ import annotations

import os

import pytest
from peer import SHM, Namespace, Peer, StartPeer, by_id
from reference import SUCCESS
from scripts import Script
from shared_bytes import directory_of, held_by_owner

pytestmark = pytest.mark.timeout(120)
T_MS = 20000
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"

# interrupted(call): a SIGINT comes while it waits; ticked(call): a signal every millisecond whose handler returns.
_SIGNALS = """
import signal, threading, time
def outcome_of(call):
    begun = time.monotonic()
    try:
        said = call()
        name = "done" if said is None else said
    except KeyboardInterrupt:
        name = "interrupted"
    except shmkv.LLMException as error:
        name = error.status_code.name
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return [name, (time.monotonic() - begun) * 1000]
def interrupted(call):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return outcome_of(call)
ticks = 0
def tick(number, frame):
    global ticks
    ticks += 1
def ticked(call):
    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    return outcome_of(call) + [ticks]
def pull():
    agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), agent.caches["kv"])
def link(cluster_id, timeout):
    return str(agent.link([cluster_id], timeout)[1][0])
"""


def _pair(prompt: StartPeer, decoder: StartPeer, timeout: int = T_MS) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2, sync_kv_timeout=timeout)
    for peer in (p, d):
        peer.call("allocate", name="kv")
    return p, d


_BEHIND_A_THREAD = """
first = []
def in_front():
    first.append(outcome_of(pull)[0])
thread = threading.Thread(target=in_front)
thread.start()
time.sleep(0.05)
result = {how}(pull)
agent.thread, agent.first = thread, first
"""


@pytest.mark.parametrize(("how", "timeout"), [("interrupted", T_MS), ("ticked", 500)])
def test_a_signal_in_the_queue_of_threads(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, how: str,
                                          timeout: int) -> None:
    """A thread of the process waits for the word, the main thread stands behind it."""
    _, d = _pair(prompt, decoder, timeout)
    with held_by_owner(namespace):
        code = _SIGNALS.replace("finally:\n        signal.setitimer(signal.ITIMER_REAL, 0)",
                                "finally:\n        if threading.current_thread() is threading.main_thread():\n"
                                "            signal.setitimer(signal.ITIMER_REAL, 0)")
        said = d.call("execute", code=code + _BEHIND_A_THREAD.replace("{how}", how))
    d.call("execute", code="agent.thread.join()")
    if how == "interrupted":
        assert (said[0], said[1] < T_MS / 2) == ("interrupted", True), "long before its turn or its deadline"
        assert d.call("execute", code="result = agent.first") == ["done"], "the one in front goes on"
    else:
        assert said[0] == TIMED_OUT, "the wait goes on to its end"
        assert said[1] >= timeout, "with its first deadline"
        assert said[2] > 10, "handlers run"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "nothing stays held"


@pytest.mark.parametrize("how", ["interrupted", "ticked"])
def test_a_signal_in_the_poll_for_a_peer(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, how: str) -> None:
    _, d = _pair(prompt, decoder)
    timeout = T_MS if how == "interrupted" else 500
    said = d.call("execute", code=f"{_SIGNALS}result = {how}(lambda: link(77, {timeout}))")
    if how == "interrupted":
        assert (said[0], said[1] < T_MS / 2) == ("interrupted", True), "long before its deadline"
    else:
        assert (said[0], said[1] >= timeout, said[2] > 10) == (TIMED_OUT, True, True), "to its first deadline, handlers ran"
    late = prompt(77)
    assert d.call("link", ids=[77]) == [SUCCESS, [SUCCESS]], "the next call is not kept out by the interrupted one"
    late.call("allocate", name="kv")
    assert d.outcome("pull", key=by_id(77, 1), name="kv") == SUCCESS


_HOLD_COLD = """
import fcntl, os, sys, struct
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLKW, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
print("held", flush=True)
sys.stdin.readline()
"""


def test_no_interrupt_is_lost_in_the_wait_for_the_cold_lock(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """The lock is polled: a signal that comes between two naps interrupts nothing by itself."""
    _, d = _pair(prompt, decoder)
    prompt(77)
    with Script(_HOLD_COLD, SHM / f"{namespace.name}.life") as holder:
        assert holder.hear() == "held"
        code = _SIGNALS.replace("signal.ITIMER_REAL, 0.1)", "signal.ITIMER_REAL, 0.02)")
        said = d.call("execute", code=f"{code}result = [interrupted(lambda: link(77, {T_MS})) for _ in range(40)]")
    assert {outcome for outcome, _ in said} == {"interrupted"}
    assert max(ms for _, ms in said) < T_MS / 2, "each at once, and not at the end of the wait"
    assert d.call("link", ids=[77]) == [SUCCESS, [SUCCESS]], "nothing stays held"


@pytest.mark.parametrize(("how", "call"), [("interrupted", "link"), ("interrupted", "init"), ("interrupted", "finalize"),
                                           ("ticked", "link"), ("ticked", "init")])
def test_a_signal_in_the_wait_for_the_cold_lock(namespace: Namespace, prompt: StartPeer, how: str, call: str) -> None:
    p, d = prompt(1), namespace.start()
    options = {"options": {"sync_kv_timeout": T_MS}, "raw": {}}
    if call != "init":
        d.call("init", role="DECODER", cluster_id=2, **options)
    with Script(_HOLD_COLD, SHM / f"{namespace.name}.life") as holder:
        assert holder.hear() == "held"
        what = {"link": "lambda: link(1, 600)", "finalize": "agent.finalize",
                "init": "lambda: agent.init('DECODER', 2, {'sync_kv_timeout': 20000}, {})"}[call]
        said = d.call("execute", code=f"{_SIGNALS}result = {how}({what})")
        if how == "interrupted":
            assert (said[0], said[1] < T_MS / 2) == ("interrupted", True), "the wait ends"
        else:
            assert said[2] > 10, "handlers run"
            assert said[0] in ("LLM_FAILED", "LLM_LINK_FAILED"), "and the wait ends by its deadline with a status"
    if call == "finalize":
        assert d.outcome("finalize") == SUCCESS, "it can be called again"
    if call in ("init", "finalize"):
        d.call("init", role="DECODER", cluster_id=2, **options)
    p.call("allocate", name="kv")
    d.call("allocate", name="kv")
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "nothing stays held"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS


_FINALIZE_BEHIND_A_PULL = """
outcomes = []
def in_front():
    outcomes.append(outcome_of(pull)[0])
thread = threading.Thread(target=in_front)
thread.start()
time.sleep(0.02)
first = {how}(agent.dist.finalize)
again = []
while agent.dist._cluster is not None:
    again.append(outcome_of(agent.dist.finalize)[0])
thread.join()
result = [first, again, outcomes]
"""


@pytest.mark.parametrize("how", ["interrupted", "ticked"])
def test_a_signal_in_finalizes_wait_for_a_running_pull(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                       how: str) -> None:
    p, d = prompt(1), decoder(2)
    shape = {"num_tensors": 4, "shape": [1, 64 << 20], "dtype": "DT_INT8"}
    for peer in (p, d):
        peer.call("allocate", name="kv", **shape)
    code = _SIGNALS.replace("finally:\n        signal.setitimer(signal.ITIMER_REAL, 0)", "finally:\n        pass")
    code = code.replace("signal.ITIMER_REAL, 0.1)", "signal.ITIMER_REAL, 0.005)")
    first, again, outcomes = d.call("execute", code=code + _FINALIZE_BEHIND_A_PULL.replace("{how}", how)
                                    + "signal.setitimer(signal.ITIMER_REAL, 0)\n")
    assert first[0] in ("done", "interrupted"), "finished, or interrupted"
    assert set(again) <= {"done", "interrupted"}, "and then it goes on where it was"
    assert outcomes[0] in ("done", "LLM_ENGINE_FINALIZED", "LLM_NOT_YET_LINK", "LLM_LINK_BUSY"), "the pull ends with an answer"
    own = [name for name in os.listdir(SHM) if name.startswith(namespace.name)]
    incarnation = directory_of(namespace, 1).rpartition(".")[2]
    assert all(incarnation in name or name.endswith((".life", ".members.v2")) for name in own), "nothing of it is left"
