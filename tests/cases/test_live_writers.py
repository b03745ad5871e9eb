"""Field cases FR-064 and FR-081: tables that grow, and headers that a neighbour rewrites, while they are read. In an ordinary
build, and in one with AddressSanitizer and UndefinedBehaviorSanitizer."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import builds
import numpy as np
import pytest
from peer import Namespace, Peer, req
from reference import SUCCESS
from shared_bytes import SharedFile, directory_of, segments_of

pytestmark = pytest.mark.timeout(900)           # the first use of an instrumented build makes it
ANSWERS = {SUCCESS, "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID", "LLM_FAILED", "LLM_WAIT_PROCESS_TIMEOUT"}
SHAPE: dict[str, Any] = {"num_tensors": 4, "shape": [4, 256], "dtype": "DT_INT8"}


@pytest.fixture(params=["ordinary", "address"])
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of the processes of the test: the ordinary build, or the one with sanitizers, which end the process at their first report."""
    if request.param == "ordinary":
        return {}
    return builds.environment("address", builds.build("address"))


def _cluster(namespace: Namespace, role: str, cluster_id: int, env: dict[str, str]) -> Peer:
    return namespace.start_cluster(role, cluster_id, env=env, sync_kv_timeout=20000)


_COME_AND_GO = """
import threading
manager, desc = agent.dist.kv_cache_manager, shmkv.CacheDesc(4, [4, 256], shmkv.DataType.DT_INT8)
agent.stop, agent.turns = threading.Event(), 0
def keep_on():
    while not agent.stop.is_set():
        for number in range(1000):
            keys = [shmkv.CacheKey(1, 1000 + 4 * number + row) for row in range(4)]
            cache = manager.allocate_cache(desc, keys, publish=False)
            for tensor in cache.tensors:
                tensor.numpy()[...] = number % 100
            manager.publish(cache)
            manager.deallocate_cache(cache)
            if agent.stop.is_set():
                break
        for number in range(4000):
            manager.remove_cache_key(shmkv.CacheKey(1, 1000 + number))
        agent.turns += 1
agent.thread = threading.Thread(target=keep_on)
agent.thread.start()
"""
_STOP = "agent.stop.set()\nagent.thread.join()\nresult = agent.turns"
_PULL_SOME = """
import random, time
manager, cache, chance = agent.dist.kv_cache_manager, agent.caches["kv"], random.Random(1)
arrays, said, wrong = [tensor.numpy() for tensor in cache.tensors], {}, []
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    number = chance.randrange(4000)
    try:
        manager.pull_cache(shmkv.CacheKey(1, 1000 + number), cache, 1)
        outcome = "LLM_SUCCESS"
        found = {int(value) for array in arrays for value in array[1]}
        if found != {number // 4 % 100}:
            wrong.append([number, sorted(found)])
    except shmkv.LLMException as error:
        outcome = error.status_code.name
    said[outcome] = said.get(outcome, 0) + 1
result = [said, wrong[:10]]
"""


def test_fr_064_an_index_that_grows_while_it_is_read(namespace: Namespace, variables: dict[str, str],
                                                     rounds: Callable[[int], int]) -> None:
    p, d = _cluster(namespace, "PROMPT", 1, variables), _cluster(namespace, "DECODER", 2, variables)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv", **SHAPE)
    p.call("execute", code=_COME_AND_GO)
    with SharedFile(directory_of(namespace, 1)) as directory:
        small = directory.get("DirectoryHeader", "index_word") & 0xFF
        said, wrong = d.call("execute", code=_PULL_SOME.replace("{seconds}", str(rounds(3))))
        grown = directory.get("DirectoryHeader", "index_word") & 0xFF
    p.call("execute", code=_STOP)
    assert wrong == [], "never another key's bytes"
    assert set(said) <= {SUCCESS, "LLM_KV_CACHE_NOT_EXIST"}, "the bytes, or not there"
    assert said[SUCCESS] > 20, "many were there"
    assert grown > small, "the index grew meanwhile"


# What is flipped: (struct, field, values that are put one after the other; None is the right one).
FLIPS: list[tuple[str, str, list[int | None]]] = [
    ("TensorRecord", "inner", [None, 128, 2**63]), ("TensorRecord", "offset", [None, 4096 + 64, 2**64 - 64]),
    ("TensorRecord", "nbytes", [None, 512, 2**63 + 1]), ("TensorRecord", "rows", [None, 2, 2**32]),
    ("CacheRecord", "num_tensors", [None, 2, 2**32 - 1]), ("CacheRecord", "first_tensor", [None, 1, 2**31]),
    ("CacheRecord", "segment_nbytes", [None, 4096, 2**62]), ("CacheRecord", "num_rows", [None, 1, 2**32 - 1]),
    ("CacheRecord", "first_row", [None, 1, 2**32 - 1]), ("CacheRecord", "first_coverage", [None, 1, 2**32 - 1]),
    ("CacheRecord", "coverage_lines", [None, 2, 2**32 - 1]), ("RowRecord", "batch_index", [None, 2, 2**32 - 1]),
    ("RowRecord", "cache_slot", [None, 1, 2**32 - 1]), ("DirectoryHeader", "index_word", [None, 1 << 16 | 9, 2**64 - 1]),
    ("DirectoryHeader", "caches_reserved", [None, 1, 2**32 - 1]), ("DirectoryHeader", "rows_reserved", [None, 1, 2**32 - 1]),
]


def _flip(directory: SharedFile, stop: threading.Event) -> None:
    """Every field in turn, thousands of times a second; all are right again at the end."""
    flips = [(struct, field, [directory.get(struct, field) if value is None else value for value in values])
             for struct, field, values in FLIPS]
    while not stop.is_set():
        for struct, field, values in flips:
            for value in (values[1], values[0], values[2], values[0]):
                directory.put(struct, field, value)


_PULL_HOSTILE = """
import time
manager, cache = agent.dist.kv_cache_manager, agent.caches["kv"]
arrays, said, wrong = [tensor.numpy() for tensor in cache.tensors], {}, []
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    for array in arrays:
        array[...] = 90
    try:
        manager.pull_cache(shmkv.CacheKey(1, 7), cache, 1, src_cache_offset=0, size=256)
        outcome = "LLM_SUCCESS"
        # With hostile numbers another row or tensor of the same cache may come, but nothing else.
        wrong += [int(value) for array in arrays for value in array[1] if not 0 <= value < 16]
    except shmkv.LLMException as error:
        outcome = error.status_code.name
    wrong += [int(value) for array in arrays for row in (0, 2, 3) for value in array[row] if value != 90]
    said[outcome] = said.get(outcome, 0) + 1
result = [said, wrong[:10]]
"""


def test_fr_081_a_neighbour_rewrites_what_is_being_read(namespace: Namespace, variables: dict[str, str],
                                                        rounds: Callable[[int], int]) -> None:
    p, d = _cluster(namespace, "PROMPT", 1, {}), _cluster(namespace, "DECODER", 2, variables)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    p.call("allocate", name="kv", keys=[req(1, 7)], **SHAPE)
    p.call("execute", code="for number, tensor in enumerate(agent.caches['kv'].tensors):\n"
                           "    tensor.numpy()[...] = 4 * number + np.arange(4, dtype=np.int8)[:, None]")
    d.call("allocate", name="kv", **SHAPE)
    stop = threading.Event()
    with SharedFile(directory_of(namespace, 1)) as directory:
        flipper = threading.Thread(target=_flip, args=(directory, stop))
        d.send("execute", code=_PULL_HOSTILE.replace("{seconds}", str(rounds(3))))
        flipper.start()
        answer = d.receive()
        stop.set()
        flipper.join()
    assert answer.outcome == SUCCESS, answer.trace
    said, wrong = answer.value
    assert wrong == [], "nothing was read or written outside the cache"
    assert set(said) <= ANSWERS, f"right bytes or LLMException: {said}"
    assert len(said) > 1, "some met a bad number"
    assert d.outcome("pull", key=req(1, 7), name="kv", src_cache_offset=0) in ANSWERS, "no signal"
    assert segments_of(namespace, 1), "P was not harmed"
    assert np.all(p.read("kv") < 16), "nor its bytes"
