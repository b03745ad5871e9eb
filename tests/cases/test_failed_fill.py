"""FR-054: a prefill that fails says so to those who wait for its key, and they hear it at once."""
from __future__ import annotations

import pytest
from peer import Namespace, StartPeer, req
from reference import SUCCESS
from waiters import until_waiting, waiters

pytestmark = pytest.mark.timeout(120)
T_MS = 20000
FAIL = """
manager = agent.dist.kv_cache_manager
cache = agent.caches["kv"]
def fill(layer):
    if layer == {layers}:
        raise RuntimeError("no token left")
key = shmkv.CacheKey(1, 5, 0)
done = manager.layer_publisher(cache, rows=[0])
try:
    for layer in range(4):
        fill(layer)
        done(layer)
except RuntimeError:
    manager.remove_cache_key(key)
"""


@pytest.mark.parametrize("waits", ["pull_cache(key, agent.caches['kv'], wait=True)",
                                   "list({0}.pull_layers(key, agent.caches['kv']))", "wait_for_key(key)"])
@pytest.mark.parametrize("layers", [0, 2])
def test_fr_054_a_pull_that_waits_hears_that_it_will_not_come(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                              layers: int, waits: str) -> None:
    p, d = prompt(1), decoder(2, sync_kv_timeout=T_MS)
    for peer in (p, d):
        peer.call("allocate", name="kv", num_tensors=8, publish=False, keys=[req(1, 5)] if peer is p else [])
    manager = "agent.dist.kv_cache_manager"
    call = waits.format(manager) if waits.startswith("list") else f"{manager}.{waits}"
    d.send("execute", code=f"key = shmkv.CacheKey(1, 5, 0)\n{call}")
    until_waiting(namespace)
    p.call("execute", code=FAIL.format(layers=layers))
    answer = d.receive()
    assert answer.outcome == "LLM_KV_CACHE_NOT_EXIST", answer.trace
    assert "removed by cluster 1" in answer.text, "and why"
    assert answer.ms < T_MS / 2, "long before its deadline"
    assert waiters(namespace) == 0
    p.call("bind", name="kv", keys=[(0, req(1, 5))])
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS
