"""Cache-manager mode from several threads, with owners that free what others write to, and processes that are killed."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, by_id

pytestmark = pytest.mark.timeout(120)
Command = tuple[str, dict[str, Any]]
BIG: dict[str, Any] = {"num_tensors": 2, "shape": [2, 1 << 20], "dtype": "DT_INT8"}


@pytest.fixture
def linked(member: StartPeer) -> tuple[Peer, Peer]:
    """Clusters 1 and 2, each with a link to the other."""
    one = member(1, remote=True)
    two = member(2, link=(1,), remote=True)
    assert one.call("link", ids=[2]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    return one, two


def test_x32_pulls_and_pushes_go_both_ways_at_once(linked: tuple[Peer, Peer]) -> None:
    one, two = linked
    sources: dict[Peer, np.ndarray[Any, Any]] = {}
    for peer in linked:
        for name in ("kv", "pulled", "pushed"):
            peer.call("v2_allocate", name=name, shape=[4, 512])
        peer.call("noise", name="kv", seed=peer.pid)
        sources[peer] = peer.read("kv")
    for peer, other in ((one, 2), (two, 1)):
        batches: list[list[Command]] = [
            [("v2_pull", {"key": by_id(other, 1, row), "name": "pulled", "batch_index": row})] * 20 for row in range(2)] + [
            [("v2_push", {"key": by_id(other, 3, row), "name": "kv", "src_batch_index": row})] * 20 for row in range(2)]
        peer.send("parallel", batches=batches)
    for peer in linked:
        outcomes = {said.get("error", {}).get("text", "") for batch in peer.receive().value for said in batch}
        assert outcomes == {""}
    for peer, other_peer in ((one, two), (two, one)):
        for name in ("pulled", "pushed"):
            np.testing.assert_array_equal(peer.read(name)[:, :, :2], sources[other_peer][:, :, :2])


def test_an_owner_frees_what_is_pushed_to(linked: tuple[Peer, Peer]) -> None:
    """A push either is done before or finds nothing; what is allocated then has no byte of it."""
    one, two = linked
    two.call("v2_allocate", name="kv", **BIG)
    two.call("noise", name="kv", seed=1)
    for _ in range(10):
        cache_id = one.call("v2_allocate", name="kv", **BIG)
        two.send("v2_push", key=by_id(1, cache_id), name="kv")
        one.call("v2_deallocate", name="kv")
        one.call("v2_allocate", name="next", **BIG)
        one.call("canary", name="next")
        assert two.receive().outcome in ("LLM_SUCCESS", "LLM_KV_CACHE_NOT_EXIST")
        assert (one.read("next") == 0x5A).all()
        one.call("v2_deallocate", name="next")


def test_a_killed_pusher_keeps_no_memory(member: StartPeer, namespace: Namespace) -> None:
    target = member(1, remote=True)
    for number in range(3):
        source = member(10 + number, link=(1,), remote=True)
        cache_id = target.call("v2_allocate", name="kv", **BIG)
        source.call("v2_allocate", name="kv", **BIG)
        source.send("parallel", batches=[[("v2_push", {"key": by_id(1, cache_id), "name": "kv"})] * 200])
        source.kill()
        target.call("v2_deallocate", name="kv")
    assert len([name for name in namespace.segments() if name.startswith(prefix_of(target, namespace))]) == 1   # used again


def prefix_of(peer: Peer, namespace: Namespace) -> str:
    """What the names of a process's cache segments begin with."""
    incarnation = peer.call("execute", code="result = f'{agent.dist._cluster.member.incarnation:x}'")
    return f"{namespace.name}.c.{incarnation}"


CHILD = """
import os
from agent_keys import make_key

manager, cache, key = agent.dist.cache_manager, agent.caches["kv"], make_key(KEY)
ours, theirs = os.pipe()
child = os.fork()
if child == 0:
    said = []
    for call in (lambda: manager.push_cache(key, cache), lambda: manager.pull_cache(key, cache), lambda: agent.dist.unlink(1),
                 lambda: agent.dist.cache_manager, lambda: manager.register_cache(cache.cache_desc, [1] * 4)):
        try:
            call()
            said.append("done")
        except shmkv.LLMException as error:
            said.append(error.status_code.name)
    os.write(theirs, " ".join(said).encode())
    os._exit(0)
os.waitpid(child, 0)
result = os.read(ours, 1000).decode()
"""


def test_a_forked_child_can_do_nothing_and_harms_nothing(member: StartPeer) -> None:
    target = member(1, remote=True)
    source = member(2, link=(1,), remote=True)
    key = by_id(1, target.call("v2_allocate", name="kv"))
    source.call("v2_allocate", name="kv")
    source.call("v2_pull", key=key, name="kv")
    said = source.call("execute", code=CHILD.replace("KEY", repr(key)))
    assert said.split() == ["LLM_FAILED"] * 5
    source.call("v2_push", key=key, name="kv")
