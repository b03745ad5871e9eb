"""From the lease to the last array: who keeps the memory of a view, who waits for it, what outlives what."""
from __future__ import annotations

import pytest
from lent import ask, assert_row, within
from peer import Namespace, Peer, StartPeer, by_id, prefix, req
from reference import NOT_EXIST, SUCCESS, geometry, noise

pytestmark = pytest.mark.timeout(180)
SHAPE = [2, 96]
SENT = noise(geometry(4, SHAPE, 1), 5)
# An owner looks for dead readers at most every 20 ms.
LOOK = "import time\nfor _ in range(10):\n    agent.collect()\n    time.sleep(0.01)"


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P's cache 1 has two rows of noise, prefixes 1 and 2; D has an open view of the second, and its arrays besides."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1), prefix(1, 2)])
    p.call("noise", name="kv", seed=5)
    within(d, "view", name="v", key=prefix(1, 2))
    within(d, "arrays", name="arrays", of="v")
    return p, d


def let_go(p: Peer) -> None:
    """The owner wants its cache no more, and looks as often as it may."""
    p.call("deallocate", name="kv")
    for number in (1, 2):
        p.call("remove_key", key=prefix(1, number))
    p.call("execute", code=LOOK)


def assert_same_memory_comes_again(p: Peer, wanted: bool) -> None:
    """The next cache of the same size gets the memory, or not."""
    before = p.call("execute", code="result = agent.caches['kv'].per_device_tensor_addrs or agent.was")
    p.call("allocate", name="next", shape=SHAPE, dtype="DT_INT8")
    p.call("noise", name="next", seed=77)
    assert (p.call("execute", code="result = agent.caches['next'].per_device_tensor_addrs") == before) == wanted


def remember_address(p: Peer) -> None:
    p.call("execute", code="agent.was = agent.caches['kv'].per_device_tensor_addrs")


# -- the owner waits ------------------------------------------------------------------------------------------------------

def test_memory_is_used_again_after_the_view_is_closed(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    remember_address(p)
    let_go(p)
    assert_same_memory_comes_again(p, False)
    assert_row(d, "v", SENT[:, :, 1])
    p.call("deallocate", name="next")
    within(d, "close", name="v")
    p.call("collect")
    assert p.call("stats")["caches"] == 0


def test_the_name_stays_until_the_last_lease_is_gone(prompt: StartPeer, decoder: StartPeer, namespace: Namespace) -> None:
    """Without recycling: the segment itself goes, at the owner's next call."""
    p, decoders = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), [decoder(2), decoder(3)]
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1), prefix(1, 2)])
    p.call("noise", name="kv", seed=5)
    for d in decoders:
        within(d, "view", name="v", key=prefix(1, 2))
    within(decoders[0], "view", name="w", key=prefix(1, 1))
    let_go(p)
    for d, name in ((decoders[0], "v"), (decoders[1], "v"), (decoders[0], "w")):
        assert len(namespace.segments()) == 1
        assert_row(d, name, SENT[:, :, 0 if name == "w" else 1])
        within(d, "close", name=name)
        p.call("collect")
    assert namespace.segments() == set()


def test_a_key_that_ended_does_not_end_a_view(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    p.call("unbind", name="kv", rows=[1])
    p.call("remove_key", key=prefix(1, 1))
    assert ask(d, "view", name="w", key=prefix(1, 2)).outcome == NOT_EXIST
    assert_row(d, "v", SENT[:, :, 1])


@pytest.mark.parametrize("holder", ["view", "fork"])
def test_a_killed_holder_holds_nothing(sides: tuple[Peer, Peer], holder: str) -> None:
    """The owner has its memory at its next look."""
    p, d = sides
    if holder == "fork":
        within(d, "drop", names=["v", "arrays"])
        within(d, "fork", name="f", key=prefix(1, 2))
    let_go(p)
    assert p.call("stats")["caches"] == 1
    d.kill()
    p.call("execute", code=LOOK)
    assert p.call("stats")["caches"] == 0


def test_a_stopped_holder_holds(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    d.stop()
    let_go(p)
    assert p.call("stats")["caches"] == 1
    d.cont()
    assert_row(d, "v", SENT[:, :, 1])


# -- the link goes ----------------------------------------------------------------------------------------------------------

ENDINGS = {
    "unlinked": lambda p, d: d.call("unlink", ids=[1]),
    "unlinked by force": lambda p, d: d.call("unlink", ids=[1], force=True),
    "unlinked by the prompt": lambda p, d: p.call("unlink", ids=[2]),
    "unlinked by the prompt, by force": lambda p, d: p.call("unlink", ids=[2], force=True),
    "linked again": lambda p, d: (d.call("unlink", ids=[1]), d.call("link", ids=[1])),
    "prompt finalized": lambda p, d: p.call("finalize"),
    "prompt killed": lambda p, d: p.kill(),
}
SURVIVED = [name for name in ENDINGS if not name.startswith("prompt ")]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_view_outlives_its_link_and_its_peer(sides: tuple[Peer, Peer], ending: str) -> None:
    p, d = sides
    ENDINGS[ending](p, d)
    if ending in SURVIVED:
        let_go(p)
        remember_gone = p.call("stats")["caches"]
        assert remember_gone == 1, "the lease counts, whatever became of the link"
    assert_row(d, "v", SENT[:, :, 1])
    assert_row(d, "arrays", SENT[:, :, 1])
    within(d, "close", name="v")
    assert_row(d, "arrays", SENT[:, :, 1])
    if ending in SURVIVED:
        p.call("collect")
        assert p.call("stats")["caches"] == 0


@pytest.mark.parametrize("ending", SURVIVED)
def test_a_record_with_leases_is_nobody_elses(sides: tuple[Peer, Peer], decoder: StartPeer, ending: str) -> None:
    """Another decoder links meanwhile: it gets a record of its own, and cannot end the lease."""
    p, d = sides
    slot = d.call("execute", code="result = agent.dist._links.handle(1).slot")
    ENDINGS[ending](p, d)
    others = [decoder(number) for number in (3, 4)]
    for other in others:
        within(other, "view", name="v", key=prefix(1, 1))
        assert other.call("execute", code="result = agent.dist._links.handle(1).slot") != slot
    let_go(p)
    for other in others:
        within(other, "close", name="v")
    p.call("execute", code=LOOK)
    assert p.call("stats")["caches"] == 1
    assert_row(d, "v", SENT[:, :, 1])
    within(d, "close", name="v")
    p.call("collect")
    assert p.call("stats")["caches"] == 0
    d.call("unlink", ids=[1])               # the side is given back now
    last = decoder(5)
    assert last.call("execute", code="result = agent.dist._links.handle(1).slot") == slot


def test_the_restarted_peer_is_not_the_one_that_was_viewed(sides: tuple[Peer, Peer], prompt: StartPeer) -> None:
    p, d = sides
    p.kill()
    again = prompt(1)
    again.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1), prefix(1, 2)])
    again.call("noise", name="kv", seed=6)
    assert_row(d, "v", SENT[:, :, 1])
    assert ask(d, "view", name="w", key=prefix(1, 2)).outcome == "LLM_WAIT_PROCESS_TIMEOUT"
    d.call("unlink", ids=[1])
    d.call("link", ids=[1])
    within(d, "view", name="w", key=prefix(1, 2))
    assert_row(d, "w", noise(geometry(4, SHAPE, 1), 6)[:, :, 1])
    assert_row(d, "v", SENT[:, :, 1])
    within(d, "close", name="v")
    assert within(d, "leases") == 1
    let_go(again)
    assert again.call("stats")["caches"] == 1, "the old view's end is not the new one's"


# -- after close --------------------------------------------------------------------------------------------------------------

_CLOSED = """
def said(call):
    try:
        call()
    except shmkv.LLMException as error:
        return error.status_code.name
manager = agent.dist.kv_cache_manager
key = shmkv.CacheKeyByIdAndIndex({cluster}, 1, 0)
view = manager.view_cache(key)
tensors, array = view.tensors, view.tensors[0].numpy()
before = array.tobytes()
view.close()
view.close()
unseen = manager.view_cache(key)
unseen.close()
with manager.view_cache(key) as other:
    repr(other)
result = [said(lambda: each.tensors) for each in (view, unseen, other)]
result += [[each.is_open, each.nbytes, len(each), repr(each)] for each in (view, other)]
result += [array.tobytes() == before, tensors[1].numpy().size]
try:
    with manager.view_cache(key) as other:
        raise ZeroDivisionError
except ZeroDivisionError:
    result.append(other.is_open)
"""


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_closed_view_says_so(sides: tuple[Peer, Peer], cluster: int) -> None:
    _, d = sides
    within(d, "close", name="v")
    d.call("allocate", name="own", shape=SHAPE, dtype="DT_INT8")
    closed = [False, 0, 4, "CacheView(4 tensors, 0 bytes, closed)"]
    assert d.call("execute", code=_CLOSED.replace("{cluster}", str(cluster))) == [*[NOT_EXIST] * 3, closed, closed, True, 96, False]
    assert within(d, "leases") == 0


def test_arrays_of_a_closed_view_see_what_comes_next(sides: tuple[Peer, Peer]) -> None:
    """They stay mapped; the memory is another cache's by then."""
    p, d = sides
    remember_address(p)
    within(d, "close", name="v")
    let_go(p)
    assert_same_memory_comes_again(p, True)
    assert_row(d, "arrays", noise(geometry(4, SHAPE, 1), 77)[:, :, 1])


def test_an_own_array_keeps_its_memory(prompt: StartPeer) -> None:
    """Of the own cluster's views too: it is a view of the owner itself."""
    d = prompt(2, enable_switch_role=True)
    d.call("switch_role", role="DECODER")
    d.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8")
    d.call("noise", name="kv", seed=5)
    within(d, "view", name="v", key=by_id(2, 1, 1))
    remember_address(d)
    d.call("deallocate", name="kv")
    assert d.call("stats")["caches"] == 1, "an open view counts"
    within(d, "arrays", name="arrays", of="v")
    within(d, "close", name="v")
    d.call("collect")
    assert d.call("stats")["caches"] == 0
    assert_same_memory_comes_again(d, False)
    assert_row(d, "arrays", SENT[:, :, 1])


# -- the holder's own end -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("names", [["v", "arrays"], ["arrays", "v"]])
def test_what_is_dropped_gives_its_lease_back(sides: tuple[Peer, Peer], names: list[str]) -> None:
    _, d = sides
    before = d.call("execute", code="import lent\nresult = len(lent.mapped(agent))")
    within(d, "drop", names=names)
    assert within(d, "leases") == 0
    d.call("unlink", ids=[1])
    assert (before, len(within(d, "mapped"))) == (1, 0)


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
