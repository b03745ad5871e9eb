"""A link that has ended leaves nothing of the peer in this process, however the pulls before were made."""
from __future__ import annotations

from pathlib import Path

import pytest
from peer import Namespace, Peer, StartPeer, req

PLAIN = "agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKey(1, {req}), agent.caches['buffer'])"
PREPARED = """
agent.prepared = agent.dist.kv_cache_manager.prepare_pull(agent.caches['buffer'])
agent.prepared(shmkv.CacheKey(1, {req}))
"""
MANY = "agent.dist.kv_cache_manager.pull_many([shmkv.PullRequest(shmkv.CacheKey(1, {req}), agent.caches['buffer'])])"


def files_mapped(peer: Peer, namespace: Namespace) -> set[str]:
    """Names of the namespace's files that a process maps, without those of its own cluster and the members table."""
    own = peer.call("execute", code="result = agent.dist._cluster.member.incarnation")
    maps = Path(f"/proc/{peer.pid}/maps").read_text().splitlines()
    names = {line.split("/dev/shm/")[1].split()[0] for line in maps if namespace.name in line}
    return {name for name in names if f"{own:016x}" not in name and ".members." not in name}


@pytest.mark.parametrize("how", [PLAIN, PREPARED, MANY], ids=["plain", "prepared", "many"])
@pytest.mark.parametrize("force", [False, True])
def test_no_file_of_the_peer_stays_mapped_after_unlink(prompt: StartPeer, decoder: StartPeer, namespace: Namespace, how: str,
                                                       force: bool) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 7), req(1, 8)])
    d.call("allocate", name="buffer")
    for number in (7, 8):
        d.call("execute", code=how.format(req=number))
    assert len(files_mapped(d, namespace)) == 2         # directory and segment
    d.call("unlink", ids=[1], force=force)
    assert files_mapped(d, namespace) == set()


def test_a_prepared_pull_finds_the_new_link(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 7), req(1, 8)])
    d.call("allocate", name="buffer")
    d.call("execute", code=PREPARED.format(req=7))
    d.call("unlink", ids=[1])
    assert d.outcome("execute", code="agent.prepared(shmkv.CacheKey(1, 8))") == "LLM_NOT_YET_LINK"
    d.call("link", ids=[1])
    d.call("execute", code="agent.prepared(shmkv.CacheKey(1, 8))")
