"""Field cases FR-029, 038, 043, 055: keys that are not there, and how the caller hears of it."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from peer import U64MAX, Peer, StartPeer, by_id, prefix, req
from reference import SUCCESS, canary, geometry, pattern

pytestmark = pytest.mark.timeout(120)
MISSING, INVALID, NOT_LINKED = "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID", "LLM_NOT_YET_LINK"
ROWS = geometry(4, [2, 8], 2)
T_MS = 20000


def _untouched(d: Peer) -> None:
    np.testing.assert_array_equal(d.read("kv"), canary(ROWS), err_msg="the destination is all 0x5A")


def _pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P with keys 7 (consumed), 8 (removed) and 9 (alive); D with an untouched destination."""
    p, d = prompt(1), decoder(2)
    for number in (7, 8, 9):
        p.call("allocate", name=f"kv{number}", keys=[req(1, number)])
        p.call("fill", name=f"kv{number}", generation=number)
    p.call("remove_key", key=req(1, 8))
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS
    d.call("canary", name="kv")
    return p, d


def test_fr_029_a_key_that_is_not_there_always_raises(prompt: StartPeer, decoder: StartPeer) -> None:
    _, d = _pair(prompt, decoder)
    for state, number in (("never published", 6), ("consumed", 7), ("removed", 8)):
        answers = [d.attempt("pull", key=req(1, number), name="kv") for _ in range(5)]
        assert [answer.outcome for answer in answers] == [MISSING] * 5, f"{state}: an exception every time"
        assert all(answer.ms < T_MS / 2 for answer in answers), f"{state}: at once"
        _untouched(d)
    assert d.outcome("pull", key=req(1, 9), name="kv") == SUCCESS


def test_fr_038_names_that_differ_by_one_field(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(5)
    p.call("allocate", name="kv", keys=[req(1, 7)])
    d.call("allocate", name="kv")
    d.call("canary", name="kv")
    asked: list[tuple[list[Any], str, str]] = [
        (req(1, 8), MISSING, "req_id=8"), (req(1, 7, 1), MISSING, "model_id=1"),
        (req(2, 7), NOT_LINKED, "cluster_id=2"), (prefix(1, 7), MISSING, "prefix_id=7"),
        (["key", 1, 7, 0, 7], INVALID, "prefix_id=7"), (["key", 1, U64MAX, 0, U64MAX], INVALID, str(U64MAX))]
    answers = [d.attempt("pull", key=key, name="kv") for key, _, _ in asked]
    assert [answer.outcome for answer in answers] == [wanted for _, wanted, _ in asked], "each fails"
    assert all(answer.ms < T_MS / 2 for answer in answers), "without waiting"
    for answer, (_, _, named) in zip(answers, asked, strict=True):
        assert named in answer.text, "its own message names the key asked for"
    assert len({answer.text for answer in answers}) == len(asked), "each its own"
    assert {"ValueError", "LLMException"} <= set(answers[-1].kinds) & set(answers[-2].kinds), "argument errors"
    _untouched(d)


def test_fr_043_four_reasons_can_be_told_apart(prompt: StartPeer, decoder: StartPeer) -> None:
    _, d = _pair(prompt, decoder)
    other = prompt(3)
    other.call("allocate", name="kv", keys=[req(3, 11)])
    states = {"never published": req(1, 6), "consumed": req(1, 7), "removed": req(1, 8), "another cluster": req(3, 11)}
    answers = {state: d.attempt("pull", key=key, name="kv") for state, key in states.items()}
    codes = [answer.outcome for answer in answers.values()]
    assert codes == [MISSING, MISSING, MISSING, NOT_LINKED], "status codes"
    reasons = {re.sub("[0-9]+", "", answer.text) for answer in answers.values()}
    assert len(reasons) == 4, "the texts differ in more than the key's own numbers"
    assert "consumed" in answers["consumed"].text, "it says that the key was used up"
    assert "removed" in answers["removed"].text, "it says that the key was removed"
    _untouched(d)


_POOL = """
import concurrent.futures as futures, pickle
manager, cache, odd = agent.dist.kv_cache_manager, agent.caches["kv"], agent.caches["odd"]
calls = [
    (shmkv.CacheKeyByIdAndIndex(1, 1), cache, {"src_layer_range": range(7, 9), "dst_layer_range": range(2)}),
    (shmkv.CacheKeyByIdAndIndex(3, 1), cache, {}),
    (shmkv.CacheKeyByIdAndIndex(1, 1), odd, {}),
    (shmkv.CacheKeyByIdAndIndex(1, 1), cache, {}),
]
result = []
with futures.ThreadPoolExecutor(4) as pool:
    waiting = [pool.submit(manager.pull_cache, key, into, **how) for key, into, how in calls]
    for future in waiting:
        error = future.exception(timeout=20)
        again = pickle.loads(pickle.dumps(error))
        code = lambda found: None if found is None else found.status_code.name
        result.append([type(again).__name__, code(error), code(again), str(again) == str(error)])
"""


def test_fr_055_errors_come_out_of_a_thread_pool(prompt: StartPeer, decoder: StartPeer) -> None:
    p, dead, d = prompt(1), prompt(3), decoder(2, link=(1, 3))
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv")
    d.call("allocate", name="odd", shape=(2, 512))
    dead.kill()
    answer = d.attempt("execute", code=_POOL)
    assert answer.value == [
        ["LLMParamError", INVALID, INVALID, True],
        ["LLMException", "LLM_WAIT_PROCESS_TIMEOUT", "LLM_WAIT_PROCESS_TIMEOUT", True],
        ["LLMParamError", INVALID, INVALID, True],
        ["NoneType", None, None, True]], "the exception comes out of each future and survives pickling"
    assert answer.ms < T_MS / 2, "a dead peer is heard of at once"
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0], err_msg="the good one is right")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
