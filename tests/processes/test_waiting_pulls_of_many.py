"""`pull_many(wait=True)` and prepared pulls that wait: all rows under one deadline, each when it comes, and nothing is left."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from memory import wait_until
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from waiters import T_MS, key_code, until_waiting, waiters

pytestmark = pytest.mark.timeout(180)
TIMED_OUT, NOT_EXIST, NOT_LINKED = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_KV_CACHE_NOT_EXIST", "LLM_NOT_YET_LINK"
ROWS = 4
MANY = """
import time
import agent as program
cache = agent.caches["kv"]
requests = [shmkv.PullRequest(program.make_key(key), cache, row) for key, row in {wanted!r}]
began = time.monotonic()
try:
    agent.dist.kv_cache_manager.pull_many(requests, wait=True{how})
    result = ["LLM_SUCCESS", None, None]
except shmkv.LLMException as error:
    result = [error.status_code.name, error.failed_request, sorted(error.done_requests)]
    agent.text = str(error)
result.append((time.monotonic() - began) * 1000)
"""
PREPARED = """
import threading, time
pull = agent.dist.kv_cache_manager.prepare_pull(agent.caches["kv"], batch_index={row}, wait=True{how})
"""


def send_many(d: Peer, *wanted: tuple[list[Any], int], how: str = "") -> None:
    d.send("execute", code=MANY.format(wanted=list(wanted), how=how))


def start_many(d: Peer, *wanted: tuple[list[Any], int]) -> None:
    """The same on a thread of that process, which goes on answering."""
    d.call("execute", code=f"""
import threading
agent.said = said = []
def pull():
    scope = dict(agent=agent, shmkv=shmkv)
    exec({MANY.format(wanted=list(wanted), how="")!r}, scope)
    said.append(scope["result"][:3])
agent.thread = threading.Thread(target=pull)
agent.thread.start()
""")


def end_of_thread(d: Peer) -> list[Any]:
    said = d.call("execute", code="agent.thread.join(10)\nresult = agent.said")
    assert len(said) == 1
    return list(said[0])


def end_of_many(d: Peer) -> list[Any]:
    """[status, place of the one that failed, places of those that were done]."""
    answer = d.receive()
    assert answer.outcome == SUCCESS, answer.trace
    *said, took_ms = answer.value
    assert took_ms < T_MS / 2
    return list(said)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", shape=[ROWS, 8])
    return p, d


def allocate(p: Peer, number: int) -> None:
    p.call("allocate", name=f"kv{number}", keys=[req(1, number)], publish=False)
    p.call("fill", name=f"kv{number}", generation=number)


def arrived(p: Peer, d: Peer, number: int, row: int) -> bool:
    return bool(np.array_equal(d.read("kv")[:, :, row], p.read(f"kv{number}")[:, :, 0]))


def no_lease_is_left(p: Peer, numbers: list[int]) -> None:
    for number in numbers:
        p.call("remove_key", key=req(1, number))
        p.call("deallocate", name=f"kv{number}")
    p.call("collect")
    assert p.call("stats")["caches"] == 0


# -- many --------------------------------------------------------------------------------------------------------------

def test_rows_come_in_any_order(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    send_many(d, (req(1, 5), 0), (req(1, 6), 1), (req(1, 7), 2), (req(1, 8), 3))
    until_waiting(namespace, 4)
    for number in (7, 5, 8, 6):
        allocate(p, number)
        p.call("publish", name=f"kv{number}")
        if number != 6:
            wait_until(lambda: p.call("stats")["keys"] == 0, "each is fetched, though one before it is missing")
    assert end_of_many(d) == [SUCCESS, None, None]
    assert all(arrived(p, d, number, row) for row, number in enumerate((5, 6, 7, 8)))
    assert waiters(namespace) == 0
    no_lease_is_left(p, [5, 6, 7, 8])


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_and_moments(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, seed: int) -> None:
    """Two prompts, keys bound before or late, published by layers in any interleaving, some layers of some requests only."""
    dice = random.Random(seed)
    prompts = {1: prompt(1), 3: prompt(3)}
    d = decoder(2, link=(1, 3))
    tensors, width, rows = 2 * dice.randint(1, 5), dice.randint(1, 300), dice.randint(1, 6)
    shape = {"num_tensors": tensors, "shape": [1, width], "dtype": "DT_INT8"}
    d.call("allocate", name="kv", num_tensors=tensors, shape=[rows, width], dtype="DT_INT8")
    owners = [dice.choice([1, 3]) for _ in range(rows)]
    late = [dice.random() < 0.4 for _ in range(rows)]
    steps = []
    for row in range(rows):
        p = prompts[owners[row]]
        p.call("allocate", name=f"kv{row}", keys=[] if late[row] else [req(owners[row], row)], publish=False, **shape)
        p.call("fill", name=f"kv{row}", generation=row + 1)
        layers = sorted(dice.sample(range(1, tensors // 2 + 1), dice.randint(1, tensors // 2)))
        steps.append([*(["bind"] if late[row] else []), *[layer for layer in layers if layer < tensors // 2], tensors // 2])
    begins = dice.randrange(sum(map(len, steps)))
    total = 0
    while any(steps):
        if total == begins:
            send_many(d, *((req(owners[row], row), row) for row in range(rows)))
        total += 1
        row = dice.choice([row for row in range(rows) if steps[row]])
        step, p = steps[row].pop(0), prompts[owners[row]]
        if step == "bind":
            p.call("bind", name=f"kv{row}", keys=[(0, req(owners[row], row))], publish=False)
        else:
            p.call("publish", name=f"kv{row}", layers=step)
    assert end_of_many(d) == [SUCCESS, None, None]
    for row in range(rows):
        assert arrived(prompts[owners[row]], d, row, row)
    for number, p in prompts.items():
        assert waiters(namespace, number) == 0
        assert p.call("stats")["keys"] == 0, "all consumed"


@pytest.mark.parametrize("first", ["own", "other"])
def test_rows_of_the_own_cluster_and_of_others(namespace: Namespace, pair: tuple[Peer, Peer], first: str) -> None:
    p, d = pair
    number = d.call("allocate", name="own", publish=False)
    d.call("fill", name="own", generation=8)
    start_many(d, (by_id(2, number), 0), (req(1, 5), 1), (by_id(2, number, 1), 2))
    until_waiting(namespace)
    until_waiting(namespace, 2, 2)
    allocate(p, 5)
    for whose in (first, "other" if first == "own" else "own"):
        for layers in (1, 2):
            (d if whose == "own" else p).call("publish", name="own" if whose == "own" else "kv5", layers=layers)
    assert end_of_thread(d) == [SUCCESS, None, None]
    assert arrived(p, d, 5, 1)
    assert np.array_equal(d.read("kv")[:, :, [0, 2]], d.read("own")[:, :, [0, 1]])
    assert waiters(namespace) == waiters(namespace, 2) == 0


def test_the_first_failure_ends_all(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    for number in (5, 6):
        allocate(p, number)
    p.call("publish", name="kv6")
    send_many(d, (req(1, 7), 0), (req(1, 5), 1), (req(1, 6), 2))
    until_waiting(namespace, 2)
    p.call("publish", name="kv5", layers=1)
    p.call("remove_key", key=req(1, 5))
    assert end_of_many(d) == [NOT_EXIST, 1, [2]]
    assert arrived(p, d, 6, 2)
    assert waiters(namespace) == 0
    no_lease_is_left(p, [5, 6])


def test_a_key_that_ended_before_is_waited_for_and_one_that_ends_later_is_not(namespace: Namespace,
                                                                              pair: tuple[Peer, Peer]) -> None:
    """The second key ends while the call sleeps for the first: it is heard of all the same."""
    p, d = pair
    allocate(p, 5)
    p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS
    allocate(p, 6)
    send_many(d, (req(1, 5), 0), (req(1, 6), 1))
    until_waiting(namespace, 2)
    p.call("remove_key", key=req(1, 6))
    assert end_of_many(d) == [NOT_EXIST, 1, []]
    send_many(d, (req(1, 5), 0), (req(1, 6), 1))
    until_waiting(namespace, 2)
    for number in (5, 6):
        p.call("bind", name=f"kv{number}", keys=[(0, req(1, number))])
    assert end_of_many(d) == [SUCCESS, None, None]


@pytest.mark.parametrize("end", ["die", "finalize", "unlink", "own unlink"])
def test_one_of_two_peers_is_lost(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, end: str) -> None:
    p, other, d = prompt(1), prompt(3), decoder(2, link=(1, 3))
    d.call("allocate", name="kv", shape=[ROWS, 8])
    (start_many if end == "own unlink" else send_many)(d, (req(1, 5), 0), (req(3, 5), 1))
    until_waiting(namespace, 1, 1)
    until_waiting(namespace, 1, 3)
    if end == "die":
        other.kill()
    elif end == "finalize":
        other.call("finalize")
    elif end == "unlink":
        other.call("unlink", ids=[2])
    else:
        assert d.call("unlink", ids=[3]) == [SUCCESS, [SUCCESS]]
    lost = NOT_LINKED if "unlink" in end else TIMED_OUT
    assert (end_of_thread if end == "own unlink" else end_of_many)(d) == [lost, 1, []]
    assert waiters(namespace, 1) == 0
    allocate(p, 5)
    p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS, "the other link goes on"


def test_a_finalize_of_the_own_process(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p, 6)
    p.call("publish", name="kv6", layers=1)
    start_many(d, (req(1, 5), 0), (req(1, 6), 1))
    until_waiting(namespace, 2)
    d.call("finalize")
    assert end_of_thread(d) == ["LLM_ENGINE_FINALIZED", 0, []]
    assert waiters(namespace) == 0
    no_lease_is_left(p, [6])


def test_the_deadline_is_one_for_all(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    for number in (5, 6):
        allocate(p, number)
    p.call("publish", name="kv5", layers=1)
    p.call("publish", name="kv6")
    send_many(d, (req(1, 6), 0), (req(1, 5), 1), (req(1, 7), 2), how=", timeout_ms=200")
    answer = d.receive()
    status, place, done, took_ms = answer.value
    assert (status, place, done) == (TIMED_OUT, 1, [0])
    assert 200 <= took_ms < T_MS / 2
    text = d.call("execute", code="result = agent.text")
    assert "200 ms" in text
    assert "2 of 4 selected tensors" in text
    assert waiters(namespace) == 0
    p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS, "not consumed"
    no_lease_is_left(p, [5, 6])


def test_an_interrupt(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p, 5)
    p.call("publish", name="kv5", layers=1)
    said = d.call("execute", code="""
import signal, time
manager, cache = agent.dist.kv_cache_manager, agent.caches["kv"]
requests = [shmkv.PullRequest(shmkv.CacheKey(1, number, 0), cache, row) for row, number in enumerate((5, 6))]
pull = manager.prepare_pull(cache, wait=True)
calls = [lambda: manager.pull_many(requests, wait=True), lambda: pull(shmkv.CacheKey(1, 5, 0))] * 3
result = []
for call in calls:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    began = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        result.append((time.monotonic() - began) * 1000)
""")
    assert len(said) == 6
    assert max(said) < T_MS / 2
    assert waiters(namespace) == 0
    no_lease_is_left(p, [5])


def test_arguments(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p, 5)
    p.call("publish", name="kv5")
    for wanted, said in (([(req(1, 5), 0), (req(9, 5), 1)], [NOT_LINKED, 1, []]),
                         ([(req(1, 5), 0), (req(1, 6), ROWS)], ["LLM_PARAM_INVALID", 1, []])):
        d.call("fill", name="kv", generation=9)
        before = d.read("kv")
        send_many(d, *wanted)
        assert end_of_many(d) == said
        assert np.array_equal(d.read("kv"), before), "looked at before the first byte"
    send_many(d)
    assert end_of_many(d) == [SUCCESS, None, None]
    for code, outcome in (("pull_many([], wait=1)", "TypeError"), ("pull_many([], wait=True, timeout_ms=0)", "LLM_PARAM_INVALID"),
                          ("prepare_pull(agent.caches['kv'], wait=1)", "TypeError"),
                          ("prepare_pull(agent.caches['kv'], wait=True, timeout_ms=-1)", "LLM_PARAM_INVALID")):
        assert d.outcome("execute", code=f"agent.dist.kv_cache_manager.{code}") == outcome


def test_more_rows_than_one_sleep_takes(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """Beyond 128 words the call wakes up by itself now and then."""
    count = 150
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", num_tensors=2, shape=[count, 8])
    p.call("allocate", name="rows", num_tensors=2, shape=[count, 8], keys=[req(1, row) for row in range(count)], publish=False)
    p.call("fill", name="rows", generation=3)
    send_many(d, *((req(1, row), row) for row in range(count)))
    until_waiting(namespace, count)
    p.call("publish", name="rows")
    assert end_of_many(d) == [SUCCESS, None, None]
    assert np.array_equal(d.read("kv"), p.read("rows"))


# -- prepared ----------------------------------------------------------------------------------------------------------

def test_a_prepared_pull_waits_for_key_and_layers(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    for number in (5, 6):
        d.send("execute", code=PREPARED.format(row=1, how="") + f"result = pull({key_code(req(1, number))})")
        until_waiting(namespace)
        allocate(p, number)
        for layer in (1, 2):
            until_waiting(namespace)
            p.call("publish", name=f"kv{number}", layers=layer)
        answer = d.receive()
        assert answer.outcome == SUCCESS, answer.trace
        assert arrived(p, d, number, 1)
        assert d.outcome("pull", key=req(1, number), name="kv") == NOT_EXIST, "consumed"
    assert waiters(namespace) == 0
    no_lease_is_left(p, [5, 6])


def test_each_prepared_call_has_a_deadline_of_its_own(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p, 5)
    said = d.call("execute", code=PREPARED.format(row=0, how=", timeout_ms=100") + """
result = []
for _ in range(2):
    began = time.monotonic()
    try:
        pull(shmkv.CacheKey(1, 5, 0))
    except shmkv.LLMException as error:
        result.append([error.status_code.name, (time.monotonic() - began) * 1000])
""")
    assert [status for status, _ in said] == [TIMED_OUT] * 2
    assert all(100 <= took_ms < T_MS / 2 for _, took_ms in said)
    p.call("publish", name="kv5")
    assert d.outcome("execute", code=PREPARED.format(row=0, how="") + "pull(shmkv.CacheKey(1, 5, 0))") == SUCCESS
    assert arrived(p, d, 5, 0)


@pytest.mark.parametrize("end", ["die", "remove", "deallocate the destination"])
def test_a_prepared_pull_that_will_not_be(namespace: Namespace, pair: tuple[Peer, Peer], end: str) -> None:
    p, d = pair
    allocate(p, 5)
    code = PREPARED.format(row=0, how="") + "agent.prepared = pull\n"
    if end == "deallocate the destination":
        d.call("execute", code=code)
        d.call("deallocate", name="kv")
        assert d.outcome("execute", code="agent.prepared(shmkv.CacheKey(1, 5, 0))") == NOT_EXIST
        return
    d.send("execute", code=code + "pull(shmkv.CacheKey(1, 5, 0))")
    until_waiting(namespace)
    if end == "die":
        p.kill()
    else:
        p.call("remove_key", key=req(1, 5))
    answer = d.receive()
    assert answer.outcome == (TIMED_OUT if end == "die" else NOT_EXIST), answer.trace
    assert answer.ms < T_MS / 2
    assert d.outcome("execute", code="agent.prepared(7)") == "TypeError"


def test_by_id(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    number = p.call("allocate", name="new", publish=False)
    p.call("fill", name="new", generation=4)
    d.send("execute", code=PREPARED.format(row=2, how="") + f"pull({key_code(by_id(1, number, 1))})")
    until_waiting(namespace)
    p.call("publish", name="new")
    assert d.receive().outcome == SUCCESS
    assert np.array_equal(d.read("kv")[:, :, 2], p.read("new")[:, :, 1])
