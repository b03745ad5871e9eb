"""Prefixes that their keys keep: which go when there are too many, what counts as use, what `contains` says."""
from __future__ import annotations

from typing import Any

import pytest
from lent import ask, within
from peer import Peer, StartPeer, by_id, prefix, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS

pytestmark = pytest.mark.timeout(180)
PAGE = 4096
SHAPE = [1, PAGE]
SEGMENT = 3 * PAGE              # a header's page and two tensors


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P with a fresh directory, D with a buffer for a row."""
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="into", num_tensors=2, shape=SHAPE, dtype="DT_INT8")
    return p, d


def keep(p: Peer, *numbers: int) -> None:
    """Prefixes, each in a cache of its own that its key alone keeps alive."""
    for number in numbers:
        p.call("allocate", name=f"{number}", num_tensors=2, shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, number)])
        p.call("deallocate", name=f"{number}")


def there(p: Peer, numbers: range) -> list[int]:
    """Prefixes that a pull would find."""
    return [number for number in numbers if within(p, "contains", key=prefix(1, number))]


def stats(p: Peer) -> tuple[int, int, int]:
    """Caches, hits, evictions."""
    found = p.call("stats")
    return found["caches"], found["prefix_hits"], found["prefix_evictions"]


def pull(d: Peer, number: int) -> str:
    return d.outcome("pull", key=prefix(1, number), name="into")


# -- eviction ---------------------------------------------------------------------------------------------------------

def test_without_a_capacity_all_stay(sides: tuple[Peer, Peer]) -> None:
    p, _ = sides
    keep(p, *range(20))
    p.call("collect")
    assert there(p, range(20)) == list(range(20))
    assert stats(p) == (20, 0, 0)


def test_the_oldest_go_first(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    keep(p, *range(5))
    assert p.call("stats")["cache_bytes"] == 5 * SEGMENT
    within(p, "set_prefix_capacity", nbytes=3 * SEGMENT)
    assert there(p, range(5)) == [2, 3, 4], "at once"
    keep(p, 5)
    assert there(p, range(6)) == [3, 4, 5], "and by each deallocate"
    assert stats(p) == (3, 0, 3)
    answer = d.attempt("pull", key=prefix(1, 0), name="into")
    assert (answer.outcome, "removed" in answer.text) == (NOT_EXIST, True)
    within(p, "set_prefix_capacity", nbytes=SEGMENT)
    assert there(p, range(6)) == [5]
    within(p, "set_prefix_capacity", nbytes=SEGMENT - 1)
    assert there(p, range(6)) == []
    assert stats(p) == (0, 0, 6)
    within(p, "set_prefix_capacity", nbytes=None)
    keep(p, *range(8))
    assert there(p, range(8)) == list(range(8))
    assert p.call("stats")["prefix_evictions"] == 6


@pytest.mark.parametrize("use", ["pull", "pull by id", "view", "fork", "own view"])
def test_what_was_used_is_young(prompt: StartPeer, decoder: StartPeer, use: str) -> None:
    p = prompt(1, enable_switch_role=True)
    keep(p, *range(4))
    if use == "own view":
        p.call("switch_role", role="DECODER")
        within(p, "view", name="v", key=prefix(1, 0))
        within(p, "close", name="v")
    else:
        d = decoder(2)
        d.call("allocate", name="into", num_tensors=2, shape=SHAPE, dtype="DT_INT8")
        if use.startswith("pull"):
            d.call("pull", key=prefix(1, 0) if use == "pull" else by_id(1, 1), name="into")
        else:
            within(d, use, name="v", key=prefix(1, 0))
            within(d, "drop", names=["v"])
            d.call("collect")
    within(p, "set_prefix_capacity", nbytes=2 * SEGMENT)
    assert there(p, range(4)) == [0, 3]
    assert stats(p) == (2, 1, 2)


def test_order_of_many_uses(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    keep(p, *range(6))
    for number in (4, 0, 5, 2, 0, 3, 1, 4):
        assert pull(d, number) == SUCCESS
    for left in ([0, 1, 2, 3, 4], [0, 1, 3, 4], [1, 3, 4], [1, 4], [4], []):
        within(p, "set_prefix_capacity", nbytes=len(left) * SEGMENT)
        assert there(p, range(6)) == left
    assert stats(p) == (0, 8, 6)


def test_one_that_is_lent_stays(sides: tuple[Peer, Peer]) -> None:
    """The next ones go instead; it goes when it is given back and there are too many still."""
    p, d = sides
    keep(p, *range(4))
    within(d, "view", name="v", key=prefix(1, 0))
    within(d, "fork", name="f", key=prefix(1, 1))
    for number in (2, 3):
        assert pull(d, number) == SUCCESS
    within(p, "set_prefix_capacity", nbytes=2 * SEGMENT)
    assert there(p, range(4)) == [0, 1], "the oldest are lent"
    within(p, "set_prefix_capacity", nbytes=0)
    assert there(p, range(4)) == [0, 1]
    assert pull(d, 0) == SUCCESS, "and can be pulled meanwhile"
    within(d, "close", name="v")
    p.call("collect")
    assert there(p, range(4)) == [1]
    d.kill()
    p.call("execute", code="import time\nfor _ in range(10):\n    agent.collect()\n    time.sleep(0.01)")
    assert there(p, range(4)) == []
    assert stats(p)[2] == 4


def test_caches_that_live_by_anything_else_do_not_count(sides: tuple[Peer, Peer]) -> None:
    p, _ = sides
    p.call("allocate", name="held", num_tensors=2, shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1)])
    p.call("allocate", name="mixed", num_tensors=2, shape=[2, PAGE], dtype="DT_INT8", keys=[prefix(1, 2), req(1, 2)])
    p.call("allocate", name="request", num_tensors=2, shape=SHAPE, dtype="DT_INT8", keys=[req(1, 3)])
    p.call("deallocate", name="mixed")
    p.call("deallocate", name="request")
    keep(p, 4)
    within(p, "set_prefix_capacity", nbytes=0)
    assert there(p, range(5)) == [1, 2]
    assert within(p, "contains", key=req(1, 2))
    assert within(p, "contains", key=req(1, 3))
    assert stats(p) == (3, 0, 1)
    p.call("remove_key", key=req(1, 2))
    assert there(p, range(5)) == [1], "only prefixes are left of it"
    p.call("deallocate", name="held")
    assert there(p, range(5)) == []
    assert stats(p) == (1, 0, 3)


def test_a_cache_of_many_prefixes_goes_as_a_whole(sides: tuple[Peer, Peer]) -> None:
    """It is as young as the youngest of them."""
    p, d = sides
    p.call("allocate", name="many", num_tensors=2, shape=[4, PAGE], dtype="DT_INT8", keys=[prefix(1, n) for n in range(4)])
    p.call("deallocate", name="many")
    keep(p, 10, 11)
    assert pull(d, 2) == SUCCESS
    many = p.call("stats")["cache_bytes"] - 2 * SEGMENT
    within(p, "set_prefix_capacity", nbytes=many + SEGMENT)
    assert there(p, range(12)) == [0, 1, 2, 3, 11]
    assert pull(d, 11) == SUCCESS
    within(p, "set_prefix_capacity", nbytes=many)
    assert there(p, range(12)) == [11]
    assert stats(p) == (1, 2, 2)


def test_a_capacity_holds_for_time_to_live_and_rebinding(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    p.call("allocate", name="kv", num_tensors=2, shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1)])
    for _ in range(3):
        assert pull(d, 1) == SUCCESS
    p.call("bind", name="kv", keys=[(0, prefix(1, 2))])
    assert pull(d, 2) == SUCCESS
    p.call("bind", name="kv", keys=[(0, req(1, 3))])
    d.call("pull", key=req(1, 3), name="into")
    assert p.call("stats")["prefix_hits"] == 4, "of keys that ended, too, and of no request"
    within(p, "set_prefix_capacity", nbytes=10 * SEGMENT)
    p.call("allocate", name="short", num_tensors=2, shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 5)], key_ttl_ms=1)
    p.call("deallocate", name="short")
    p.call("execute", code="import time\ntime.sleep(0.005)\nagent.collect()")
    assert there(p, range(6)) == []
    assert p.call("stats")["prefix_evictions"] == 0


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_wrong_capacities(sides: tuple[Peer, Peer], wrong: int) -> None:
    p, _ = sides
    assert ask(p, "set_prefix_capacity", nbytes=wrong).outcome == PARAM_INVALID
    assert ask(p, "set_prefix_capacity", nbytes="1").outcome == "TypeError"
    assert ask(p, "set_prefix_capacity", nbytes=1.0).outcome == "TypeError"


# -- contains ---------------------------------------------------------------------------------------------------------------

def asked(peer: Peer, key: list[Any]) -> bool | str:
    answer = ask(peer, "contains", key=key)
    return answer.value if answer.outcome == SUCCESS else answer.outcome


@pytest.mark.parametrize("who", ["owner", "decoder"])
def test_contains_says_what_a_pull_would_find(sides: tuple[Peer, Peer], who: str) -> None:
    p, d = sides
    asker = p if who == "owner" else d
    p.call("allocate", name="kv", num_tensors=2, shape=[3, PAGE], dtype="DT_INT8", publish=False,
           keys=[req(1, 1), req(1, 2, 5), prefix(1, 3)])
    keys = [req(1, 1), req(1, 2, 5), prefix(1, 3), req(1, 2), prefix(1, 1), req(1, 3)]
    assert [asked(asker, key) for key in keys] == [False] * 6
    p.call("publish", name="kv", rows=[0], layers=1, tensor_num_per_layer=1)
    assert not asked(asker, req(1, 1)), "half of it"
    p.call("publish", name="kv", rows=[0, 2])
    assert [asked(asker, key) for key in keys] == [True, False, True, False, False, False]
    p.call("publish", name="kv")
    assert [asked(asker, key) for key in keys] == [True, True, True, False, False, False]
    for _ in range(2):
        assert asked(asker, req(1, 1)) is True, "it uses nothing up"
    assert p.call("stats")["prefix_hits"] == 0, "and is no use"
    d.call("pull", key=req(1, 1), name="into")
    p.call("remove_key", key=req(1, 2, 5))
    p.call("deallocate", name="kv")
    assert [asked(asker, key) for key in keys[:3]] == [False, False, True]
    p.call("remove_key", key=prefix(1, 3))
    assert not asked(asker, prefix(1, 3))


def test_contains_of_links_that_cannot_be_used(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    keep(p, 1)
    assert asked(d, prefix(1, 1)) is True
    assert asked(d, prefix(7, 1)) == "LLM_NOT_YET_LINK"
    assert asked(p, prefix(2, 1)) == "LLM_NOT_YET_LINK"
    assert asked(d, prefix(2, 1)) is False, "of one's own no link is needed"
    assert asked(d, by_id(1, 1)) == "TypeError"
    assert asked(d, ["key", 1, 2**64 - 1, 0, 2**64 - 1]) == PARAM_INVALID
    d.call("unlink", ids=[1])
    assert asked(d, prefix(1, 1)) == "LLM_NOT_YET_LINK"
    d.call("link", ids=[1])
    p.call("unlink", ids=[2])
    assert asked(d, prefix(1, 1)) == "LLM_NOT_YET_LINK"
    d.call("link", ids=[1])
    p.stop()
    assert asked(d, prefix(1, 1)) is True, "nobody has to answer"
    p.cont()
    p.kill()
    assert asked(d, prefix(1, 1)) == "LLM_WAIT_PROCESS_TIMEOUT"


def test_contains_and_capacity_after_the_end(sides: tuple[Peer, Peer]) -> None:
    p, _ = sides
    assert p.call("execute", code="""
import os
manager = agent.dist.kv_cache_manager
def said(call, *arguments):
    try:
        call(*arguments)
    except shmkv.LLMException as error:
        return error.status_code.name
    return "LLM_SUCCESS"
def both():
    return [said(manager.contains, shmkv.CacheKey(1, 1)), said(manager.set_prefix_capacity, 1)]
pid = os.fork()
if pid == 0:
    os._exit(0 if both() == ["LLM_FAILED"] * 2 else 1)
result = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *both()]
agent.finalize()
result += both()
""") == [0, SUCCESS, SUCCESS, "LLM_ENGINE_FINALIZED", "LLM_ENGINE_FINALIZED"]
