"""Calls of asyncio that are cancelled in the middle of a copy: the process stands at a crash point there, and when it goes on the
cancellation comes to the event loop beside the copy.
"""
from __future__ import annotations

import time

import builds
import pytest
from event_loop import LOOP, end, finish
from peer import Namespace, Peer, by_id, req
from reference import SUCCESS

from crash.scenarios import arming

pytestmark = pytest.mark.timeout(600)         # the first one waits for a build
TENSORS, ROW = 32, 4 << 20
BIG = {"name": "big", "num_tensors": TENSORS, "shape": [1, ROW], "dtype": "DT_INT8"}
CALLS = {
    "pull": "manager.pull_cache_async({key}, agent.caches['big'])",
    "waiting pull": "manager.pull_cache_async({key}, agent.caches['big'], wait=True)",
    "layers": "agent.layers(manager.pull_layers_async({key}, agent.caches['big']))",
}
SOURCE = {**BIG, "name": "source"}
OWN_KEY = "shmkv.CacheKeyByIdAndIndex(2, 2, 0)"             # of the second cache of the decoder
# Which tensors differ from what they were before the call.
CHANGED = "result = [i for i, tensor in enumerate(agent.caches['big'].tensors) if tensor.numpy().any()]"


def sums(peer: Peer, name: str) -> list[int]:
    """A checksum of each tensor."""
    code = f"import zlib\nresult = [zlib.crc32(tensor.numpy()) for tensor in agent.caches[{name!r}].tensors]"
    found: list[int] = peer.call("execute", code=code)
    assert len(set(found)) == TENSORS
    return found


@pytest.fixture
def pair(namespace: Namespace) -> tuple[Peer, Peer]:
    """A prompt and a decoder, each with a big cache and no helper threads; the decoder runs an event loop."""
    env = {**builds.environment("crash", builds.build("crash")), "SHMKV_COPY_THREADS": "1"}
    p = namespace.start_cluster("PROMPT", 1, env=env)
    d = namespace.start_cluster("DECODER", 2, env=env)
    assert d.call("link", ids=[1])[0] == SUCCESS
    d.call("allocate", **BIG)
    d.call("execute", code=LOOP)
    return p, d


@pytest.mark.parametrize("source", [1, 2], ids=["over a link", "own cluster"])
@pytest.mark.parametrize("call", CALLS)
def test_cancelled_in_the_middle_of_a_copy(pair: tuple[Peer, Peer], call: str, source: int) -> None:
    """It ends before the last byte; the lock is free then, the key still there, and no lease left."""
    _, d = pair
    owner = pair[source - 1]
    # A decoder has no request keys: the own cache is named by its id.
    key, code = (req(1, 5), "shmkv.CacheKey(1, 5)") if source == 1 else (by_id(2, 2), OWN_KEY)
    owner.call("allocate", **SOURCE, keys=[key] if source == 1 else ())
    owner.call("fill", name="source", generation=5)
    d.call("execute", code=arming("copying:4", True))
    d.send("execute", code=f"manager = agent.dist.kv_cache_manager\n"
                           f"agent.begin('one', {CALLS[call].format(key=code)})")
    assert d.wait_stopped_or_dead()
    d.send("execute", code="agent.cancel('one')")
    d.cont()
    assert d.receive().outcome == SUCCESS
    assert d.receive().outcome == SUCCESS
    assert end(d, "one") == "cancelled"
    changed = d.call("execute", code=CHANGED)
    assert changed == list(range(len(changed)))
    assert 3 <= len(changed) < TENSORS, "in the middle"
    assert d.outcome("pull", key=key, name="big") == SUCCESS, "the lock is free, the key not consumed"
    assert sums(d, "big") == sums(owner, "source")
    owner.call("deallocate", name="source")
    assert owner.call("stats")["caches"] == source - 1, "nothing holds the source"
    finish(d)


@pytest.mark.parametrize("call", ["waiting pull", "layers"])
def test_a_pull_out_of_the_own_cluster_has_the_deadline_of_its_wait(pair: tuple[Peer, Peer], call: str) -> None:
    """The time is over while the process stands still in the middle."""
    _, d = pair
    d.call("allocate", **SOURCE)
    d.call("execute", code=arming("copying:2", True))
    timed = CALLS[call].format(key=OWN_KEY).replace("['big']", "['big'], timeout_ms=100")
    d.send("execute", code=f"manager = agent.dist.kv_cache_manager\nagent.begin('one', {timed})")
    assert d.wait_stopped_or_dead()
    time.sleep(0.15)
    d.cont()
    assert d.receive().outcome == SUCCESS
    assert end(d, "one") == "LLM_WAIT_PROCESS_TIMEOUT"
    assert d.outcome("pull", key=by_id(2, 2), name="big") == SUCCESS
    finish(d)
