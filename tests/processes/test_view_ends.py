"""The end of whoever holds views: dropped, in cycles, finalized, forked, interpreters that end, threads that close at once."""
from __future__ import annotations

import pytest
from lent import assert_row, let_go, within
from peer import Peer, StartPeer, by_id, prefix, req
from reference import NOT_EXIST, SUCCESS, geometry, noise

pytestmark = pytest.mark.timeout(180)
SHAPE = [2, 96]
SENT = noise(geometry(4, SHAPE, 1), 5)


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P's cache 1 has two rows of noise, prefixes 1 and 2; D has an open view of the second, and its arrays besides."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1), prefix(1, 2)])
    p.call("noise", name="kv", seed=5)
    within(d, "view", name="v", key=prefix(1, 2))
    within(d, "arrays", name="arrays", of="v")
    return p, d


@pytest.mark.parametrize("names", [["v", "arrays"], ["arrays", "v"]])
def test_what_is_dropped_gives_its_lease_back(sides: tuple[Peer, Peer], names: list[str]) -> None:
    _, d = sides
    before = d.call("execute", code="import lent\nresult = len(lent.mapped(agent))")
    within(d, "drop", names=names)
    assert within(d, "leases") == 0
    d.call("unlink", ids=[1])
    assert (before, len(within(d, "mapped"))) == (1, 0)


SIDE = "from shmkv import _link_record\nresult = _link_record.read(agent.dist._cluster.directory.region, 0)['sides'][1]['open']"


@pytest.mark.parametrize("last", ["view", "fork", "dropped view"])
def test_the_record_of_a_removed_link_goes_with_the_last_lease(sides: tuple[Peer, Peer], last: str) -> None:
    """No other call about links is needed."""
    p, d = sides
    if last == "fork":
        d.call("execute", code="agent.caches['fork'] = agent.dist.kv_cache_manager.fork_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 1))")
        within(d, "drop", names=["v", "arrays"])
    assert d.call("unlink", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert p.call("execute", code=SIDE) != 0, "something is lent"
    if last == "view":
        d.call("execute", code="agent.lent['v'].close()")
    else:
        if last == "fork":
            d.call("deallocate", name="fork")
        else:
            within(d, "drop", names=["v", "arrays"])
        d.call("collect")
    assert p.call("execute", code=SIDE) == 0


_CYCLES = """
import gc
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1, 1)
class Box:
    pass
def cycle(late):
    view = manager.view_cache(key)
    if late:
        box = Box()
    else:
        box = manager.fork_cache(key)
        box._extra = box
    held = [box, view, view.tensors, box]
    held.append(held)
    if late:
        box.held = held
    return None
handle = agent.dist._links.handle(1)
gc.disable()
for number in range(20):
    cycle(number % 2)
before = handle.leases
gc.enable()
gc.collect()
manager.collect()
gc.collect()
result = [before, handle.leases]
"""


def test_cycles_are_collected(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    before, after = d.call("execute", code=_CYCLES.replace("box._extra = box", "pass"))
    assert (before, after) == (31, 1), "the fixture's view is left"


_FINALIZED = """
import gc
manager = agent.dist.kv_cache_manager
view, arrays = agent.lent["v"], agent.lent["arrays"]
fork = manager.fork_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 1))
own = manager.allocate_cache(shmkv.CacheDesc(4, [2, 96], shmkv.DataType.DT_INT8))
own_view = manager.view_cache(shmkv.CacheKeyByIdAndIndex(2, own.cache_id))
own_fork = manager.fork_cache(shmkv.CacheKeyByIdAndIndex(2, own.cache_id))
own_arrays = [each.tensors[0].numpy() for each in (own_view, own_fork, fork)]
agent.finalize()
def said(call):
    try:
        return call()
    except shmkv.LLMException as error:
        return error.status_code.name
result = [view.is_open, own_view.is_open, said(lambda: view.tensors), said(lambda: own_view.tensors), len(fork.tensors),
          said(lambda: manager.view_cache(shmkv.CacheKey(1, 7))), said(lambda: manager.fork_cache(shmkv.CacheKey(1, 7))),
          sum(int(each.sum()) for each in own_arrays + arrays) > -10**9]
own_arrays[1][...] = 3
own_arrays[2][...] = 4
"""


def test_finalize_closes_views_and_leaves_arrays(sides: tuple[Peer, Peer]) -> None:
    """It waits for none of them; what was made of them stays readable, forks stay writable."""
    p, d = sides
    found = d.call("execute", code=_FINALIZED)
    assert found[:4] == [False, False, NOT_EXIST, NOT_EXIST]
    assert found[4:] == [4, "LLM_ENGINE_FINALIZED", "LLM_ENGINE_FINALIZED", True]
    assert_row(d, "arrays", SENT[:, :, 1])
    let_go(p)
    assert p.call("stats")["caches"] == 0


_AGAIN = """
import gc
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1, 1)
old = [manager.fork_cache(key), manager.view_cache(key), *manager.fork_cache(key).tensors]
agent.finalize()
agent.init("DECODER", 2, {}, {})
agent.link([1])
agent.lent["again"] = agent.dist.kv_cache_manager.view_cache(key)
handle = agent.dist._links.handle(1)
result = [handle.leases]
del old
agent.lent.pop("v"), agent.lent.pop("arrays")
gc.collect()
agent.collect()
result.append(handle.leases)
"""


def test_what_is_left_of_an_earlier_life_ends_no_lease_of_the_next(sides: tuple[Peer, Peer]) -> None:
    """The record is used again by then, and so is the number of the lease."""
    p, d = sides
    assert d.call("execute", code=_AGAIN) == [1, 1]
    let_go(p)
    assert p.call("stats")["caches"] == 1
    assert_row(d, "again", SENT[:, :, 1])


@pytest.mark.parametrize("how", ["os._exit(0)", "sys.exit(0)", "del view, arrays; agent.lent.clear(); gc.collect(); os._exit(0)",
                                 "view.close(); os._exit(0 if refused(lambda: view.tensors) and not view.is_open else 1)",
                                 "os._exit(0 if int(view.tensors[0].numpy().sum()) == total else 1)",
                                 "agent.dist.finalize(); os._exit(0)",
                                 "os._exit(0 if refused(lambda: agent.dist.kv_cache_manager.view_cache(key)) else 1)",
                                 "os.execv('/bin/true', ['/bin/true'])"])
def test_a_forked_child_ends_no_lease_of_its_parent(sides: tuple[Peer, Peer], how: str) -> None:
    p, d = sides
    code = f"""
import gc, os, signal, sys
view, arrays, key = agent.lent["v"], agent.lent["arrays"], shmkv.CacheKeyByIdAndIndex(1, 1, 1)
total = int(view.tensors[0].numpy().sum())
def refused(call):
    try:
        call()
    except shmkv.LLMException:
        return True
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    try:
        {how}
    except SystemExit:
        os._exit(0)
    finally:
        os._exit(3)
result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert d.call("execute", code=code) == 0
    let_go(p)
    assert p.call("stats")["caches"] == 1
    assert_row(d, "v", SENT[:, :, 1])
    within(d, "close", name="v")
    p.call("collect")
    assert p.call("stats")["caches"] == 0


def test_the_interpreter_ends_with_open_views(sides: tuple[Peer, Peer]) -> None:
    """Of a link, of the own cluster, forks, arrays; in module globals and cycles: exit 0 without a word (the fixture looks)."""
    p, d = sides
    d.call("execute", code="""
import builtins, sys
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1, 1)
own = manager.allocate_cache(shmkv.CacheDesc(4, [2, 96], shmkv.DataType.DT_INT8))
mine = shmkv.CacheKeyByIdAndIndex(2, own.cache_id)
kept = [manager.view_cache(key), manager.fork_cache(key), manager.view_cache(mine), manager.fork_cache(mine)]
kept += [each.tensors[0].numpy() for each in kept]
kept.append(kept)
builtins.kept = sys.kept = kept
""")
    d.close()
    let_go(p)
    assert p.call("stats")["caches"] == 0


_RACE = """
import sys, threading
sys.setswitchinterval(1e-6)
manager = agent.dist.kv_cache_manager
keys = [shmkv.CacheKeyByIdAndIndex(1, 1, 1), shmkv.CacheKeyByIdAndIndex(2, 1, 1)]
found, failures = set(), []
def look(view, gate):
    gate.wait()
    try:
        found.update(tensor.nbytes for tensor in view.tensors)
        view.close()
    except shmkv.LLMException as error:
        found.add(error.status_code.name)
    except BaseException as error:
        failures.append(repr(error))
for number in range({rounds}):
    view, gate = manager.view_cache(keys[number % 2]), threading.Barrier(3)
    threads = [threading.Thread(target=look, args=(view, gate)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not view.is_open
result = [failures, sorted(map(str, found - {"LLM_KV_CACHE_NOT_EXIST"})), agent.dist._links.handle(1).leases]
"""


def test_threads_look_and_close_at_once(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    d.call("allocate", name="own", shape=SHAPE, dtype="DT_INT8")
    assert d.call("execute", code=_RACE.replace("{rounds}", "300")) == [[], ["96"], 1]
    d.call("deallocate", name="own")
    assert d.call("stats")["caches"] == 0, "it was counted out as often as in"
    assert p.outcome("collect") == SUCCESS


def test_more_segments_than_are_kept_mapped(prompt: StartPeer, decoder: StartPeer) -> None:
    """Pulls from many segments let go of the oldest mapping, which a view holds on to."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[req(1, 1)])
    p.call("noise", name="kv", seed=5)
    within(d, "view", name="v", key=by_id(1, 1, 1))
    many = 1100
    p.call("execute", code=f"for n in range({many}):\n    agent.allocate(str(n), 1, (1, 8), 'DT_INT8')")
    d.call("execute", code=f"""
into = agent.dist.kv_cache_manager.allocate_cache(shmkv.CacheDesc(1, [1, 8], shmkv.DataType.DT_INT8))
for n in range({many}):
    agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, n + 2), into)
""")
    assert_row(d, "v", SENT[:, :, 1])
    within(d, "close", name="v")
