"""Many threads of one process do everything at once: allocate, fill, publish, pull, free, link, unlink, finalize in the middle."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from agent_code import HEARD, LISTEN
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import directory_of, segments_of

pytestmark = pytest.mark.timeout(120)
ROWS = geometry(4, [2, 8], 2)
# Whichever of destination, link and cluster the call finds gone first.
AFTER_FINALIZE = {"LLM_ENGINE_FINALIZED", "LLM_FAILED", "LLM_KV_CACHE_NOT_EXIST", "LLM_NOT_YET_LINK"}
OF_LINKS = {"LLM_NOT_YET_LINK", "LLM_LINK_BUSY", "LLM_LINK_FAILED"}

# Each worker runs its piece of work until told to stop, or until the cluster is finalized; what it was told is counted.
_WORKERS = """
import random, threading, time
from agent import cluster_info
manager, dist, desc = agent.dist.kv_cache_manager, agent.dist, shmkv.CacheDesc(4, [2, 64], shmkv.DataType.DT_INT8)
stop, said, wrong = threading.Event(), {}, []
def worker(work, number):
    chance, turn = random.Random(number), 0
    while not stop.is_set():
        turn += 1
        try:
            work(number, turn, chance)
            outcome = "LLM_SUCCESS"
        except shmkv.LLMException as error:
            outcome = error.status_code.name
        except Exception as error:
            outcome = repr(error)
        name = work.__name__ + " " + outcome
        said[name] = said.get(name, 0) + 1
def run(works, seconds, at_the_end):
    threads = [threading.Thread(target=worker, args=(work, number)) for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    at_the_end()
    stop.set()
    for thread in threads:
        thread.join()
    return [said, wrong[:10]]
"""
_OWNER = _WORKERS + """
def come_and_go(number, turn, chance):
    name = 1000000 * (number + 1) + turn
    cache = manager.allocate_cache(desc, [shmkv.CacheKey(1, name)], publish=False)
    for tensor in cache.tensors:
        tensor.numpy()[...] = name % 100
    manager.publish(cache)
    for tensor in cache.tensors:
        if int(tensor.numpy().min()) != name % 100 or int(tensor.numpy().max()) != name % 100:
            wrong.append(name)
    manager.remove_cache_key(shmkv.CacheKey(1, name))
    manager.deallocate_cache(cache)
def bind_again(number, turn, chance):
    manager.bind(agent.caches["kv"], {number % 2: shmkv.CacheKey(1, number * 10)})
    manager.unbind(agent.caches["kv"], [chance.randrange(2)])
def drop(number, turn, chance):
    manager.allocate_cache(desc)
def collect(number, turn, chance):
    manager.collect()
"""
_READER = _WORKERS + """
def pull(number, turn, chance):
    cache = agent.caches["kv"] if number % 2 else manager.allocate_cache(shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_FLOAT16))
    manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), cache)
    if not number % 2:
        manager.deallocate_cache(cache)
def link_and_unlink(number, turn, chance):
    dist.link_clusters([cluster_info(3)], 5000)
    dist.unlink_clusters([cluster_info(3)], 5000, chance.random() < 0.5)
def pull_from_the_other(number, turn, chance):
    manager.pull_cache(shmkv.CacheKeyByIdAndIndex(3, 1), agent.caches["other"])
def look(number, turn, chance):
    dist.check_link_status(1)
    manager.collect()
"""


def _prompt(prompt: StartPeer, cluster_id: int) -> Peer:
    p = prompt(cluster_id)
    p.call("execute", code=LISTEN)
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=cluster_id)
    return p


def _outcomes(said: dict[str, int], work: str) -> set[str]:
    return {name.partition(" ")[2] for name in said if name.partition(" ")[0] == work}


def test_an_owners_threads_do_everything_at_once(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                 rounds: Callable[[int], int]) -> None:
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "4000000"}), decoder(2)
    p.call("execute", code=LISTEN)
    p.call("allocate", name="kv")
    works = "[come_and_go] * 4 + [bind_again] * 2 + [drop] * 2 + [collect]"
    said, wrong = p.call("execute", code=f"{_OWNER}result = run({works}, {rounds(2)}, lambda: None)")
    assert wrong == [], "no thread saw another one's bytes"
    for work in ("come_and_go", "drop", "collect", "bind_again"):
        assert _outcomes(said, work) == {SUCCESS}, f"each call has its answer: {said}"
    p.call("collect")
    p.call("allocate", name="next", keys=[req(1, 7)])
    p.call("fill", name="next", generation=2)
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 2)[:, :, 0])
    assert p.call("execute", code=HEARD)[1] == [], "nothing unraisable"
    p.call("finalize")
    assert [name for name in namespace.names() if ".c." in name and directory_of(namespace, 2)[-16:] not in name] == [], (
        "nothing is left of any thread")


@pytest.mark.parametrize("ends", ["lambda: None", "dist.finalize"])
def test_a_readers_threads_do_everything_at_once(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                 rounds: Callable[[int], int], ends: str) -> None:
    p, other, d = _prompt(prompt, 1), _prompt(prompt, 3), decoder(2)
    d.call("execute", code=LISTEN)
    for name in ("kv", "other"):
        d.call("allocate", name=name)
    works = "[pull] * 4 + [link_and_unlink] * 2 + [pull_from_the_other] * 2 + [look]"
    said, _ = d.call("execute", code=f"{_READER}result = run({works}, {rounds(2)}, {ends})")
    allowed = AFTER_FINALIZE if "finalize" in ends else set()
    assert SUCCESS in _outcomes(said, "pull"), "pulls go on"
    assert _outcomes(said, "pull") <= {SUCCESS, *allowed}, f"whatever the others do: {said}"
    assert _outcomes(said, "link_and_unlink") <= {SUCCESS, *allowed}, f"{said}"
    assert _outcomes(said, "pull_from_the_other") <= {SUCCESS, *OF_LINKS, *allowed}, f"{said}"
    assert _outcomes(said, "look") <= {SUCCESS, *OF_LINKS, *allowed}, f"{said}"
    assert d.call("execute", code=HEARD)[1] == [], "nothing unraisable"
    if "finalize" not in ends:
        assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
        np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0])
        d.call("finalize")
    for peer in (p, other):
        assert peer.outcome("unlink", ids=[2]) == SUCCESS, "no link is left that somebody holds"
    owners = {directory_of(namespace, number)[-16:] for number in (1, 3)}
    assert [name for name in namespace.names() if ".c." in name and name.split(".")[2] not in owners] == [], "nothing is left"
    assert len(segments_of(namespace, 1)) == 1
