"""Contract, appendix B3: a pull that fails changes nothing: no byte, no key, no coverage."""
from __future__ import annotations

from typing import Any

import pytest
from peer import Peer, StartPeer, by_id, prefix, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS

pytestmark = pytest.mark.timeout(120)
NOT_LINKED = "LLM_NOT_YET_LINK"
KEY, UNKNOWN, ELSEWHERE = req(1, 1), req(1, 2), req(7, 1)
AMBIGUOUS, NAMES_NOTHING = ["key", 1, 1, 0, 1], ["key", 1, 2**64 - 1, 0, 2**64 - 1]
FIRST_LAYER = {"src_layer_range": range(1), "dst_layer_range": range(1)}
SECOND_LAYER = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}


@pytest.fixture
def half_pulled(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """KEY names a row of which the first of two layers has been pulled; the destination "kv" holds 0x5A."""
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv")
    assert p.call("allocate", name="bare") == 1
    _pull_half(p, d)
    return p, d


def _pull_half(p: Peer, d: Peer) -> None:
    p.call("allocate", name="kv", keys=[KEY])
    p.call("fill", name="kv", generation=1)
    d.call("pull", key=KEY, name="kv", **FIRST_LAYER)
    d.call("canary", name="kv")


SECOND = {"key": KEY, **SECOND_LAYER}
FAILURES: list[tuple[str, dict[str, Any], str]] = [
    ("size 0", {**SECOND, "size": 0}, PARAM_INVALID),
    ("size -2", {**SECOND, "size": -2}, PARAM_INVALID),
    ("size over the row", {**SECOND, "size": 17}, PARAM_INVALID),
    ("size over any row", {**SECOND, "size": 2**63 - 1}, PARAM_INVALID),
    ("size over int64", {**SECOND, "size": 2**63}, PARAM_INVALID),
    ("size as text", {**SECOND, "size": "16"}, "TypeError"),
    ("row of the destination", {**SECOND, "batch_index": 2}, PARAM_INVALID),
    ("row over uint32", {**SECOND, "batch_index": 2**32}, PARAM_INVALID),
    ("negative row", {**SECOND, "batch_index": -1}, PARAM_INVALID),
    ("destination offset at the end", {**SECOND, "dst_cache_offset": 16}, PARAM_INVALID),
    ("destination offset over the end", {**SECOND, "dst_cache_offset": 17}, PARAM_INVALID),
    ("destination offset and size", {**SECOND, "dst_cache_offset": 1, "size": 16}, PARAM_INVALID),
    ("huge destination offset", {**SECOND, "dst_cache_offset": 2**63 - 1, "size": 2**63 - 1}, PARAM_INVALID),
    ("source offset alone", {**SECOND, "src_cache_offset": 4}, PARAM_INVALID),
    ("huge source offset", {**SECOND, "src_cache_offset": 2**63 - 1}, PARAM_INVALID),
    ("huge source offset and size", {**SECOND, "src_cache_offset": 2**63 - 8, "size": 16}, PARAM_INVALID),
    ("negative offset", {**SECOND, "src_cache_offset": -1}, PARAM_INVALID),
    ("source layers", {"key": KEY, "src_layer_range": range(1, 3)}, PARAM_INVALID),
    ("source layers far out", {"key": KEY, "src_layer_range": range(2**31, 2**31 + 2)}, PARAM_INVALID),
    ("destination layers", {"key": KEY, "dst_layer_range": range(1, 3)}, PARAM_INVALID),
    ("destination layer far out", {**SECOND, "dst_layer_range": range(2**31, 2**31 + 1)}, PARAM_INVALID),
    ("number of tensors", {"key": KEY, "src_layer_range": range(1, 2)}, PARAM_INVALID),
    ("unequal ranges", {**SECOND, "dst_layer_range": range(2)}, PARAM_INVALID),
    ("empty range", {"key": KEY, "src_layer_range": range(1, 1)}, PARAM_INVALID),
    ("empty ranges", {"key": KEY, "src_layer_range": range(0), "dst_layer_range": range(0)}, PARAM_INVALID),
    ("no tensors a layer", {**SECOND, "tensor_num_per_layer": 0}, PARAM_INVALID),
    ("tensors a layer do not divide", {**SECOND, "tensor_num_per_layer": 3}, PARAM_INVALID),
    ("more tensors a layer than tensors", {"key": KEY, "tensor_num_per_layer": 5}, PARAM_INVALID),
    ("ambiguous key", {**SECOND, "key": AMBIGUOUS}, PARAM_INVALID),
    ("padding key", {**SECOND, "key": NAMES_NOTHING}, PARAM_INVALID),
    ("unknown request", {**SECOND, "key": UNKNOWN}, NOT_EXIST),
    ("unknown model", {**SECOND, "key": req(1, 1, 5)}, NOT_EXIST),
    ("prefix of the same number", {**SECOND, "key": prefix(1, 1)}, NOT_EXIST),
    ("unknown cache id", {**SECOND, "key": by_id(1, 10**6)}, NOT_EXIST),
    ("cache id 0", {**SECOND, "key": by_id(1, 0)}, NOT_EXIST),
    ("cache id -1", {**SECOND, "key": by_id(1, -1)}, NOT_EXIST),
    ("largest cache id", {**SECOND, "key": by_id(1, 2**63 - 1)}, NOT_EXIST),
    ("row of the source", {**SECOND, "key": by_id(1, 1, 2)}, NOT_EXIST),
    ("last row of a uint32", {**SECOND, "key": by_id(1, 1, 2**32 - 1)}, NOT_EXIST),
    ("no link", {**SECOND, "key": ELSEWHERE}, NOT_LINKED),
]


def test_b3_failed_pull_changes_nothing(half_pulled: tuple[Peer, Peer]) -> None:
    p, d = half_pulled
    said, touched = {}, []
    for name, how, answer in FAILURES:
        failed = d.attempt("pull", name="kv", **how)
        if answer not in (failed.outcome, *failed.kinds):
            said[name] = failed.outcome
        if (d.read("kv") != 0x5A).any():
            touched.append(name)
        _key_and_coverage_are_as_before(d)
        _pull_half(p, d)
    assert (said, touched) == ({}, [])


def _key_and_coverage_are_as_before(d: Peer) -> None:
    """The first layer is covered, the second is not: only a pull of the second one ends the key."""
    said = [d.outcome("pull", key=KEY, name="kv", **how) for how in (FIRST_LAYER, SECOND_LAYER, FIRST_LAYER)]
    assert said == [SUCCESS, SUCCESS, NOT_EXIST]


def test_b3_deallocated_destination(half_pulled: tuple[Peer, Peer]) -> None:
    _, d = half_pulled
    d.call("allocate", name="gone")
    d.call("deallocate", name="gone")
    assert d.outcome("pull", name="gone", **SECOND) == NOT_EXIST
    _key_and_coverage_are_as_before(d)


def test_b3_host_destination(half_pulled: tuple[Peer, Peer]) -> None:
    _, d = half_pulled
    d.call("execute", code="""
import ctypes
agent.memory = ctypes.create_string_buffer(b"Z" * 128, 128)
desc = shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_FLOAT16, shmkv.Placement.HOST)
start = ctypes.addressof(agent.memory)
agent.caches["host"] = shmkv.KvCache.create_cpu_cache(desc, [start + 32 * tensor for tensor in range(4)])
""")
    assert d.outcome("pull", name="host", **SECOND) == PARAM_INVALID
    assert d.call("execute", code="result = agent.memory.raw == b'Z' * 128")
    _key_and_coverage_are_as_before(d)


def test_b3_source_row_that_is_too_short(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="short", shape=[2, 4], keys=[KEY])
    d.call("allocate", name="kv")
    d.call("canary", name="kv")
    for how in ({}, {"size": 9}, {"size": 8, "src_cache_offset": 1}, {"src_cache_offset": 8, "size": 1}):
        assert d.outcome("pull", key=KEY, name="kv", **how) == PARAM_INVALID
    assert (d.read("kv") == 0x5A).all()
    assert d.outcome("pull", key=KEY, name="kv", size=8) == SUCCESS


def test_b3_row_of_five_bytes(prompt: StartPeer, decoder: StartPeer) -> None:
    """FR-002: what lies behind the last row of a mapped page is never part of it."""
    p, d = prompt(1), decoder(2)
    for side in (p, d):
        side.call("allocate", name="kv", num_tensors=1, shape=[1, 5], dtype="DT_INT8")
    p.call("fill", name="kv", generation=1)
    for how in ({"size": 6}, {"src_cache_offset": 5, "size": 1}, {"dst_cache_offset": 5, "size": 1}):
        assert d.outcome("pull", key=by_id(1, 1), name="kv", **how) == PARAM_INVALID
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
    assert d.read("kv").tolist() == p.read("kv").tolist()


@pytest.mark.parametrize("role", ["PROMPT", "MIX"])
def test_b3_role_is_looked_at_first(prompt: StartPeer, decoder: StartPeer, namespace: Any, role: str) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[KEY])
    d.call("allocate", name="kv")
    other = namespace.start_cluster(role, 3)
    other.call("allocate", name="kv")
    other.call("canary", name="kv")
    assert other.outcome("pull", key=KEY, name="kv") == PARAM_INVALID
    assert other.outcome("pull", key=KEY, name="kv", size="a type error comes later") == PARAM_INVALID
    assert (other.read("kv") == 0x5A).all()
    assert d.outcome("pull", key=KEY, name="kv") == SUCCESS


ORDER: list[tuple[str, dict[str, Any], str]] = [
    # two faults each; the one that the contract checks first is answered
    ("type of size, then offset", {"key": KEY, "size": "x", "src_cache_offset": -1}, "TypeError"),
    ("value of size, then type of row", {"key": KEY, "size": 0, "batch_index": "x"}, PARAM_INVALID),
    ("argument, then destination", {"key": KEY, "name": "gone", "size": 0}, PARAM_INVALID),
    ("destination, then its row", {"key": KEY, "name": "gone", "batch_index": 2}, NOT_EXIST),
    ("row, then link", {"key": ELSEWHERE, "batch_index": 2}, PARAM_INVALID),
    ("destination layers, then link", {"key": ELSEWHERE, "dst_layer_range": range(2, 3)}, PARAM_INVALID),
    ("window, then link", {"key": ELSEWHERE, "dst_cache_offset": 16}, PARAM_INVALID),
    ("unequal ranges, then link", {**SECOND, "key": ELSEWHERE, "dst_layer_range": range(2)}, PARAM_INVALID),
    ("link, then key", {"key": by_id(7, -1)}, NOT_LINKED),
    ("link, then source window", {"key": ELSEWHERE, "src_cache_offset": 4}, NOT_LINKED),
    ("key, then source window", {"key": UNKNOWN, "src_cache_offset": 4}, NOT_EXIST),
    ("key, then source layers", {"key": UNKNOWN, "src_layer_range": range(8, 10)}, NOT_EXIST),
    ("key, then number of tensors", {"key": UNKNOWN, "src_layer_range": range(1)}, NOT_EXIST),
]


def test_b3_checks_come_in_the_order_of_the_contract(half_pulled: tuple[Peer, Peer]) -> None:
    _, d = half_pulled
    d.call("allocate", name="gone")
    d.call("deallocate", name="gone")
    for name, how, answer in ORDER:
        said = d.attempt("pull", **{"name": "kv", **how})
        assert answer in (said.outcome, *said.kinds), name
    assert (d.read("kv") == 0x5A).all()
    _key_and_coverage_are_as_before(d)
