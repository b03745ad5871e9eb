"""Field cases FR-058, FR-061, FR-062, FR-068 and FR-069: the lock word of a link, its values and the moments around its waits."""
from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from agent_code import SPAWN
from peer import SHM, Namespace, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from scripts import Script
from shared_bytes import LINK_HELD_BY_OWNER, SharedFile, directory_of, reader_slot
from started_apart import Program, until

from shmkv._futex import LockWord
from shmkv._mapping import Region

pytestmark = pytest.mark.timeout(120)
TIMED_OUT, FINALIZED = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_ENGINE_FINALIZED"
ROWS = geometry(4, [2, 8], 2)
OFFERED_TO_READER, WAITED_FOR = 4, 0x80000000
LINK_LIVE = 1


@pytest.mark.parametrize(("place", "said"), [("call", [TIMED_OUT]), ("destructor", [TIMED_OUT]), ("finalize", ["finalized"]),
                                             ("atexit", [TIMED_OUT]), ("thread", [TIMED_OUT]), ("end", [FINALIZED])])
def test_fr_058_a_wait_that_runs_out_ends_in_order(namespace: Namespace, prompt: StartPeer, place: str, said: list[str]) -> None:
    p = prompt(1)
    p.call("allocate", name="kv")
    program = Program(namespace, "wait_somewhere.py", place)
    assert program.line() == "linked"
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
        program.tell("go")
        ended = program.end()
        found.put("LinkRecord", "word", 0)
    assert ended.said.split() == said, "the status of the call, in every place"
    assert (ended.code, ended.complained) == (0, ""), "never abort, nothing on stderr"
    assert p.outcome("fill", name="kv", generation=1) == SUCCESS, "the peer goes on"


_TIMED_PULL = """
import threading, time
begun = time.process_time()
try:
    agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), agent.caches["kv"])
    outcome = "LLM_SUCCESS"
except shmkv.LLMException as error:
    outcome = error.status_code.name
result = [outcome, time.process_time() - begun, threading.get_native_id()]
"""
NOBODYS = {"owner died": 0x40000000, "owner died, waited for": 0xC0000000, "all ones": 0xFFFFFFFF, "no such pid": 0x003FFFF7,
           "held by nobody": LINK_HELD_BY_OWNER, "offered to nobody": 3, "the caller's tid": -1}


@pytest.mark.parametrize("what", list(NOBODYS))
def test_fr_061_a_word_that_nobody_holds(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, what: str) -> None:
    p, d = prompt(1), decoder(2, sync_kv_timeout=500)
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv")
    value = d.call("execute", code=_TIMED_PULL)[2] if NOBODYS[what] < 0 else NOBODYS[what]
    d.call("canary", name="kv")
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", value)
        outcome, cpu_s, _ = d.call("execute", code=_TIMED_PULL)
        assert outcome in (SUCCESS, TIMED_OUT), "right bytes or LLMException"
        assert outcome == SUCCESS or (d.read("kv") == 0x5A).all(), "and then no byte was touched"
        print(f"{what}: {cpu_s * 1000:.1f} ms of processor time")
        assert cpu_s < 0.1, "no tight loop: of processor time, whatever the clock says"
        if found.get("LinkRecord", "state") & 0xFF == LINK_LIVE:
            found.put("LinkRecord", "word", 0)
        else:
            assert d.call("unlink", ids=[1]) == [SUCCESS, [SUCCESS]]
            assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "P was alive all the time, and can be pulled from"
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0])


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_fr_062_a_leftover_whose_pid_lives_again(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    p = prompt(1)
    p.call("allocate", name="kv")
    old = directory_of(namespace, 1)
    p.kill()
    with subprocess.Popen(["sleep", "60"]) as other, SharedFile(f"{namespace.name}.members.v2") as members:
        try:
            members.put("MemberRecord", "pid", other.pid)
            members.put("MemberRecord", "start_time", _start_time(other.pid))
            heir = prompt(1)
            assert not (SHM / old).exists(), "the leftover is taken as dead, whoever has its pid"
            assert other.poll() is None, "and that process is left alone"
            heir.call("allocate", name="kv", keys=[req(1, 7)])
            heir.call("fill", name="kv", generation=2)
            d = decoder(2)
            d.call("allocate", name="kv")
            assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "a new D links"
            np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 2)[:, :, 0])
        finally:
            other.kill()


@pytest.fixture
def futex_stop(preload: Callable[[str], Path]) -> str:
    """Stops or kills a process right before its first futex call on shared memory."""
    return str(preload("futex_stop"))


_WAITER = """
import sys, time
from shmkv._futex import LockWord
from shmkv._mapping import Region
region = Region.attach(sys.argv[1], writable=True)
lock = LockWord(region, region.base, 1)
print("asks", flush=True)
print("took" if lock.acquire(60000) else "timed out", flush=True)
"""


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("times", [1, 2, 2**16])
def test_fr_068_a_release_between_the_look_and_the_sleep(tmp_path: Path, futex_stop: str, times: int) -> None:
    """The kernel compares the very word that was read, so the wait does not begin; there is no counter that could come round."""
    path = tmp_path / "word"
    path.touch(0o600)
    os.truncate(path, 4096)
    region = Region.attach(str(path), writable=True)
    lock = LockWord(region, region.base, 0)
    assert lock.acquire(0)
    preload = {**os.environ, "LD_PRELOAD": futex_stop, "FUTEX_AT": "wait"}
    with Script(_WAITER, path, env=preload) as waiter:
        assert waiter.hear() == "asks"
        until(lambda: _is_stopped(waiter.pid))
        lock.release()
        for _ in range(min(times - 1, 1)):
            assert lock.acquire(20000), "an offer that is not fetched is taken back"
            lock.release()
        lock.pairs(max(0, times - 2))
        begun = time.monotonic()
        os.kill(waiter.pid, signal.SIGCONT)
        assert waiter.hear() == "took", "it gets the lock"
        assert time.monotonic() - begun < 30, "without sleeping to its deadline"


_DIES_AT_ITS_WAKE = SPAWN + """
def work(own, ready):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    linked(own, 3)
    own.allocate("kv", num_tensors=1, shape=(1, 1 << 16), dtype="DT_INT8")
    ready()
    signal.sigwait({signal.SIGUSR1})
    own.pull(["id", 1, {cache_id}, 0], "kv")
result = agent.dying = spawn(work)
"""
_LET_GO = """
import os, signal
os.kill(agent.dying, signal.SIGUSR1)
result = os.WTERMSIG(os.waitpid(agent.dying, 0)[1])
"""
_FILL_WITH = "agent.caches['next'].tensors[0].numpy().view(np.int32)[...] = {pid}"
_OTHERS = "result = int((agent.caches['next'].tensors[0].numpy().view(np.int32) != {pid}).sum())"


def test_fr_069_death_in_a_release_writes_into_nothing(namespace: Namespace, prompt: StartPeer, futex_stop: str,
                                                       rounds: Callable[[int], int]) -> None:
    """D dies after it gave the word back and before it woke the other side; P uses the memory that D had mapped for other data."""
    p, nursery = prompt(1), namespace.start(env={"LD_PRELOAD": futex_stop, "FUTEX_AT": "wake"})
    namespace.somebody_died = True
    shape = {"num_tensors": 1, "shape": [1, 1 << 16], "dtype": "DT_INT8"}
    for _ in range(rounds(40)):
        cache_id = p.call("allocate", name="kv", **shape)
        pid = nursery.call("execute", code=_DIES_AT_ITS_WAKE.replace("{cache_id}", str(cache_id)))
        with SharedFile(directory_of(namespace, 1)) as found:
            slot = reader_slot(found, 3)
            found.put("LinkRecord", "word", OFFERED_TO_READER | WAITED_FOR, slot)
            assert nursery.call("execute", code=_LET_GO) == signal.SIGKILL, "it died there"
            assert found.get("LinkRecord", "word", slot) == 3, "after it had given the word to the other side"
        p.call("deallocate", name="kv")
        p.call("allocate", name="next", **shape)
        p.call("execute", code=_FILL_WITH.replace("{pid}", str(pid)))
        assert p.call("unlink", ids=[3]) == [SUCCESS, [SUCCESS]]
        assert p.call("execute", code=_OTHERS.replace("{pid}", str(pid))) == 0, "no bit changed"
        p.call("deallocate", name="next")
