"""Keys that go while somebody pulls them: what that pull answers, and when the memory goes."""
from __future__ import annotations

from typing import Any

import pytest
from mid_copy import ONE, caught_in_the_middle, stoppable
from peer import Namespace, StartPeer, prefix, req
from reference import NOT_EXIST, SUCCESS
from shared_bytes import segments_of

pytestmark = pytest.mark.timeout(600)     # the first one waits for a build


@pytest.mark.parametrize("how", ["ttl", "call"])
@pytest.mark.parametrize("key", [req(1, 7), prefix(1, 7)], ids=["request", "prefix"])
def test_key_that_expires_while_it_is_pulled(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, key: list[Any],
                                             how: str) -> None:
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2, env=stoppable())
    caught_in_the_middle(p, d, key)
    p.call("deallocate", name="old")
    if how == "call":
        assert p.call("expire", older_than_ms=0) == 1
    else:
        p.call("execute", code="""
import time
caches = agent.dist.kv_cache_manager._cluster.caches
slot, row, _ = next(caches.expiry.living())
caches.expiry.published(slot, [row], 1)
while not agent.dist.kv_cache_manager.stats()["keys_expired_by_ttl"]:
    time.sleep(0.001)
""")
    assert p.call("stats")["caches"] == 1
    assert len(segments_of(namespace, 1)) == 1, "a reader is in it"
    d.cont()
    answer = d.receive()
    assert answer.outcome == NOT_EXIST
    assert p.call("collect") > 0
    assert segments_of(namespace, 1) == []
    p.call("allocate", name="new", keys=[key], **ONE)
    assert d.outcome("pull", key=key, name="kv") == SUCCESS, "the link is as good as before"


def test_memory_of_aborted_requests_comes_back_by_itself(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """The decoder fetches every tenth; what it never asks for does not fill the memory."""
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2)
    d.call("allocate", name="kv", shape=[1, 4096], dtype="DT_INT8")
    for number in range(200):
        p.call("allocate", name="kv", shape=[1, 4096], dtype="DT_INT8", keys=[req(1, number)], key_ttl_ms=3000)
        p.call("deallocate", name="kv")
        if number % 10 == 0:
            assert d.outcome("pull", key=req(1, number), name="kv") == SUCCESS
    p.call("execute", code="""
import time
while agent.dist.kv_cache_manager.stats()["keys"]:
    time.sleep(0.01)
""")
    found = p.call("stats")
    assert found.pop("control_bytes") > 0
    assert found == {"caches": 0, "cache_bytes": 0, "recycle_bytes": 0, "keys": 0, "keys_expired_by_ttl": 180,
                     "keys_expired_by_call": 0, "prefix_hits": 0, "prefix_evictions": 0}
    assert segments_of(namespace, 1) == []
    assert d.outcome("pull", key=req(1, 199), name="kv") == NOT_EXIST


@pytest.mark.parametrize("fate", ["goes on", "is killed"])
def test_drain_waits_for_a_reader_that_lives(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, fate: str) -> None:
    """A prefix key is not waited for, a pull of it is: until it is done, or its process is dead."""
    p, d = prompt(1), decoder(2, env=stoppable())
    caught_in_the_middle(p, d, prefix(1, 7))
    p.send("finalize", drain_ms=60_000)
    assert not p.answers_within(0.5)
    if fate == "goes on":
        d.cont()
        assert d.receive().outcome == SUCCESS
    else:
        d.kill()
    answer = p.receive()
    assert (answer.outcome, answer.value, answer.ms < 30_000) == (SUCCESS, [], True)
