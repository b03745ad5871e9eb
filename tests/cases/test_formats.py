"""Field case FR-037: one side has [heads, tokens], the other [tokens, heads], and as many bytes."""
from __future__ import annotations

from typing import Any

import pytest
from peer import SUCCESS, Peer, StartPeer, by_id

pytestmark = pytest.mark.timeout(120)
INVALID = "LLM_PARAM_INVALID"


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    d.call("listen")
    return p, d


def allocate(pair: tuple[Peer, Peer], formats: tuple[str | None, str | None], name: str = "kv") -> int:
    p, d = pair
    number = int(p.call("allocate", name=name, num_tensors=2, shape=[1, 2, 8], dtype="DT_INT8", kv_format=formats[0]))
    p.call("fill", name=name, generation=1)
    d.call("allocate", name=name, num_tensors=2, shape=[1, 8, 2], dtype="DT_INT8", kv_format=formats[1])
    return number


def pull(pair: tuple[Peer, Peer], number: int, name: str = "kv", **how: Any) -> str:
    return pair[1].attempt("pull", key=by_id(1, number, 0), name=name, **how).outcome


def test_fr_037_differing_formats_are_refused_when_they_have_to_be_equal(pair: tuple[Peer, Peer]) -> None:
    number = allocate(pair, ("HND", "NHD"))
    pair[1].call("canary", name="kv")
    refused = pair[1].attempt("pull", key=by_id(1, number, 0), name="kv", strict_format=True)
    assert refused.outcome == INVALID
    assert "'NHD'" in refused.text, "the message names the destination's format"
    assert (pair[1].read("kv") == 0x5A).all(), "nothing was written"
    assert pair[1].call("heard") == [], "what is refused needs no remark"


def test_fr_037_differing_formats_are_remarked_once_a_link(pair: tuple[Peer, Peer]) -> None:
    number = allocate(pair, ("HND", "NHD"))
    assert [pull(pair, number) for _ in range(3)] == [SUCCESS] * 3, "bytes are copied"
    said = pair[1].call("heard")
    assert len(said) == 1
    assert "kv_tensor_format" in said[0]
    assert "cluster 1" in said[0]


def test_fr_037_a_later_cache_of_another_format_is_remarked_too(pair: tuple[Peer, Peer]) -> None:
    """The prepared pull that a destination keeps looks as well."""
    same, other = allocate(pair, ("HND", "HND")), allocate(pair, ("NHD", "HND"), name="other")
    assert pull(pair, same) == SUCCESS
    assert pair[1].call("heard") == []
    assert pull(pair, other, name="kv") == SUCCESS
    assert len(pair[1].call("heard")) == 1


def test_fr_037_a_prepared_pull_remarks_it_as_well(pair: tuple[Peer, Peer]) -> None:
    same, other = allocate(pair, ("HND", "HND")), allocate(pair, ("NHD", "HND"), name="other")
    pair[1].call("execute", code=f"""
prepared = agent.dist.kv_cache_manager.prepare_pull(agent.caches["kv"])
for number in ({same}, {same}, {other}, {other}):
    prepared(shmkv.CacheKeyByIdAndIndex(1, number, 0))
""")
    said = pair[1].call("heard")
    assert len(said) == 1
    assert "kv_tensor_format" in said[0]


def test_fr_037_own_caches_are_compared_too(pair: tuple[Peer, Peer]) -> None:
    d = pair[1]
    number = d.call("allocate", name="from", num_tensors=2, shape=[1, 2, 8], dtype="DT_INT8", kv_format="HND")
    d.call("allocate", name="into", num_tensors=2, shape=[1, 8, 2], dtype="DT_INT8", kv_format="NHD")
    d.call("canary", name="into")
    assert d.attempt("pull", key=by_id(2, number, 0), name="into", strict_format=True).outcome == INVALID
    assert (d.read("into") == 0x5A).all(), "nothing was written"
    assert d.attempt("pull", key=by_id(2, number, 0), name="into").outcome == SUCCESS


@pytest.mark.parametrize("formats", [("HND", "HND"), (None, "HND"), ("HND", None), (None, None)])
def test_fr_037_equal_or_missing_formats_are_no_difference(pair: tuple[Peer, Peer], formats: tuple[str | None, str | None]) -> None:
    number = allocate(pair, formats)
    assert pull(pair, number, strict_format=True) == SUCCESS
    assert pull(pair, number) == SUCCESS
    assert pair[1].call("heard") == []


def test_fr_037_strict_format_is_true_or_false(pair: tuple[Peer, Peer]) -> None:
    number = allocate(pair, (None, None))
    assert pull(pair, number) == SUCCESS
    assert pull(pair, number, strict_format=False) == SUCCESS
    for wrong in (1, 0, None, "yes"):
        assert "TypeError" in pair[1].attempt("pull", key=by_id(1, number, 0), name="kv", strict_format=wrong).kinds
