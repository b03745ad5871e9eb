"""Field case FR-066: signals in the wait for a held lock and in a long copy, in reserving memory, in a handler."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from peer import Namespace, Peer, StartPeer, by_id
from reference import SUCCESS
from shared_bytes import SharedFile, directory_of, held_by_owner

pytestmark = pytest.mark.timeout(120)
BIG: dict[str, Any] = {"num_tensors": 4, "shape": [1, 64 << 20], "dtype": "DT_INT8"}
T_MS = 60000

# One pull with a SIGINT that a thread sends `delay` seconds after it began; what came of it, and how long it took.
_INTERRUPTED = """
import os, signal, threading, time
cache, key = agent.caches["kv"], shmkv.CacheKeyByIdAndIndex(1, 1)
signal.signal(signal.SIGINT, signal.default_int_handler)
def to_process():
    os.kill(os.getpid(), signal.SIGINT)
def to_other_thread():
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
def once(delay, send=to_process):
    timer = threading.Timer(delay, send)
    begun, ended, outcome = time.monotonic(), 0, "early"
    try:
        timer.start()
        outcome = "interrupted"
        agent.dist.kv_cache_manager.pull_cache(key, cache)
        ended, outcome = time.monotonic(), "done"
        timer.join()
        time.sleep(0.001)       # for the signal of a pull that was faster
    except KeyboardInterrupt:
        pass
    except shmkv.LLMException as error:
        outcome = error.status_code.name
    ended = ended or time.monotonic()
    timer.join()
    return [outcome, ended - begun]
"""

# A signal every millisecond while `call()` runs; how often its handler ran.
_TICKING = """
import signal, time
ticks = 0
def tick(number, frame):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
def ticking(call):
    global ticks
    ticks = 0
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    begun = time.monotonic()
    try:
        call()
        outcome = "LLM_SUCCESS"
    except shmkv.LLMException as error:
        outcome = error.status_code.name
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return [outcome, ticks, (time.monotonic() - begun) * 1000]
"""


def _pair(prompt: StartPeer, decoder: StartPeer, timeout: int = T_MS, **shape: Any) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2, sync_kv_timeout=timeout)
    p.call("allocate", name="kv", **shape)
    p.call("execute", code="for number, tensor in enumerate(agent.caches['kv'].tensors):\n"
                           "    tensor.numpy()[...] = number + 1")
    d.call("allocate", name="kv", **shape)
    return p, d


@pytest.mark.parametrize("delay", [0.001, 0.01, 0.15])
def test_fr_066_interrupt_of_a_wait(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                    rounds: Callable[[int], int], delay: float) -> None:
    _, d = _pair(prompt, decoder)
    with held_by_owner(namespace):
        code = f"{_INTERRUPTED}\nresult = [once({delay}) for _ in range({rounds(10)})]"
        ended = d.call("execute", code=code)
    outcomes = {outcome for outcome, _ in ended}
    assert outcomes - {"early"} == {"interrupted"}, "KeyboardInterrupt each time"
    assert max(seconds for _, seconds in ended) < T_MS / 2000, "long before the timeout"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "the lock is not held afterwards"
    with SharedFile(directory_of(namespace, 1)) as found:
        assert found.get("LinkRecord", "word") & 0x7FFFFFFF in (0, 3), "free, or offered to the other side"
        assert found.get("LinkRecord", "sides") & 0xFF == 0, "P's side was never opened"


def test_fr_066_interrupt_that_another_thread_caught(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """The system call of the waiting thread is not interrupted then; nor is it when a signal comes between two of them."""
    _, d = _pair(prompt, decoder)
    with held_by_owner(namespace):
        (outcome, seconds), = d.call("execute", code=f"{_INTERRUPTED}\nresult = [once(0.05, to_other_thread)]")
    assert outcome == "interrupted", "the first Ctrl-C is not lost"
    assert seconds < 20, "nor does it wait for the timeout"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "the lock is not held afterwards"


def test_fr_066_interrupt_of_a_copy(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                    rounds: Callable[[int], int]) -> None:
    _, d = _pair(prompt, decoder, **BIG)
    ended = []
    for delay in (0.001, 0.01, 0.06):
        ended += d.call("execute", code=f"{_INTERRUPTED}\nresult = [once({delay}) for _ in range({rounds(6)})]")
    assert {outcome for outcome, _ in ended} <= {"early", "interrupted", "done"}, "KeyboardInterrupt, or the copy ended first"
    assert "interrupted" in {outcome for outcome, _ in ended}, "at least some came while it was copying"
    assert max(seconds for _, seconds in ended) < T_MS / 2000, "long before the timeout"
    with SharedFile(directory_of(namespace, 1)) as found:
        assert found.get("LinkRecord", "word") == 0, "the lock is not held afterwards"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "and the next pull works"
    code = "result = [sorted({int(t.numpy().min()), int(t.numpy().max())}) for t in agent.caches['kv'].tensors]"
    assert d.call("execute", code=code) == [[1], [2], [3], [4]], "with right bytes"


def test_fr_066_handlers_run_and_the_wait_keeps_its_deadline(namespace: Namespace, prompt: StartPeer,
                                                             decoder: StartPeer) -> None:
    _, d = _pair(prompt, decoder, timeout=600)
    pull = "lambda: agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), agent.caches['kv'])"
    with held_by_owner(namespace):
        outcome, ticks, ms = d.call("execute", code=f"{_TICKING}\nresult = ticking({pull})")
    assert outcome == "LLM_WAIT_PROCESS_TIMEOUT", "the wait goes on to its end"
    assert ms >= 600, "with its first deadline, not before"
    assert ms < 30000, "nor for ever"
    assert ticks > 10, "handlers run"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS


def test_fr_066_a_signal_every_millisecond_in_a_copy(prompt: StartPeer, decoder: StartPeer) -> None:
    _, d = _pair(prompt, decoder, **BIG)
    pull = "lambda: agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), agent.caches['kv'])"
    outcome, ticks, _ = d.call("execute", code=f"{_TICKING}\nresult = ticking({pull})")
    assert (outcome, ticks > 0) == (SUCCESS, True), "the copy ends, handlers ran"
    code = "result = [sorted({int(t.numpy().min()), int(t.numpy().max())}) for t in agent.caches['kv'].tensors]"
    assert d.call("execute", code=code) == [[1], [2], [3], [4]], "right bytes"


def test_fr_066_a_signal_every_millisecond_while_reserving(prompt: StartPeer) -> None:
    p = prompt(1)
    allocate = ("lambda: agent.caches.update(kv=agent.dist.kv_cache_manager.allocate_cache("
                "shmkv.CacheDesc(1, [1, 256 << 20], shmkv.DataType.DT_INT8)))")
    outcome, ticks, ms = p.call("execute", code=f"{_TICKING}\nresult = ticking({allocate})")
    assert (outcome, ticks > 0) == (SUCCESS, True), "the allocation ends, handlers ran"
    assert ms < 30000, "in spite of every step that was undone"
    assert p.call("execute", code="result = int(agent.caches['kv'].tensors[0].numpy()[0, ::4096].max())") == 0


_FROM_A_HANDLER = """
import signal
said = []
def handler(number, frame):
    for call in (lambda: agent.dist.kv_cache_manager.pull_cache(key, cache),
                 lambda: agent.dist.kv_cache_manager.deallocate_cache(cache),
                 lambda: agent.dist.finalize()):
        try:
            call()
            said.append("done")
        except shmkv.LLMException as error:
            said.append(error.status_code.name)
cache, key = agent.caches["kv"], shmkv.CacheKeyByIdAndIndex(1, 1)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    agent.dist.kv_cache_manager.pull_cache(key, cache)
except shmkv.LLMException as error:
    said.append(error.status_code.name)
result = said
"""


def test_fr_066_calls_from_a_handler_that_interrupted_a_wait(namespace: Namespace, prompt: StartPeer,
                                                             decoder: StartPeer) -> None:
    _, d = _pair(prompt, decoder, timeout=400)
    with held_by_owner(namespace):
        said = d.call("execute", code=_FROM_A_HANDLER)
    assert said == ["LLM_LINK_BUSY"] * 3 + ["LLM_WAIT_PROCESS_TIMEOUT"], "busy, never a deadlock"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "and nothing was lost"
