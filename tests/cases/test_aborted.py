"""Field cases FR-032 and FR-035: pulls that were aborted, or whose peer died, keep nothing for ever."""
from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from agent_code import SPAWN
from peer import SHM, Namespace, StartPeer, by_id, req
from reference import SUCCESS
from shared_bytes import LINK_HELD_BY_OWNER, SharedFile, directory_of, segments_of
from started_apart import maps, until

pytestmark = pytest.mark.timeout(120)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
AT_ONCE = {"SHMKV_RECYCLE_BYTES": "0"}
T_MS = 20000
WAITED_FOR = 0x80000000

_ABORTED = """
import signal
manager, cache, gone = agent.dist.kv_cache_manager, agent.caches["kv"], agent.caches["gone"]
manager.deallocate_cache(gone)
said = {}
def stop(*_):
    raise KeyboardInterrupt
def aborted(call):
    try:
        call()
        name = "done"
    except KeyboardInterrupt:
        name = "interrupted"
    except shmkv.LLMException as error:
        name = error.status_code.name
    said[name] = said.get(name, 0) + 1
def interrupted(call, delay):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + delay * 1e-6)
        for _ in range(1000):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, stop)
for number in range({count}):
    key = shmkv.CacheKey(1, 1 + number % 8)
    by_id = shmkv.CacheKeyByIdAndIndex(1, 1, number % 8)
    aborted(lambda: interrupted(lambda: manager.pull_cache(by_id, cache), number * 7 % 997))
    aborted(lambda: manager.pull_cache(key, cache, 99))
    aborted(lambda: manager.pull_cache(key, gone))
result = said
"""


def test_fr_032_aborted_pulls_leave_no_pin(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                           rounds: Callable[[int], int]) -> None:
    p, d = prompt(1, env=AT_ONCE), decoder(2)
    before = namespace.segments()
    p.call("allocate", name="kv", shape=[8, 1 << 15], dtype="DT_INT8", keys=[req(1, 1 + row) for row in range(8)])
    for name in ("kv", "gone"):
        d.call("allocate", name=name, shape=[1, 1 << 15], dtype="DT_INT8")
    count = rounds(340)
    said = d.call("execute", code=_ABORTED.replace("{count}", str(count)))
    assert said.pop("interrupted", 0) > count / 2, "most of them were interrupted"
    assert set(said) <= {"done", "LLM_PARAM_INVALID", "LLM_KV_CACHE_NOT_EXIST"}, "the others refused"
    (segment,) = segments_of(namespace, 1)
    for row in range(8):
        p.call("remove_key", key=req(1, 1 + row))
    p.call("deallocate", name="kv")
    p.call("collect")
    assert not (SHM / segment).exists(), "all of it is freed at once"
    assert segments_of(namespace, 1) == [], "no pull left a pin"
    d.call("deallocate", name="kv")
    d.call("collect")
    assert {name for name in namespace.segments() - before if os.stat(SHM / name).st_nlink} == set(
        segments_of(namespace, 2)), "what is left is kept for the next cache of D, nothing else"
    with SharedFile(directory_of(namespace, 1)) as found:
        assert found.get("LinkRecord", "word") == 0, "no lock"
        assert found.reader("hazard", 0) == 0, "no waiting entry"


_ONE_PROMPT = SPAWN + """
def work(own, ready):
    joined(own, "PROMPT", 1)
    own.allocate("kv")
    ready()
    signal.pause()
agent.prompt = spawn(work)
"""
_KILL_IT = SPAWN + "kill(agent.prompt)"


def test_fr_035_a_peer_that_dies_pins_nothing_here(namespace: Namespace, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    nursery, d = namespace.start(), decoder(2, link=(), env=AT_ONCE)
    namespace.somebody_died = True
    sizes = []
    for _ in range(rounds(30)):
        nursery.call("execute", code=_ONE_PROMPT)
        d.call("allocate", name="kv")
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
        with SharedFile(directory_of(namespace, 1)) as found:
            found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
            d.send("pull", key=by_id(1, 1), name="kv")
            until(lambda found=found: found.get("LinkRecord", "word") & WAITED_FOR)     # type: ignore[misc]
        nursery.call("execute", code=_KILL_IT)
        answer = d.receive()
        assert (answer.outcome, answer.ms < T_MS / 2) == (TIMED_OUT, True), "the pull ends when P dies"
        assert d.outcome("deallocate", name="kv") == SUCCESS, "deallocate works"
        d.call("collect")
        assert segments_of(namespace, 2) == [], "and gives the memory back"
        assert d.call("unlink", ids=[1], force=True) == [SUCCESS, [SUCCESS]]
        sizes.append(len(maps(d, "/dev/shm/")))
    assert sizes[-1] == sizes[0], "D's pool after the last round equals that after the first"
