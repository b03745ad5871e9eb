"""Field cases FR-015 to FR-020: what a killed process leaves, who removes it, and who must not."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_code import HEARD, LISTEN
from peer import SHM, Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import segments_of

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
T_MS = 20000
ROWS = geometry(4, [2, 8], 2)
PrivateShm = Callable[[str], Any]
LEFT_TOGETHER = "import os, subprocess\nresult = subprocess.Popen(['sleep', '30']).pid"


def _init(peer: Peer, role: str, cluster_id: int) -> str:
    return peer.outcome("init", role=role, cluster_id=cluster_id, options={"sync_kv_timeout": T_MS}, raw={})


def _region(peer: Peer, nbytes: int) -> str:
    return peer.outcome("allocate", name="kv", num_tensors=1, shape=[1, nbytes], dtype="DT_INT8")


def test_fr_015_killed_jobs_do_not_fill_the_memory(private_shm: PrivateShm, rounds: Callable[[int], int]) -> None:
    shm = private_shm("size=24m")
    alive = shm.cluster("PROMPT", 99)
    alive.call("allocate", name="kv")
    alive.call("fill", name="kv", generation=1)
    kept = {name: os.stat(shm.path / name).st_ino for name in shm.names()}
    for _ in range(rounds(5)):
        p = shm.start()
        assert _init(p, "PROMPT", 1) == SUCCESS, "the next P starts"
        assert _region(p, 8 * MIB) == SUCCESS, "and allocates"
        child = p.call("execute", code=LEFT_TOGETHER)
        dead = [name for name in shm.names() if name not in kept and ".c." in name]
        assert len(dead) <= 2, "at most one dead generation is left at any time"
        p.kill()
        os.kill(child, signal.SIGKILL)
    last = shm.cluster("PROMPT", 1)
    assert _region(last, 8 * MIB) == SUCCESS, "it works after all of them"
    assert {name: os.stat(shm.path / name).st_ino for name in kept} == kept, "the living one's names and inodes"
    np.testing.assert_array_equal(alive.read("kv"), pattern(ROWS, 1), err_msg="and content")


def test_fr_016_all_of_them_are_killed_at_once(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    peers = [prompt(1), decoder(2), decoder(3)]
    peers[0].call("allocate", name="kv", shape=[2, MIB])
    for d in peers[1:]:
        d.call("allocate", name="kv", shape=[2, MIB])
        d.call("pull", key=by_id(1, 1), name="kv")
    for peer in peers:
        os.kill(peer.pid, signal.SIGKILL)
    for peer in peers:
        peer.kill()
    left = namespace.names()
    assert len([name for name in left if ".c." in name]) == 3, "they left everything"
    fourth = namespace.start()
    fourth.call("execute", code=LISTEN)
    begun = time.monotonic()
    assert _init(fourth, "DECODER", 4) == SUCCESS
    assert time.monotonic() - begun < T_MS / 2000, "soon"
    assert [name for name in namespace.names() & left if ".c." in name or ".d." in name] == [], (
        "all bytes are given back")
    heard = [text for level, text in fourth.call("execute", code=HEARD)[0] if level in ("INFO", "WARNING")]
    assert any("dead" in text or "left" in text for text in heard), f"the log says what was removed: {heard}"


def test_fr_017_restarts_where_one_and_a_half_regions_fit(private_shm: PrivateShm) -> None:
    shm = private_shm("size=9m")
    for _ in range(6):
        p = shm.start()
        assert _init(p, "PROMPT", 1) == SUCCESS, "each start works"
        assert _region(p, 6 * MIB) == SUCCESS, "dead regions are taken away before space is asked for"
        p.kill()


def _remove_all(namespace: Namespace) -> None:
    for name in namespace.names():
        (SHM / name).unlink()


def test_fr_018_a_late_finalize_takes_nothing_of_the_successor(namespace: Namespace, prompt: StartPeer,
                                                               decoder: StartPeer) -> None:
    p1 = prompt(1)
    p1.call("allocate", name="kv", keys=[req(1, 7)])
    old = namespace.names()
    _remove_all(namespace)
    p2 = prompt(1)
    p2.call("allocate", name="kv", keys=[req(1, 7)])
    p2.call("fill", name="kv", generation=2)
    own = {name: os.stat(SHM / name).st_ino for name in namespace.names()}
    assert set(own) & old, "P2 made some of P1's names again"
    p1.call("finalize")
    left = {name: os.stat(SHM / name).st_ino for name in namespace.names()}
    assert left == own, "P2's segments are still there"
    d = decoder(2)
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "and it can be pulled from"
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 2)[:, :, 0])


def test_fr_019_names_vanish_behind_everybodys_back(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    p, d1 = prompt(1), decoder(2)
    for number in (1, 2):
        p.call("allocate", name=f"kv{number}", keys=[req(1, number)])
        p.call("fill", name=f"kv{number}", generation=number)
    d1.call("allocate", name="kv")
    d1.call("pull", key=by_id(1, 1), name="kv", src_cache_offset=0)     # an offset keeps the key
    for peer in (p, d1):
        peer.call("execute", code=LISTEN)
    _remove_all(namespace)
    mapped = d1.attempt("pull", key=req(1, 1), name="kv")
    assert mapped.outcome == SUCCESS, "D1 had mapped K1: its bytes"
    np.testing.assert_array_equal(d1.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0], err_msg="are right")
    other = d1.attempt("pull", key=req(1, 2), name="kv")
    assert "LLMException" in other.kinds, "a segment without a name is a clear LLMException"
    d2 = decoder(3, link=())
    d2.call("allocate", name="kv")
    answer = d2.attempt("link", ids=[1], timeout=500)
    assert answer.value == ["LLM_LINK_FAILED", ["LLM_WAIT_PROCESS_TIMEOUT"]], "D2, new, gets a link status"
    assert d2.outcome("pull", key=req(1, 2), name="kv") == "LLM_NOT_YET_LINK", "at once"
    for number in (1, 2):
        p.call("remove_key", key=req(1, number))
        p.call("deallocate", name=f"kv{number}")
    assert p.outcome("finalize") == SUCCESS, "P's finalize succeeds"
    heard, unraisable = p.call("execute", code=HEARD)
    assert ([text for level, text in heard if level != "DEBUG"], unraisable) == ([], []), "in silence"
    assert d1.outcome("finalize") == SUCCESS
    assert _init(p, "PROMPT", 1) == SUCCESS, "and a new start works"
    assert d2.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "for those who came later too"


def test_fr_020_everybody_cleans_up_at_the_same_time(namespace: Namespace, rng: np.random.Generator,
                                                     rounds: Callable[[int], int]) -> None:
    peers = [namespace.start() for _ in range(8)]
    for generation in range(rounds(5)):
        dead = namespace.start_cluster("PROMPT", 100)
        dead.call("allocate", name="kv")
        dead.kill()
        left = {name for name in namespace.names() if ".c." in name or ".d." in name}
        order = [int(number) for number in rng.permutation(8)]
        for number in order:
            role = "PROMPT" if number else "DECODER"
            peers[number].send("init", role=role, cluster_id=number, options={"sync_kv_timeout": T_MS}, raw={})
            peers[number].send("allocate", name="kv", keys=[req(number, 7)] if number else [])
        for number in order:
            assert [peers[number].receive().outcome for _ in range(2)] == [SUCCESS] * 2, "all 8 succeed"
        assert namespace.names() & left == set(), "the dead one's files are gone"
        assert all(len(segments_of(namespace, number)) == 1 for number in range(8)), "no cleaner took another's"
        assert len(namespace.names()) == 18, "only their own segments exist"
        assert peers[0].call("link", ids=list(range(1, 8))) == [SUCCESS, [SUCCESS] * 7]
        for number in range(1, 8):
            peers[number].call("fill", name="kv", generation=generation)
            assert peers[0].outcome("pull", key=req(number, 7), name="kv") == SUCCESS, "each can be pulled from"
        for peer in peers:
            peer.call("finalize")
