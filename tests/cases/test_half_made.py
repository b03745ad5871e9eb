"""Field cases FR-021 and FR-022: what a process left that was killed in the middle, or that was damaged afterwards."""
from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
from interposed import Interposer
from peer import SHM, Namespace, Peer, StartPeer, req
from reference import SUCCESS, geometry, pattern
from started_apart import Program

pytestmark = pytest.mark.timeout(240)
T_MS = 20000
SHAPE = [4, 32]


def _init(peer: Peer, role: str, cluster_id: int) -> str:
    return peer.outcome("init", role=role, cluster_id=cluster_id, options={"sync_kv_timeout": T_MS}, raw={})


def _exchange(p: Peer, d: Peer, generation: int) -> None:
    """Both start, P publishes an int8 cache of SHAPE under cluster 1, D pulls row 0 of it, both leave."""
    assert _init(p, "PROMPT", 1) == SUCCESS, "a new P"
    assert _init(d, "DECODER", 2) == SUCCESS, "a new D"
    for peer in (p, d):
        peer.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[req(1, 7)] if peer is p else [])
    p.call("fill", name="kv", generation=generation)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "both work"
    wanted = pattern(geometry(4, SHAPE, 1), generation)[:, :, 0]
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], wanted, err_msg="D never sees the old description")
    for peer in (d, p):
        peer.call("finalize")


def test_fr_021_killed_half_way_through_allocate(namespace: Namespace, interposer: Interposer, rng: np.random.Generator,
                                                 rounds: Callable[[int], int]) -> None:
    p, d = namespace.start(), namespace.start()
    points = 20
    stopped = 0
    for point in sorted(rng.permutation(np.arange(1, points + 1))[:rounds(7)]):
        victim = Program(namespace, "allocate_once.py", env=interposer.environment(kill_at=int(point)))
        stopped += victim.line() == ""
        victim.signal(signal.SIGKILL)
        assert victim.end().complained == "", "it died in silence"
        _exchange(p, d, int(point))
        assert namespace.names() == set(), f"nothing is left of what was killed at point {point}"
    assert stopped, "some were killed in the middle"


DAMAGES = ["begin", "middle", "end", "cut 0", "cut 1", "cut 100", "cut 4095", "mode 200", "mode 0"]


def _damage(name: str, how: str, rng: np.random.Generator) -> None:
    path = SHM / name
    kind, _, number = how.partition(" ")
    if kind == "mode":
        path.chmod(int(number, 8))
    elif kind == "cut":
        os.truncate(path, int(number))
    else:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek({"begin": 0, "middle": size // 2, "end": max(0, size - 1024)}[kind])
            file.write(rng.bytes(1024))


@pytest.mark.parametrize("alone", [True, False], ids=["nobody lives", "somebody lives"])
def test_fr_022_damaged_leftovers(namespace: Namespace, prompt: StartPeer, rng: np.random.Generator,
                                  alone: bool) -> None:
    p, d = namespace.start(), namespace.start()
    bystander = None if alone else prompt(50)
    for generation, how in enumerate(DAMAGES):
        before = namespace.names()
        victim = prompt(1)
        victim.call("allocate", name="kv", shape=[2, 64], keys=[req(1, 7)])
        victim.kill()
        made = sorted(namespace.names() - before)
        assert len(made) >= 2, "a leftover"
        for name in made:
            if not name.endswith(".life"):
                _damage(name, how, rng)
        _exchange(p, d, generation)
        assert namespace.names() <= before, f"{how}: the leftover is reclaimed"
    if bystander is not None:
        assert bystander.outcome("allocate", name="kv") == SUCCESS, "the bystander lives"
