"""From the lease to the last array: who keeps the memory of a view, who waits for it, what outlives what."""
from __future__ import annotations

import pytest
from lent import LOOK, ask, assert_row, let_go, within
from peer import Namespace, Peer, StartPeer, by_id, prefix
from reference import NOT_EXIST, geometry, noise

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
tensors, array, kept = view.tensors, view.tensors[0].numpy(), view.tensors[1]
before = array.tobytes()
view.close()
view.close()
unseen = manager.view_cache(key)
unseen.close()
with manager.view_cache(key) as other:
    repr(other)
result = [said(lambda: each.tensors) for each in (view, unseen, other)] + [said(lambda: tensors[1])]
result += [[each.is_open, each.nbytes, len(each), repr(each)] for each in (view, other)]
result += [array.tobytes() == before, kept.numpy().size]
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
    assert d.call("execute", code=_CLOSED.replace("{cluster}", str(cluster))) == [*[NOT_EXIST] * 4, closed, closed, True, 96, False]
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
