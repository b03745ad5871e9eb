"""How often a process that has nothing to do, or has to wait, wakes up: counted by the kernel, as voluntary context switches.

And what a stopped process holds, holds up nobody but those who use the same link.
"""
from __future__ import annotations

import time
from pathlib import Path

import pytest
from memory import wait_until
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from rounds import ROUNDS
from waiters import memory_waiters, until_waiting

pytestmark = pytest.mark.timeout(180)
BIG = [1, 24 << 20]
WAKE_UPS_A_SECOND = 50
# Take the lock of the link that cluster 2 made, as the side that was linked to; once more, and give it back.
HOLD = """
import ctypes, memory
from shmkv import _link_record
from shmkv._futex import LockWord
region = agent.dist._cluster.directory.region
word = memory.word(region, "LinkRecord", _link_record.find(region, 2)[0][0], "LinkRecord", "word")
agent.word = LockWord(region, ctypes.addressof(word), 0)
result = agent.word.acquire(10000)
"""
# Who has that lock: 2 is the side that made the link.
HOLDER = HOLD.partition("agent.word")[0] + "result = word.value & 0x7FFFFFFF"
PULL_ON = """
key = shmkv.CacheKeyByIdAndIndex(1, 2, 0)
for _ in range(2000):
    agent.dist.kv_cache_manager.pull_cache(key, agent.caches["small"])
"""


@pytest.fixture
def window_s() -> float:
    """How long is counted: 3 s, times SHMKV_ROUNDS."""
    return max(1.0, 3.0 * ROUNDS)


def _voluntary(pid: int) -> dict[str, int]:
    """Voluntary context switches of each thread."""
    counts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        (line,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
        counts[task.name] = int(line.split()[1])
    return counts


def _sleeps(pid: int) -> bool:
    """Do all threads wait for something? At one moment: two that hand the interpreter to each other are each found asleep."""
    before = _voluntary(pid)
    asleep = all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in Path(f"/proc/{pid}/task").iterdir())
    return asleep and _voluntary(pid) == before


def _wake_ups_of_waiter(pid: int, seconds: float) -> tuple[int, float]:
    """The same for a process that was just told something for which it has to wait: from its second wake-up on."""
    before = sum(_voluntary(pid).values())
    wait_until(lambda: sum(_voluntary(pid).values()) >= before + 2, f"process {pid} waits")
    return _wake_ups(pid, seconds)


def _wake_ups(pid: int, seconds: float) -> tuple[int, float]:
    """How many while time passes, and how much time did."""
    wait_until(lambda: _sleeps(pid), f"process {pid} has nothing to do")
    began = time.monotonic()
    before = _voluntary(pid)
    time.sleep(seconds)
    after = _voluntary(pid)
    assert before.keys() == after.keys(), "the same threads"
    count, seconds = sum(after.values()) - sum(before.values()), time.monotonic() - began
    print(f"{count} wake-ups in {seconds:.1f} s")           # pytest -rP shows it
    return count, seconds


def _pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY_THREADS": "3"})
    for peer in (p, d):
        peer.call("allocate", name="big", num_tensors=1, shape=BIG, dtype="DT_INT8")
        peer.call("allocate", name="small")
    p.call("fill", name="big", generation=1)
    p.call("fill", name="small", generation=2)
    return p, d


def test_nobody_wakes_up_while_nobody_waits(prompt: StartPeer, decoder: StartPeer, window_s: float) -> None:
    p, d = _pair(prompt, decoder)
    d.call("pull", key=by_id(1, 1), name="big")
    assert d.call("execute", code="from shmkv import _crew; result = _crew.current()['started']") == 2, "parked threads, too"
    assert len(_voluntary(d.pid)) >= 3
    for peer in (p, d):
        assert _wake_ups(peer.pid, window_s)[0] == 0


def test_a_waiter_wakes_up_seldom(prompt: StartPeer, decoder: StartPeer, window_s: float) -> None:
    """The lock of its link is held by a process that is stopped."""
    p, d = _pair(prompt, decoder)
    assert p.call("execute", code=HOLD) is True
    p.stop()
    d.send("pull", key=by_id(1, 2), name="small")
    count, seconds = _wake_ups_of_waiter(d.pid, window_s)
    assert 0 < count <= WAKE_UPS_A_SECOND * seconds
    p.cont()
    p.call("execute", code="agent.word.release()")
    answer = d.receive()
    assert answer.outcome == SUCCESS, answer.text


WAIT = """
import threading
manager = agent.dist.kv_cache_manager
def wait(what, *arguments, **how):
    try:
        list(getattr(manager, what)(*arguments, **how) or ())
    except shmkv.LLMException as error:
        agent.outcomes.append(error.status_code.name)
agent.outcomes = []
agent.threads = [threading.Thread(target=wait, args=("pull_cache", shmkv.CacheKey(1, n, 0), agent.caches["small"]),
                                  kwargs={"wait": True, "timeout_ms": 100000}) for n in (70, 71)]
agent.threads += [threading.Thread(target=wait, args=("wait_for_key", shmkv.CacheKey(1, n, 0), 100000)) for n in (70, 72)]
agent.threads += [threading.Thread(target=wait, args=("pull_layers", shmkv.CacheKey(1, 70, 0), agent.caches["small"]),
                                   kwargs={"timeout_ms": 100000})]
requests = [shmkv.PullRequest(shmkv.CacheKey(1, n, 0), agent.caches["small"]) for n in (70, 72)]
agent.threads += [threading.Thread(target=wait, args=("pull_many", requests), kwargs={"wait": True, "timeout_ms": 100000})]
for thread in agent.threads: thread.start()
"""


def test_who_waits_for_keys_and_layers_does_not_wake_up(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                        window_s: float) -> None:
    """A thread on the pidfd of the peer sees to it that its death is noticed; nobody wakes up for that meanwhile."""
    p, d = _pair(prompt, decoder)
    p.call("allocate", name="late", keys=[req(1, 70)], publish=False)
    p.call("publish", name="late", layers=1)
    d.call("execute", code=WAIT)
    until_waiting(namespace, 7)
    for peer in (p, d):
        assert _wake_ups(peer.pid, window_s)[0] == 0
    began = time.monotonic()
    p.kill()
    said = d.call("execute", code="for thread in agent.threads: thread.join(15)\nresult = agent.outcomes")
    assert said == ["LLM_WAIT_PROCESS_TIMEOUT"] * 6
    assert time.monotonic() - began < 10


ASYNC_WAITS = """
import asyncio, threading
manager = agent.dist.kv_cache_manager
agent.outcomes = []
async def wait(number):
    try:
        await manager.wait_for_key_async(shmkv.CacheKey(1, number, 0), 100000)
    except shmkv.LLMException as error:
        agent.outcomes.append(error.status_code.name)
async def waits():
    await asyncio.gather(*(wait(100 + number) for number in range(COUNT)))
agent.thread = threading.Thread(target=asyncio.run, args=(waits(),))
agent.thread.start()
"""


@pytest.mark.parametrize("count", [1, 20])
def test_who_awaits_does_not_wake_up(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, window_s: float,
                                     count: int) -> None:
    """With a thread for each wait, and with more waits than the four threads."""
    p, d = _pair(prompt, decoder)
    d.call("execute", code=ASYNC_WAITS.replace("COUNT", str(count)))
    until_waiting(namespace, count)
    for peer in (p, d):
        assert _wake_ups(peer.pid, window_s)[0] == 0
    began = time.monotonic()
    p.kill()
    said = d.call("execute", code="agent.thread.join(15)\nresult = agent.outcomes")
    assert said == ["LLM_WAIT_PROCESS_TIMEOUT"] * count
    assert time.monotonic() - began < 10


def test_the_main_thread_wakes_up_for_signals_only(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                   window_s: float) -> None:
    """Four times a second, for a signal that came right before it fell asleep."""
    _, d = _pair(prompt, decoder)
    d.send("pull", key=req(1, 70), name="small", wait=True)
    until_waiting(namespace)
    count, seconds = _wake_ups(d.pid, window_s)
    assert count <= 5 * seconds
    d.kill()


TTLS = {
    "none": "", "of a key that lives": "agent.allocate('timed', keys=[['key', 1, 9, 0, 2**64 - 1]], key_ttl_ms=3_600_000)",
    "of a key that is gone": """
agent.allocate('timed', keys=[['key', 1, 9, 0, 2**64 - 1]], key_ttl_ms=3_600_000)
agent.dist.kv_cache_manager.remove_cache_key(shmkv.CacheKey(1, 9, 0))
""",
}


@pytest.mark.parametrize("ttl", TTLS)
def test_an_allocation_that_waits_does_not_wake_up(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                   window_s: float, ttl: str) -> None:
    """A key with a time to live is looked for when that is over."""
    p, _ = _pair(prompt, decoder)
    p.call("execute", code=TTLS[ttl])
    p.call("execute", code="""
import errno, threading
from shmkv import segment
def short(*_, **__):
    raise OSError(errno.ENOSPC, "short")
segment.create_and_map = short
agent.thread = threading.Thread(target=agent.allocate, args=("more",), kwargs={"wait_ms": 100000, "shape": (4, 1 << 20)},
                                daemon=True)
agent.thread.start()
""")
    wait_until(lambda: memory_waiters(namespace) == 1, "it waits")
    assert _wake_ups(p.pid, window_s)[0] == 0
    p.kill()


def test_who_waits_for_a_cluster_wakes_up_seldom(decoder: StartPeer, prompt: StartPeer, window_s: float) -> None:
    d = decoder(2, link=())
    d.send("link", ids=[1])
    count, seconds = _wake_ups_of_waiter(d.pid, window_s)
    assert 0 < count <= WAKE_UPS_A_SECOND * seconds
    prompt(1)
    assert d.receive().value == ["LLM_SUCCESS", ["LLM_SUCCESS"]]


def test_who_waits_for_the_cold_lock_wakes_up_seldom(prompt: StartPeer, decoder: StartPeer, window_s: float) -> None:
    """Held by a process that is stopped while it links."""
    p, d = prompt(1), decoder(2, link=())
    hold = "from shmkv import _life; result = _life.hold_cold(agent.dist._cluster.namespace.life_fd)"
    assert p.call("execute", code=hold) is True
    p.stop()
    d.send("link", ids=[1])
    count, seconds = _wake_ups_of_waiter(d.pid, window_s)
    assert 0 < count <= WAKE_UPS_A_SECOND * seconds
    p.cont()
    p.call("execute", code=hold.replace("hold_cold", "drop_cold"))
    assert d.receive().value == ["LLM_SUCCESS", ["LLM_SUCCESS"]]


def test_a_stopped_decoder_slows_no_other_link(prompt: StartPeer, decoder: StartPeer, window_s: float) -> None:
    """Stopped in the middle of a pull, so with its link's lock: the other decoder does not wait once, nor does the prompt, except
    for that link."""
    p, d = _pair(prompt, decoder)
    other = decoder(3)
    other.call("allocate", name="small")
    other.call("execute", code=PULL_ON)
    _stop_in_a_pull(p, d)
    before = _voluntary(other.pid)[str(other.pid)]
    other.call("execute", code=PULL_ON)
    # One for the command; of 2000 pulls at a stopped lock each would take a slice or more.
    assert _voluntary(other.pid)[str(other.pid)] - before < 20
    assert p.outcome("allocate", name="more", keys=[req(1, 5)]) == SUCCESS
    assert other.outcome("pull", key=req(1, 5), name="small") == SUCCESS
    p.send("unlink", ids=[2])
    count, seconds = _wake_ups_of_waiter(p.pid, window_s)
    assert 0 < count <= WAKE_UPS_A_SECOND * seconds, "the one that wants the stopped link waits, and seldom wakes up"
    d.cont()
    assert p.receive().value == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    assert d.receive().outcome in (SUCCESS, "LLM_NOT_YET_LINK"), "it was in the middle, or between two shares, of its last pull"


def _stop_in_a_pull(p: Peer, d: Peer) -> None:
    """Stop the decoder until it is found with the lock; the pull that it is in is answered when it goes on."""
    for number in range(1000):
        d.send("pull", key=by_id(1, 1), name="big")
        time.sleep(0.002 + number % 7 * 0.001)
        d.stop()
        if p.call("execute", code=HOLDER) == 2:
            return
        d.cont()
        assert d.receive().outcome == SUCCESS
    pytest.fail("never stopped in a pull")


def test_bytes_of_a_pull_that_was_stopped(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = _pair(prompt, decoder)
    _stop_in_a_pull(p, d)
    d.cont()
    assert d.receive().outcome == SUCCESS
    assert d.call("digest", name="big") == p.call("digest", name="big")
