"""Field cases FR-033, FR-039 and FR-071: rows that are filled again and again while others pull them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mid_copy import CONTENT, ONE, fill, stop_in_the_middle, stoppable
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from shared_bytes import SharedFile, directory_of

pytestmark = pytest.mark.timeout(600)     # one of them waits for a build
NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
SHAPE: dict[str, Any] = {"num_tensors": 2, "shape": [1, 16384], "dtype": "DT_INT32"}

_KEYS = """
import random, threading
from agent_keys import make_key
manager, KEYS, U64MAX = agent.dist.kv_cache_manager, 6, 2**64 - 1
def name(epoch, key):
    return make_key(["key", 1, U64MAX, 0, KEYS * epoch + key])
"""
# P: six caches, each filled with one number that says which key and which generation it is. Every eighth generation the keys get
# new ids, every second one the memory is given back and taken anew.
_REFILL = _KEYS + """
desc = shmkv.CacheDesc(2, [1, 16384], shmkv.DataType.DT_INT32)
agent.stop, agent.turns, kept = threading.Event(), 0, {}
def fill(cache, number):
    for tensor in cache.tensors:
        tensor.numpy()[...] = number
def refill(generation, key):
    if generation:
        manager.remove_cache_key(name((generation - 1) // 8, key))
    if generation % 2 == 0:
        if key in kept:
            manager.deallocate_cache(kept[key])
        kept[key] = manager.allocate_cache(desc, publish=False)
    else:
        manager.unbind(kept[key], [0])
    fill(kept[key], KEYS * generation + key)
    manager.bind(kept[key], {0: name(generation // 8, key)})
def keep_on():
    while not agent.stop.is_set():
        refill(*divmod(agent.turns, KEYS))
        agent.turns += 1
agent.thread = threading.Thread(target=keep_on)
agent.thread.start()
"""
_STOP = "agent.stop.set()\nagent.thread.join()\nresult = agent.turns"
# D: pulls a random key, and looks for a newer id of it when that one is gone.
_PULL_RANDOM = _KEYS + """
cache, chance, epoch, pulls, wrong = agent.caches["kv"], random.Random({seed}), 0, 0, []
arrays = [tensor.numpy() for tensor in cache.tensors]
def pulled(epoch, key):
    try:
        manager.pull_cache(name(epoch, key), cache)
        return True
    except shmkv.LLMException as error:
        assert error.status_code.name == "LLM_KV_CACHE_NOT_EXIST", error
        return False
while pulls < {count}:
    key = chance.randrange(KEYS)
    found = next((epoch + ahead for ahead in range(64) if pulled(epoch + ahead, key)), None)
    if found is None:
        continue
    pulls, epoch = pulls + 1, found
    numbers = sorted({int(value) for array in arrays for value in (array.min(), array.max())})
    if len(numbers) != 1 or numbers[0] % KEYS != key or numbers[0] // KEYS // 8 != found:
        wrong.append([key, found, numbers])
    # Another key may still be one id behind.
    epoch = max(0, epoch - 1)
result = [pulls, wrong[:10]]
"""


def test_fr_033_nobody_gets_another_requests_bytes(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    p, readers = prompt(1), [decoder(2 + number) for number in range(4)]
    p.call("execute", code=_REFILL)
    for number, d in enumerate(readers):
        d.call("allocate", name="kv", **SHAPE)
        d.send("execute", code=_PULL_RANDOM.replace("{seed}", str(number)).replace("{count}", str(rounds(2000))))
    found = [d.receive() for d in readers]
    refilled = p.call("execute", code=_STOP)
    for answer in found:
        assert answer.outcome == SUCCESS, answer.trace
        pulls, wrong = answer.value
        assert wrong == [], "one number only, and that of the key and its generation"
        assert pulls >= rounds(2000), "in as many pulls as were wanted"
    assert refilled > 100, "while P removed and republished"


# Every second row stays published for a moment: on a busy machine D might else never run while there is one.
_COUNT_UP = """
import threading, time
manager, cache, key = agent.dist.kv_cache_manager, agent.caches["kv"], shmkv.CacheKey(1, 7)
agent.stop, agent.turns = threading.Event(), 0
def keep_on():
    while not agent.stop.is_set():
        agent.turns += 1
        manager.unbind(cache, [0])
        for tensor in cache.tensors:
            tensor.numpy()[...] = agent.turns
        manager.bind(cache, {0: key})
        if agent.turns % 2:
            time.sleep(0.0001)
agent.thread = threading.Thread(target=keep_on)
agent.thread.start()
"""
_PULL_NEWER = """
cache, key, last, pulls, wrong = agent.caches["kv"], shmkv.CacheKey(1, 7), 0, 0, []
arrays = [tensor.numpy() for tensor in cache.tensors]
while pulls < {count}:
    try:
        agent.dist.kv_cache_manager.pull_cache(key, cache, src_cache_offset=0, size=65536)
    except shmkv.LLMException as error:
        assert error.status_code.name == "LLM_KV_CACHE_NOT_EXIST", error
        continue
    pulls += 1
    numbers = sorted({int(value) for array in arrays for value in (array.min(), array.max())})
    if len(numbers) != 1 or numbers[0] < last:
        wrong.append([last, numbers])
    last = numbers[-1]
result = [last, wrong[:10]]
"""


def test_fr_039_a_published_row_is_of_one_generation(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    p, d = prompt(1), decoder(2)
    for peer in (p, d):
        peer.call("allocate", name="kv", **SHAPE)
    p.call("execute", code=_COUNT_UP)
    last, wrong = d.call("execute", code=_PULL_NEWER.replace("{count}", str(rounds(4000))))
    published = p.call("execute", code=_STOP)
    assert wrong == [], "0 mixed or older rows"
    assert 100 < last <= published, "of many generations"


def _set_generation(directory: SharedFile, p: Peer, name: str, generation: int) -> None:
    """The row's next binding gets `generation` + 1."""
    p.call("unbind", name=name, rows=[0])
    directory.put("RowRecord", "word", generation << 8 | directory.get("RowRecord", "word") & 0xFF)
    p.call("bind", name=name, keys=[(0, req(1, 7))])


@pytest.mark.parametrize("wraps_at", [2**32, 2**56])
def test_fr_071_a_generation_that_comes_round_is_another_one(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                             wraps_at: int) -> None:
    """2**56: a row's word holds the generation above 8 bits of state, 64 bits in all."""
    p, d = prompt(1), decoder(2, env=stoppable())
    for peer, name in ((p, "old"), (d, "kv")):
        peer.call("allocate", name=name, **ONE)
    d.call("pull", key=by_id(1, 1), name="kv")
    with SharedFile(directory_of(namespace, 1)) as directory:
        fill(p, "old", 11)
        _set_generation(directory, p, "old", wraps_at - 4)
        stop_in_the_middle(d, req(1, 7))
        before = directory.get("RowRecord", "word") >> 8
        for number in range(5):
            p.call("unbind", name="old", rows=[0])
            fill(p, "old", 20 + number)
            p.call("bind", name="old", keys=[(0, req(1, 7))])
        after = directory.get("RowRecord", "word") >> 8
    d.cont()
    assert after == (before + 15) % 2**56, "it came round meanwhile"
    assert d.receive().outcome == NOT_EXIST, "D sees that it changed"
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS
    assert d.call("execute", code=CONTENT) == [24], "the next pull has the bytes of now"


@pytest.mark.parametrize("wraps_at", [2**32, 2**56])
def test_fr_071_coverage_knows_its_generation_at_the_wrap(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                          wraps_at: int) -> None:
    """A coverage word holds the low half of the generation that its bits belong to."""
    p, d = prompt(1), decoder(2)
    for peer in (p, d):
        peer.call("allocate", name="kv")
    halves = [{"src_layer_range": range(n, n + 1), "dst_layer_range": range(n, n + 1)} for n in range(2)]
    with SharedFile(directory_of(namespace, 1)) as directory:
        _set_generation(directory, p, "kv", wraps_at - 8)
    for _ in range(8):
        assert d.outcome("pull", key=req(1, 7), name="kv", **halves[0]) == SUCCESS
        p.call("bind", name="kv", keys=[(0, req(1, 7))])
        said = [d.outcome("pull", key=req(1, 7), name="kv", **half) for half in (halves[1], halves[1], halves[0], halves[1])]
        assert said == [SUCCESS, SUCCESS, SUCCESS, NOT_EXIST], "only layers pulled since the last binding count"
        p.call("bind", name="kv", keys=[(0, req(1, 7))])
