"""Field cases FR-033, FR-039 and FR-071: rows that are filled again and again while others pull them."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from shared_bytes import SharedFile, directory_of, segments_of

import shmkv
from shmkv import _layout

pytestmark = pytest.mark.timeout(120)
NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
MIB = 1 << 20

# P: six caches, each filled with one number; the number says which key and which generation it is. Every eighth generation the
# keys get new ids, every second one the memory is given back and taken anew.
_REFILL = """
import threading
manager, desc = agent.dist.kv_cache_manager, shmkv.CacheDesc(2, [1, 16384], shmkv.DataType.DT_INT32)
KEYS = 6
agent.stop, agent.turns = threading.Event(), 0
def name(key, generation):
    return shmkv.CacheKey(1, prefix_id=KEYS * (generation // 8) + key)
def fill(cache, number):
    for tensor in cache.tensors:
        tensor.numpy()[...] = number
def refill():
    kept = {}
    generation = 0
    while not agent.stop.is_set():
        for key in range(KEYS):
            number = KEYS * generation + key
            if generation:
                manager.remove_cache_key(name(key, generation - 1))
            if generation % 2 == 0:
                if key in kept:
                    manager.deallocate_cache(kept[key])
                kept[key] = manager.allocate_cache(desc, publish=False)
            else:
                manager.unbind(kept[key], [0])
            fill(kept[key], number)
            manager.bind(kept[key], {0: name(key, generation)})
            agent.turns += 1
        generation += 1
agent.thread = threading.Thread(target=refill)
agent.thread.start()
"""
_STOP = "agent.stop.set()\nagent.thread.join()\nresult = agent.turns"
_PULL_RANDOM = """
import random
manager, cache = agent.dist.kv_cache_manager, agent.caches["kv"]
chance, KEYS, epoch, pulls, wrong = random.Random({seed}), 6, 0, 0, []
arrays = [tensor.numpy() for tensor in cache.tensors]
while pulls < {count}:
    key = chance.randrange(KEYS)
    try:
        manager.pull_cache(shmkv.CacheKey(1, prefix_id=KEYS * epoch + key), cache)
    except shmkv.LLMException as error:
        assert error.status_code.name == "LLM_KV_CACHE_NOT_EXIST", error
        epoch += chance.randrange(2) if epoch_is_over(error) else 0
        continue
    pulls += 1
    numbers = {int(value) for array in arrays for value in (array.min(), array.max())}
    number = next(iter(numbers))
    if len(numbers) != 1 or number % KEYS != key or number // KEYS // 8 != epoch:
        wrong.append([key, epoch, sorted(numbers)])
result = [pulls, wrong[:10]]
""".replace(" if epoch_is_over(error) else 0", "").replace(
    "epoch += chance.randrange(2)", "epoch = newest(epoch, key)")
_NEWEST = """
def newest(epoch, key):
    for ahead in range(50):
        try:
            manager.pull_cache(shmkv.CacheKey(1, prefix_id=KEYS * (epoch + ahead) + key), cache)
            return epoch + ahead
        except shmkv.LLMException:
            pass
    return epoch
"""


def test_fr_033_nobody_gets_another_requests_bytes(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    p, readers = prompt(1), [decoder(2 + number) for number in range(4)]
    p.call("execute", code=_REFILL)
    for number, d in enumerate(readers):
        d.call("allocate", name="kv", num_tensors=2, shape=[1, 16384], dtype="DT_INT32")
        code = _NEWEST + _PULL_RANDOM.replace("{seed}", str(number)).replace("{count}", str(rounds(1500)))
        d.send("execute", code=code)
    found = [d.receive() for d in readers]
    refilled = p.call("execute", code=_STOP)
    for answer in found:
        assert answer.outcome == SUCCESS, answer.trace
        pulls, wrong = answer.value
        assert wrong == [], "one number only, and that of the key and its generation"
        assert pulls >= rounds(1500), "in as many pulls as were wanted"
    assert refilled > 100, "while P removed and republished"
