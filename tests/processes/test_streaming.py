"""Pulls layer by layer: each layer when it is published, right bytes, coverage as for partial pulls, a lease and never the lock."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory import wait_until
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS
from waiters import until_waiting, waiters

pytestmark = pytest.mark.timeout(180)
T_MS = 20000
TIMED_OUT, NOT_EXIST, BUSY = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_BUSY"
LAYERS = 6
SHAPE: dict[str, Any] = {"num_tensors": 2 * LAYERS, "shape": [2, 64]}
START = """
import threading
manager = agent.dist.kv_cache_manager
agent.got, agent.end = [], []
def pull():
    try:
        for layer in manager.pull_layers({key}, agent.caches["kv"], {row}{how}):
            first = layer * {per_layer}
            agent.got.append([layer, agent.caches["kv"].tensors[first].numpy()[{row}].tobytes().hex()])
        agent.end.append("LLM_SUCCESS")
    except shmkv.LLMException as error:
        agent.end.append(error.status_code.name)
        agent.text = str(error)
agent.thread = threading.Thread(target=pull)
agent.thread.start()
"""


def start(d: Peer, key: str = "shmkv.CacheKey(1, 5, 0)", row: int = 0, how: str = "", per_layer: int = 2) -> None:
    """The decoder pulls layers on a thread and notes each layer with the bytes of its first tensor at that moment."""
    d.call("execute", code=START.format(key=key, row=row, how=how, per_layer=per_layer))


def got(d: Peer) -> list[Any]:
    return list(d.call("execute", code="result = agent.got"))


def end(d: Peer) -> str:
    said = d.call("execute", code="agent.thread.join(15)\nresult = agent.end")
    assert len(said) == 1
    return str(said[0])


def until_got(d: Peer, count: int) -> None:
    wait_until(lambda: len(got(d)) == count, f"{count} layers")


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", **SHAPE)
    return p, d


def allocate(p: Peer, number: int = 5, **more: Any) -> None:
    p.call("allocate", name=f"kv{number}", keys=[req(1, number)], publish=False, **{**SHAPE, **more})
    p.call("fill", name=f"kv{number}", generation=number)


def fill_layer(p: Peer, layer: int, number: int = 5) -> None:
    p.call("execute", code=f"""
import cache_bytes, reference
cache = agent.caches['kv{number}']
for tensor in range(2 * {layer}, 2 * {layer} + 2):
    cache.tensors[tensor].numpy().view(np.uint8)[...] = {number} + 16 * tensor
""")


def test_each_layer_comes_when_it_is_published(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("allocate", name="kv5", keys=[req(1, 5)], publish=False, **SHAPE)
    start(d, row=1)
    for layer in range(LAYERS):
        until_waiting(namespace)
        fill_layer(p, layer)
        p.call("publish", name="kv5", layers=layer + 1)
        until_got(d, layer + 1)
    assert end(d) == SUCCESS
    assert [layer for layer, _ in got(d)] == list(range(LAYERS))
    assert [bytes.fromhex(text)[0] for _, text in got(d)] == [5 + 32 * layer for layer in range(LAYERS)]
    assert np.array_equal(d.read("kv")[:, :, 1], p.read("kv5")[:, :, 0])
    assert d.outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST, "consumed by the last layer"
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 0, "no lease is left"
    assert waiters(namespace) == 0


def test_progress_that_is_said_twice_goes_back_and_jumps(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    """`publish` sets how far a row is. What was pulled stays pulled when that is less than before; each layer comes once."""
    p, d = pair
    p.call("allocate", name="kv5", keys=[req(1, 5)], publish=False, **SHAPE)
    start(d)
    filled = 0
    for layers, there in ((3, 3), (3, 3), (1, 3), (4, 4), (2, 4), (None, LAYERS)):
        until_waiting(namespace)
        while filled < there:
            fill_layer(p, filled)
            filled += 1
        p.call("publish", name="kv5", layers=layers)
        until_got(d, there)
        if there < LAYERS:
            assert d.outcome("pull", key=req(1, 5), name="kv", batch_index=1) == NOT_EXIST, "not all of it, and not consumed"
    assert end(d) == SUCCESS
    assert [(layer, set(bytes.fromhex(text))) for layer, text in got(d)] == [(layer, {5 + 32 * layer}) for layer in range(LAYERS)]
    assert np.array_equal(d.read("kv")[:, :, 0], p.read("kv5")[:, :, 0])
    answer = d.attempt("pull", key=req(1, 5), name="kv")
    assert (answer.outcome, "is consumed" in answer.text) == (NOT_EXIST, True)
    p.call("bind", name="kv5", keys=[(0, req(1, 5))])
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS, "its next binding is as new: it was consumed once"
    assert waiters(namespace) == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_orders(namespace: Namespace, pair: tuple[Peer, Peer], seed: int) -> None:
    """A publisher marks layers in any order, some twice, some before the pull begins; the row may be bound late."""
    p, d = pair
    dice = random.Random(seed)
    bound_late = dice.random() < 0.5
    p.call("allocate", name="kv5", keys=[] if bound_late else [req(1, 5)], publish=False, **SHAPE)
    p.call("execute", code="agent.done = agent.dist.kv_cache_manager.layer_publisher(agent.caches['kv5'], rows=[0])")
    order = list(range(LAYERS))
    dice.shuffle(order)
    order = [layer for each in order for layer in [each] * dice.choice([1, 1, 2])]
    begins = dice.randrange(len(order) + 1)
    for place, layer in enumerate(order):
        if place == begins:
            start(d)
        if place == len(order) // 2 and bound_late:
            p.call("bind", name="kv5", keys=[(0, req(1, 5))], publish=False)
            p.call("execute", code="done = agent.done\nagent.dist.kv_cache_manager.publish(agent.caches['kv5'], rows=[0], "
                   "layers=done.layers)")
        fill_layer(p, layer)
        p.call("execute", code=f"agent.done({layer})")
    if begins == len(order):
        start(d)
    assert end(d) == SUCCESS
    assert [(layer, bytes.fromhex(text)[0]) for layer, text in got(d)] == [(layer, 5 + 32 * layer) for layer in range(LAYERS)]
    assert np.array_equal(d.read("kv")[:, :, 0], p.read("kv5")[:, :, 0])
    assert waiters(namespace) == 0


def test_ranges_and_other_numbers_of_tensors_a_layer(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p)
    p.call("publish", name="kv5")
    start(d, how=", src_layer_range=range(1, 3), dst_layer_range=range(4, 6)")
    assert end(d) == SUCCESS
    assert [layer for layer, _ in got(d)] == [4, 5], "layers of the destination"
    assert np.array_equal(d.read("kv")[8:12, :, 0], p.read("kv5")[2:6, :, 0])
    start(d, how=", tensor_num_per_layer=3", per_layer=3)
    assert end(d) == SUCCESS
    assert [layer for layer, _ in got(d)] == [0, 1, 2, 3]
    assert d.outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST, "all together"
    for how, outcome in ((", src_layer_range=range(0, 6), tensor_num_per_layer=5", "LLM_PARAM_INVALID"),
                         (", tensor_num_per_layer=13", "LLM_PARAM_INVALID"), (", src_layer_range=range(5, 8)", "LLM_PARAM_INVALID"),
                         (", src_layer_range=range(5, 8), dst_layer_range=range(0, 3)", "LLM_PARAM_INVALID")):
        allocate(p, 6)
        p.call("publish", name="kv6")
        start(d, "shmkv.CacheKey(1, 6, 0)", how=how)
        assert end(d) == outcome
        assert d.outcome("pull", key=req(1, 6), name="kv") == SUCCESS
        p.call("deallocate", name="kv6")
    allocate(p, 6)
    p.call("publish", name="kv6")
    start(d, "shmkv.CacheKey(1, 6, 0)", how=", tensor_num_per_layer=5", per_layer=5)
    assert (end(d), [layer for layer, _ in got(d)]) == (SUCCESS, [0, 1, 2]), "what is left over is a shorter last layer"


def test_what_was_left_early_is_covered_and_the_rest_is_not(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p)
    p.call("publish", name="kv5", layers=4)
    code = """
manager = agent.dist.kv_cache_manager
with manager.pull_layers(shmkv.CacheKey(1, 5, 0), agent.caches['kv']) as layers:
    for layer in layers:
        if layer == 2:
            break
result = [list(layers), layer]
"""
    assert d.call("execute", code=code) == [[], 2]
    assert waiters(namespace) == 0
    p.call("publish", name="kv5")
    rest = {"src_layer_range": range(3, LAYERS), "dst_layer_range": range(3, LAYERS)}
    assert d.outcome("pull", key=req(1, 5), name="kv", **rest) == SUCCESS
    assert d.outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST, "the two parts are all of it"
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 0


def test_a_pull_that_waits_holds_a_lease_and_not_the_lock(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p)
    p.call("publish", name="kv5", layers=2)
    start(d)
    until_got(d, 2)
    allocate(p, 6)
    p.call("publish", name="kv6")
    d.call("allocate", name="other", **SHAPE)
    assert d.outcome("pull", key=req(1, 6), name="other") == SUCCESS, "the link is free"
    p.call("unbind", name="kv5", rows=[0])
    assert end(d) == NOT_EXIST
    p.call("deallocate", name="kv5")
    p.call("bind", name="kv6", keys=[(0, req(1, 5))], publish=False)
    start(d)
    until_waiting(namespace)
    assert p.call("stats")["caches"] == 1
    p.call("remove_key", key=req(1, 5))
    p.call("deallocate", name="kv6")
    assert end(d) == NOT_EXIST
    assert p.call("stats")["caches"] == 0


def test_memory_stays_while_a_layer_is_waited_for(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p)
    p.call("publish", name="kv5", layers=2)
    d.call("execute", code="agent.layers = agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKeyByIdAndIndex(1, 1, 0), "
           "agent.caches['kv'])\nnext(agent.layers)")
    p.call("remove_key", key=req(1, 5))
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 1, "a lease names it"
    assert d.call("execute", code="result = next(agent.layers)") == 1, "what is published comes"
    assert d.outcome("execute", code="next(agent.layers)") == NOT_EXIST, "the rest never will"
    assert d.outcome("execute", code="next(agent.layers)") == "StopIteration"
    assert p.call("stats")["caches"] == 0


@pytest.mark.parametrize("end_of", ["kill", "finalize", "unlink", "own unlink", "own finalize"])
def test_a_pull_between_two_layers_when_the_link_ends(namespace: Namespace, pair: tuple[Peer, Peer], end_of: str) -> None:
    """Nobody is inside: the next layer hears of it, and the lease does not keep anything."""
    p, d = pair
    allocate(p)
    p.call("publish", name="kv5")
    d.call("execute", code="agent.layers = agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKey(1, 5, 0), agent.caches['kv'])\n"
           "next(agent.layers)")
    acts: dict[str, Callable[[], object]] = {
        "kill": p.kill, "finalize": lambda: p.call("finalize"), "unlink": lambda: p.call("unlink", ids=[2]),
        "own unlink": lambda: d.call("unlink", ids=[1]), "own finalize": lambda: d.call("finalize")}
    acts[end_of]()
    expected = {"kill": TIMED_OUT, "finalize": TIMED_OUT, "own finalize": "LLM_ENGINE_FINALIZED"}.get(end_of, "LLM_NOT_YET_LINK")
    assert d.outcome("execute", code="next(agent.layers)") == expected
    assert d.outcome("execute", code="next(agent.layers)") == "StopIteration"
    if end_of in ("unlink", "own unlink"):
        p.call("remove_key", key=req(1, 5))
        p.call("deallocate", name="kv5")
        assert p.call("stats")["caches"] == 0


def test_leases_are_used_up(pair: tuple[Peer, Peer], decoder: StartPeer) -> None:
    p, _ = pair
    d = decoder(3, env={"SHMKV_MAX_LEASES": "2"})
    d.call("allocate", name="kv", **SHAPE)
    for number in (5, 6, 7):
        allocate(p, number)
        p.call("publish", name=f"kv{number}", layers=1)
    d.call("execute", code="agent.open = [agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKey(1, n, 0), agent.caches['kv']) "
           "for n in (5, 6, 7)]\nresult = [next(agent.open[0]), next(agent.open[1])]")
    answer = d.attempt("execute", code="next(agent.open[2])")
    assert answer.outcome == BUSY
    assert "SHMKV_MAX_LEASES" in answer.text
    assert "2 leases" in answer.text
    answer = d.attempt("pull", key=req(1, 7), name="kv", wait=True)
    assert (answer.outcome, "SHMKV_MAX_LEASES" in answer.text) == (BUSY, True)
    p.call("publish", name="kv7")
    assert d.outcome("pull", key=req(1, 7), name="kv", wait=True) == SUCCESS, "what is all there needs no lease"
    d.call("execute", code="agent.open[0].close()\nresult = agent.open[0].close()")
    p.call("bind", name="kv7", keys=[(0, req(1, 7))], publish=False)
    p.call("publish", name="kv7", layers=1)
    d.call("execute", code="agent.open[2] = agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKey(1, 7, 0), agent.caches['kv'])\n"
           "result = next(agent.open[2])")


def test_two_decoders_pull_the_layers_of_one_key(prompt: StartPeer, decoder: StartPeer) -> None:
    p = prompt(1)
    decoders = [decoder(2), decoder(3)]
    for d in decoders:
        d.call("allocate", name="kv", **SHAPE)
        start(d)
    allocate(p)
    for layer in range(LAYERS):
        p.call("publish", name="kv5", layers=layer + 1)
        if layer < LAYERS - 1:
            for d in decoders:
                until_got(d, layer + 1)
    for d in decoders:
        assert end(d) == SUCCESS, "both had begun: the one who is second has the bytes all the same"
        assert np.array_equal(d.read("kv")[:, :, 0], p.read("kv5")[:, :, 0])
    assert decoders[0].outcome("pull", key=req(1, 5), name="kv") == NOT_EXIST


@pytest.mark.parametrize("end_of", ["deadline", "interrupt"])
def test_the_end_of_a_wait_for_a_layer(namespace: Namespace, pair: tuple[Peer, Peer], end_of: str) -> None:
    p, d = pair
    allocate(p)
    p.call("publish", name="kv5", layers=3)
    said = d.call("execute", code=f"""
import signal
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, {0.15 if end_of == "interrupt" else 0})
result = []
try:
    for layer in agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKey(1, 5, 0), agent.caches["kv"],
                                                         timeout_ms={T_MS if end_of == "interrupt" else 300}):
        result.append(layer)
except KeyboardInterrupt:
    result.append("interrupted")
except shmkv.LLMException as error:
    result.append(error.status_code.name)
    assert "6 of 12" in str(error), error
""")
    assert said == [0, 1, 2, "interrupted" if end_of == "interrupt" else TIMED_OUT]
    assert waiters(namespace) == 0
    p.call("publish", name="kv5")
    assert d.outcome("pull", key=req(1, 5), name="kv") == SUCCESS
    p.call("deallocate", name="kv5")
    assert p.call("stats")["caches"] == 0, "no lease is left"


def test_by_id_and_a_row_bound_anew(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("allocate", name="kv5", publish=False, **SHAPE)
    start(d, "shmkv.CacheKeyByIdAndIndex(1, 1, 0)")
    until_waiting(namespace)
    p.call("publish", name="kv5", layers=2)
    until_got(d, 2)
    p.call("bind", name="kv5", keys=[(0, req(1, 5))], publish=False)       # its first key: the bytes are the same
    p.call("publish", name="kv5", layers=3)
    until_got(d, 3)
    p.call("unbind", name="kv5", rows=[0])
    assert end(d) == NOT_EXIST
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == NOT_EXIST


def test_publishers_of_many_threads(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    allocate(p)
    start(d)
    until_waiting(namespace)
    p.call("execute", code="""
import threading
done = agent.dist.kv_cache_manager.layer_publisher(agent.caches['kv5'])
threads = [threading.Thread(target=done, args=(layer % 6,)) for layer in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert done.layers == 6
for bad in (6, 2**32):
    try:
        done(bad)
    except shmkv.LLMParamError:
        pass
    else:
        raise AssertionError(bad)
""")
    assert end(d) == SUCCESS
    for code in ("layer_publisher(agent.caches['kv5'], rows=[2])", "layer_publisher(agent.caches['kv5'], tensor_num_per_layer=13)",
                 "layer_publisher(agent.caches['kv5'], tensor_num_per_layer=0)"):
        assert p.outcome("execute", code=f"agent.dist.kv_cache_manager.{code}") == "LLM_PARAM_INVALID"
    p.call("execute", code="agent.done = agent.dist.kv_cache_manager.layer_publisher(agent.caches['kv5'], tensor_num_per_layer=5)")
    p.call("unbind", name="kv5", rows=[0])
    assert p.call("execute", code="agent.done(0)\nagent.done(1)\nfrom shmkv._lookup import MISSES\nresult = agent.done.layers") == 2
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "the tensors left over came with the last layer"
    p.call("deallocate", name="kv5")
    assert p.outcome("execute", code="agent.done(0)") == NOT_EXIST
