"""What caches, keys and links cost besides the caches' own bytes, counted in pages of the directory's file."""
from __future__ import annotations

import pytest
from peer import SUCCESS, Namespace, StartPeer, prefix, req

ROW_AND_KEY_NBYTES, LINK_NBYTES = 512, 64 << 10
FEW, MANY = 2_000, 20_000       # rows with a key, 1,000 a cache
KEYED = """
import shmkv
desc = shmkv.CacheDesc(1, [1000, 8], shmkv.DataType.DT_INT8)
for first in range({begin}, {end}, 1000):
    keys = [shmkv.CacheKey(1, 2**64 - 1, 0, first + row) for row in range(1000)]
    agent.caches[first] = agent.dist.kv_cache_manager.allocate_cache(desc, keys)
"""

PULLS = """
import numpy
import shmkv
agent.array = numpy.zeros((4, 2, 8), numpy.float16)
desc = shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_FLOAT16)
agent.caches['mine'] = agent.dist.kv_cache_manager.register_cache(desc, [agent.array])
for _ in range(1000):
    agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKey(1, 2**64 - 1, 0, 7), agent.caches['mine'])
"""


def test_a_row_and_its_key(prompt: StartPeer) -> None:
    p = prompt(1)
    empty = p.call("stats")["control_bytes"]
    p.call("execute", code=KEYED.format(begin=0, end=FEW))
    few = p.call("stats")["control_bytes"]
    p.call("execute", code=KEYED.format(begin=FEW, end=MANY))
    many = p.call("stats")["control_bytes"]
    assert p.call("stats")["keys"] == MANY
    assert empty < few < many                                   # grown on demand
    assert (many - empty) / MANY <= ROW_AND_KEY_NBYTES


@pytest.mark.parametrize("count", [1, 8])
def test_a_link(prompt: StartPeer, decoder: StartPeer, count: int) -> None:
    """Records lie in the directory of the cluster that was linked to; whoever links has none of its own for it."""
    p = prompt(1)
    p.call("allocate", name="kv", keys=[prefix(1, 7)])
    before = p.call("stats")["control_bytes"]
    decoders = [decoder(2 + number) for number in range(count)]
    for d in decoders:
        d.call("allocate", name="buffer")
        assert d.outcome("pull", key=prefix(1, 7), name="buffer") == SUCCESS
    assert p.call("stats")["control_bytes"] - before <= count * LINK_NBYTES


def test_who_only_pulls_has_no_memory_of_its_own(prompt: StartPeer, decoder: StartPeer, namespace: Namespace) -> None:
    """Into the caller's own memory: no segment, and no page more in the directory, however many pulls there are."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[prefix(1, 7), req(1, 8)])
    before = d.call("stats")
    d.call("execute", code=PULLS)
    assert d.call("stats") == before
    own = d.call("execute", code="result = f'{agent.dist._cluster.member.incarnation:016x}'")
    assert [name for name in namespace.segments() if own in name] == []
