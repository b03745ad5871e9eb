"""Prepared pulls and pull_many between two processes: what the plain pull answers, also after the other side changed."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, Pull, canary, expected_pull, geometry, pattern

pytestmark = pytest.mark.timeout(120)
SHAPE: dict[str, Any] = {"num_tensors": 8, "shape": [3, 64], "dtype": "DT_FLOAT16"}
SOURCE = pattern(geometry(8, [3, 64], 2), 1)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"

PREPARE = """
manager = agent.dist.kv_cache_manager
agent.prepared = manager.prepare_pull(agent.caches["kv"], batch_index=1)
"""
# Several pulls by one prepared object: the first finds the link, the others go the quick way.
CALL = """
import agent as program
def outcome(key):
    try:
        agent.prepared(program.make_key(key))
    except shmkv.LLMException as error:
        return error.status_code.name
    return "LLM_SUCCESS"
result = [outcome(key) for key in KEYS]
"""


def prepared(d: Peer, *keys: list[Any]) -> Any:
    return d.call("execute", code=f"KEYS = {list(keys)!r}\n" + CALL)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2), req(1, 3)], **SHAPE)
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv", **SHAPE)
    d.call("canary", name="kv")
    d.call("execute", code=PREPARE)
    return p, d


def test_prepared_pull_brings_each_key_and_consumes_it(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    for row in range(3):
        assert prepared(d, req(1, row + 1)) == [SUCCESS]
        np.testing.assert_array_equal(d.read("kv")[:, :, 1], SOURCE[:, :, row])
    assert (d.read("kv")[:, :, 0] == 0x5A).all()
    assert prepared(d, req(1, 1), req(1, 9), by_id(1, 1, 7)) == [NOT_EXIST] * 3


def test_prepared_pull_of_a_freed_cache_is_never_stale(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert prepared(d, by_id(1, 1), by_id(1, 1)) == [SUCCESS] * 2
    for number in (1, 2, 3):
        p.call("remove_key", key=req(1, number))
    p.call("deallocate", name="kv")
    p.call("allocate", name="next", **SHAPE)             # the same memory under another generation
    p.call("fill", name="next", generation=2)
    d.call("canary", name="kv")
    assert prepared(d, by_id(1, 1), req(1, 1)) == [NOT_EXIST] * 2
    assert (d.read("kv") == 0x5A).all()
    assert prepared(d, by_id(1, 2)) == [SUCCESS]
    np.testing.assert_array_equal(d.read("kv")[:, :, 1], pattern(geometry(8, [3, 64], 2), 2)[:, :, 0])


def test_prepared_pull_meets_another_shape(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("allocate", name="short", keys=[req(1, 11)], num_tensors=8, shape=[1, 8], dtype="DT_FLOAT16")
    p.call("allocate", name="few", keys=[req(1, 12)], num_tensors=4, shape=[1, 64], dtype="DT_FLOAT16")
    p.call("allocate", name="long", keys=[req(1, 13)], num_tensors=8, shape=[2, 80], dtype="DT_FLOAT16")
    p.call("fill", name="long", generation=3)
    assert prepared(d, req(1, 1), req(1, 11), req(1, 12), req(1, 13)) == [SUCCESS, PARAM_INVALID, PARAM_INVALID, SUCCESS]
    long = pattern(geometry(8, [2, 80], 2), 3)
    np.testing.assert_array_equal(d.read("kv")[:, :, 1, :128], long[:, :, 0, :128])


RESHAPED: list[tuple[dict[str, Any], str]] = [
    ({"num_tensors": 8, "shape": [2, 80]}, SUCCESS), ({"num_tensors": 8, "shape": [2, 8]}, PARAM_INVALID),
    ({"num_tensors": 6, "shape": [2, 64]}, PARAM_INVALID), ({"num_tensors": 9, "shape": [2, 64]}, PARAM_INVALID),
    ({"num_tensors": 8, "shape": [8, 2, 9], "batch_dim": 1}, SUCCESS), ({"num_tensors": 8, "shape": [2, 32, 2]}, SUCCESS),
    ({"num_tensors": 8, "shape": [2, 129], "dtype": "DT_INT8"}, SUCCESS),
]


@pytest.mark.parametrize("recycled", [True, False], ids=["the same memory", "other memory"])
@pytest.mark.parametrize(("shape", "answer"), RESHAPED, ids=[str(list(shape.values())) for shape, _ in RESHAPED])
def test_prepared_pull_meets_another_shape_under_the_same_key(namespace: Namespace, pair: tuple[Peer, Peer], shape: dict[str, Any],
                                                             answer: str, recycled: bool) -> None:
    """It has plan, mapping and link of the first shape by then; what the plain pull of the row does into an equal cache counts."""
    p, d = pair
    assert prepared(d, req(1, 1), req(1, 3)) == [SUCCESS] * 2
    segments = namespace.segments()
    for number in (1, 2, 3):
        p.call("remove_key", key=req(1, number))
    if recycled:
        p.call("deallocate", name="kv")
    wanted = {"dtype": "DT_FLOAT16", "batch_dim": 0, **shape}
    cache_id = p.call("allocate", name="next", keys=[req(1, 1)], **wanted)        # in the row that it had
    assert (namespace.segments() == segments) == recycled
    p.call("fill", name="next", generation=2)
    d.call("allocate", name="plain", **SHAPE)
    for name in ("kv", "plain"):
        d.call("canary", name=name)
    assert prepared(d, req(1, 1)) == [answer]
    assert d.outcome("pull", key=by_id(1, cache_id), name="plain", batch_index=1) == answer
    np.testing.assert_array_equal(d.read("kv"), d.read("plain"))
    source = geometry(wanted["num_tensors"], wanted["shape"], 1 if wanted["dtype"] == "DT_INT8" else 2, wanted["batch_dim"])
    said, content = expected_pull(pattern(source, 2), canary(geometry(8, [3, 64], 2)), Pull(batch_index=1))
    assert said == answer
    np.testing.assert_array_equal(d.read("kv"), content)


def test_prepared_pull_after_the_peer_restarted(pair: tuple[Peer, Peer], prompt: StartPeer) -> None:
    p, d = pair
    assert prepared(d, req(1, 1)) == [SUCCESS]
    p.kill()
    assert prepared(d, req(1, 2), req(1, 2)) == [TIMED_OUT] * 2
    heir = prompt(1)
    heir.call("allocate", name="kv", keys=[req(1, 2)], **SHAPE)
    heir.call("fill", name="kv", generation=5)
    assert prepared(d, req(1, 2)) == [TIMED_OUT], "until unlink and link"
    d.call("unlink", ids=[1])
    assert prepared(d, req(1, 2)) == ["LLM_NOT_YET_LINK"]
    d.call("link", ids=[1])
    assert prepared(d, req(1, 2)) == [SUCCESS]
    np.testing.assert_array_equal(d.read("kv")[:, :, 1], pattern(geometry(8, [3, 64], 2), 5)[:, :, 0])


def test_prepared_pull_into_a_deallocated_cache(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert prepared(d, req(1, 1)) == [SUCCESS]
    d.call("deallocate", name="kv")
    assert prepared(d, req(1, 2)) == [NOT_EXIST]


@pytest.mark.parametrize(("code", "kind"), [
    ("agent.prepared(None)", "TypeError"),
    ("agent.prepared(shmkv.BlocksCacheKey(1))", "TypeError"),
    ("agent.prepared(shmkv.CacheKey(1, 2**64 - 1))", "LLMParamError"),
    ("agent.prepared(shmkv.CacheKey(1, 1, 0, 1))", "LLMParamError"),
    ("agent.dist.kv_cache_manager.prepare_pull(agent.caches['kv'], batch_index=3); agent.prepared(None)", "TypeError"),
    ("agent.dist.kv_cache_manager.prepare_pull(agent.caches['kv'], size=0)", "LLMParamError"),
    ("agent.dist.kv_cache_manager.prepare_pull(agent.caches['kv'], unheard_of=1)", "TypeError"),
    ("agent.dist.kv_cache_manager.prepare_pull(None)", "TypeError"),
])
def test_prepared_pull_checks_its_arguments(pair: tuple[Peer, Peer], code: str, kind: str) -> None:
    _, d = pair
    assert prepared(d, req(1, 1)) == [SUCCESS]
    assert kind in d.attempt("execute", code=code).kinds


MANY = """
import agent as program
cache = agent.caches["kv"]
requests = [shmkv.PullRequest(program.make_key(key), cache, row) for key, row in WANTED]
try:
    agent.dist.kv_cache_manager.pull_many(requests)
    result = ["LLM_SUCCESS", None]
except shmkv.LLMException as error:
    result = [error.status_code.name, error.failed_request]
"""


def many(d: Peer, *wanted: tuple[list[Any], int]) -> Any:
    return d.call("execute", code=f"WANTED = {list(wanted)!r}\n" + MANY)


def test_pull_many_fills_several_rows(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert many(d, (req(1, 3), 0), (req(1, 1), 1), (by_id(1, 1, 1), 2)) == [SUCCESS, None]
    np.testing.assert_array_equal(d.read("kv"), SOURCE[:, :, [2, 0, 1]])


def test_pull_many_stops_at_the_first_failure(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert many(d, (req(1, 1), 0), (req(1, 9), 1), (req(1, 2), 2)) == [NOT_EXIST, 1]
    after = d.read("kv")
    np.testing.assert_array_equal(after[:, :, 0], SOURCE[:, :, 0])
    assert (after[:, :, 1:] == 0x5A).all()
    assert many(d, (req(1, 1), 0)) == [NOT_EXIST, 0], "consumed"
    assert many(d, (req(1, 2), 2)) == [SUCCESS, None], "not touched by the call that stopped before it"


def test_pull_many_checks_destinations_before_the_first_byte(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert many(d, (req(1, 1), 0), (req(1, 2), 3)) == [PARAM_INVALID, 1]
    assert (d.read("kv") == 0x5A).all()
    assert many(d, (req(1, 1), 0)) == [SUCCESS, None]


LAST = "result = list(agent.dist.kv_cache_manager.last_pull())"


def test_last_pull_tells_what_it_did(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert d.call("execute", code=LAST) == [0, 0, 0, "", False]
    d.call("pull", key=req(1, 1), name="kv", batch_index=0)
    nbytes, wait_ns, copy_ns, kernel, streamed = d.call("execute", code=LAST)
    assert (nbytes, wait_ns >= 0, copy_ns > 0, streamed) == (8 * 128, True, True, False)
    assert kernel in d.call("execute", code="from shmkv import _copy; result = _copy.supported_kernels()")
    # A prepared one, after the loop was changed; and the change alone says nothing of a pull.
    assert d.call("execute", code="from shmkv import _copy; _copy.configure('c', 0)\n" + LAST)[3:] == [kernel, False]
    assert prepared(d, req(1, 2), req(1, 3)) == [SUCCESS] * 2
    assert d.call("execute", code=LAST)[3:] == ["c", True]


def test_last_pull_by_system_calls(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY": "pread", "SHMKV_NT_THRESHOLD": "0"})
    p.call("allocate", name="kv", keys=[req(1, 1)], **SHAPE)
    d.call("allocate", name="kv", **SHAPE)
    d.call("pull", key=req(1, 1), name="kv")
    nbytes, _, _, kernel, streamed = d.call("execute", code=LAST)
    assert (nbytes, kernel, streamed) == (8 * 128, "pread", False)
