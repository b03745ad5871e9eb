"""Field cases FR-067, FR-072 and FR-084: many processes, or many threads, at once."""
from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from agent_code import SPAWN
from peer import Namespace, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from rounds import seconds_of
from shared_bytes import SharedFile, directory_of, reader_slot
from started_apart import until

pytestmark = pytest.mark.timeout(120)
FINALIZED = {"LLM_ENGINE_FINALIZED", "LLM_FAILED", "LLM_KV_CACHE_NOT_EXIST", "LLM_NOT_YET_LINK"}      # what is found gone first
T_MS = 20000

_CROWD = SPAWN + """
def work(number):
    def run(own, ready):
        linked(own, 1000 + number)
        own.allocate("kv")
        own.pull(["id", 1, 1, 0], "kv")
        ready()
        while True:
            own.pull(["id", 1, 1, 0], "kv")
    return run
"""
_START = _CROWD + "agent.crowd = {number: spawn(work(number)) for number in range(16)}\nagent.next = 16"
_REPLACE = _CROWD + """
kill(agent.crowd.pop({victim}))
agent.crowd[agent.next] = spawn(work(agent.next))
agent.next += 1
result = sorted(agent.crowd)
"""
_ALL = SPAWN + "for pid in agent.crowd.values():\n    kill(pid)"


def _progress(directory: SharedFile, numbers: list[int]) -> dict[int, int]:
    """Pulls that each has finished, as counted in its link record."""
    return {number: directory.reader("counters", reader_slot(directory, 1000 + number)) for number in numbers}


def test_fr_067_everybody_goes_on_while_some_are_killed(namespace: Namespace, prompt: StartPeer, rng: np.random.Generator,
                                                        rounds: Callable[[int], int]) -> None:
    """A pull that ends by its deadline would end the process that made it, with its traceback on stderr."""
    p, nursery = prompt(1), namespace.start()
    p.call("allocate", name="kv")
    namespace.somebody_died = True
    nursery.call("execute", code=_START)
    alive, until_s = list(range(16)), time.monotonic() + seconds_of(67)
    with SharedFile(directory_of(namespace, 1)) as directory:
        for turn in itertools.count():
            if turn >= rounds(10) and time.monotonic() >= until_s:
                break
            victim = int(rng.choice(alive))
            alive = nursery.call("execute", code=_REPLACE.replace("{victim}", str(victim)))
            if turn % 5 == 4:
                before = _progress(directory, alive)
                until(lambda before=before: all(now > before[number]            # type: ignore[misc]
                                                for number, now in _progress(directory, list(before)).items()))
        assert len(alive) == 16, "every process makes progress"
    nursery.call("execute", code=_ALL)


def test_fr_072_who_comes_first_makes_the_locks_once(namespace: Namespace, rng: np.random.Generator,
                                                     rounds: Callable[[int], int]) -> None:
    """The counter that each adds 1 to under the lock is the one of joins."""
    peers = [namespace.start() for _ in range(8)]
    for generation in range(rounds(12)):
        order = [int(number) for number in rng.permutation(8)]
        for number in order:
            role = "DECODER" if number else "PROMPT"
            peers[number].send("init", role=role, cluster_id=number + 1, options={"sync_kv_timeout": T_MS}, raw={})
            if number:
                peers[number].send("link", ids=[1], timeout=T_MS)
                peers[number].send("allocate", name="kv")
        for number in order:
            assert peers[number].receive().outcome == SUCCESS, "init"
            if number:
                assert peers[number].receive().value == [SUCCESS, [SUCCESS]], "link"
                peers[number].receive()
        with SharedFile(f"{namespace.name}.members.v2") as members:
            assert members.get("MembersHeader", "joins") == 8, "8 of 8 each round: nobody made the table a second time"
        peers[0].call("allocate", name="kv", keys=[req(1, 7)])
        peers[0].call("fill", name="kv", generation=generation)
        with SharedFile(directory_of(namespace, 1)) as directory:
            slots = {reader_slot(directory, number + 1) for number in range(1, 8)}
            assert len(slots) == 7, "7 links of their own"
        for number in range(1, 8):
            assert peers[number].outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
        for peer in peers:
            peer.call("finalize")
        assert namespace.names() == set(), "a fresh start each round"


_ONE_HANDLE = """
import threading, time
manager, cache, seconds = agent.dist.kv_cache_manager, agent.caches["kv"], {seconds}
arrays, wrong, said, pulls = [tensor.numpy() for tensor in cache.tensors], [], {}, 0
def run(row):
    global pulls
    key = shmkv.CacheKeyByIdAndIndex(1, 1, row)
    after = 0
    while after < 3:
        try:
            manager.pull_cache(key, cache, row)
            pulls += 1
            wrong.extend(int(value) for array in arrays for value in array[row] if value != row + 1)
        except shmkv.LLMException as error:
            said[error.status_code.name] = said.get(error.status_code.name, 0) + 1
            after += 1
threads = [threading.Thread(target=run, args=(row,)) for row in range(8)]
for thread in threads:
    thread.start()
time.sleep(seconds)
agent.dist.finalize()
for thread in threads:
    thread.join()
result = [pulls, said, wrong[:10]]
"""


def test_fr_084_one_manager_for_eight_threads(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                              rounds: Callable[[int], int]) -> None:
    p, d = prompt(1), decoder(2)
    shape = {"num_tensors": 4, "shape": [8, 512], "dtype": "DT_INT8"}
    for peer in (p, d):
        peer.call("allocate", name="kv", **shape)
    p.call("execute", code="for tensor in agent.caches['kv'].tensors:\n"
                           "    tensor.numpy()[...] = np.arange(1, 9, dtype=np.int8)[:, None]")
    pulls, said, wrong = d.call("execute", code=_ONE_HANDLE.replace("{seconds}", str(rounds(1))))
    assert pulls > 100, "calls that overlap wait for their turn"
    assert wrong == [], "never a wrong row"
    assert set(said) <= FINALIZED, f"after finalize each call raises: {said}"
    assert sum(said.values()) == 24, "in each thread"
    incarnation = directory_of(namespace, 1)
    with SharedFile(incarnation) as directory:
        assert directory.get("LinkRecord", "word") == 0, "no lock is left held"
    late = decoder(3)
    late.call("allocate", name="kv")
    p.call("allocate", name="other")
    p.call("fill", name="other", generation=1)
    assert late.outcome("pull", key=by_id(1, 2), name="kv") == SUCCESS, "the peer goes on"
    np.testing.assert_array_equal(late.read("kv")[:, :, 0], pattern(geometry(4, [2, 8], 2), 1)[:, :, 0])
