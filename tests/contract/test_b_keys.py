"""Contract, appendix B8: which keys a cache may be allocated with, and what they name then."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, by_id, padding, prefix, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
GENERATION = 3
ROWS = pattern(geometry(4, [4, 8], 2), GENERATION)


class Pair:
    """A prompt and a decoder; allocate() gives the prompt a filled cache of four rows under the name "kv"."""

    def __init__(self, p: Peer, d: Peer) -> None:
        self.p, self.d = p, d
        d.call("allocate", name="kv", shape=[4, 8])

    def allocate(self, keys: list[list[Any]], name: str = "kv", generation: int = GENERATION) -> int:
        cache_id: int = self.p.call("allocate", name=name, shape=[4, 8], keys=keys)
        self.p.call("fill", name=name, generation=generation)
        return cache_id

    def pull(self, key: list[Any], **how: Any) -> str:
        return self.d.outcome("pull", key=key, name="kv", **how)

    def row_of(self, key: list[Any]) -> int | None:
        """Which row of ROWS a plain pull of the key brings."""
        self.d.call("canary", name="kv")
        assert self.pull(key) == SUCCESS
        got = self.d.read("kv")[:, :, 0]
        return next((row for row in range(4) if (ROWS[:, :, row] == got).all()), None)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> Pair:
    return Pair(prompt(1), decoder(2))


@pytest.mark.parametrize("named", [
    [None, 1, None, 2], [1, None], [None] * 4, [], [1], [4, 3, 2, 1], [None, None, None, 1],
], ids=str)
def test_b8_key_names_the_row_of_its_place(pair: Pair, named: list[int | None]) -> None:
    """Padding may stand anywhere, and trailing keys may be missing."""
    cache_id = pair.allocate([padding() if number is None else req(1, number) for number in named])
    rows = [row for row, number in enumerate(named) if number is not None]
    assert [pair.row_of(req(1, named[row] or 0)) for row in rows] == rows
    assert [pair.row_of(by_id(1, cache_id, row)) for row in range(4)] == [0, 1, 2, 3]


def test_b8_same_key_twice_in_one_list_names_the_later_row(pair: Pair) -> None:
    cache_id = pair.allocate([req(1, 1), req(1, 2), req(1, 1)])
    for _ in range(2):
        assert pair.row_of(by_id(1, cache_id, 0)) == 0
    assert pair.row_of(req(1, 1)) == 2
    assert pair.pull(req(1, 1)) == NOT_EXIST
    assert pair.row_of(req(1, 2)) == 1


def test_b8_more_keys_than_rows(pair: Pair, namespace: Namespace) -> None:
    before = namespace.segments()
    keys = [req(1, number) for number in range(5)]
    assert pair.p.outcome("allocate", name="kv", shape=[4, 8], keys=keys) == PARAM_INVALID
    assert pair.p.outcome("allocate", name="kv", shape=[4, 8], keys=[padding()] * 5) == PARAM_INVALID
    assert namespace.segments() == before
    assert pair.pull(req(1, 0)) == NOT_EXIST
    pair.allocate(keys[:4])
    assert pair.row_of(req(1, 3)) == 3


@pytest.mark.parametrize("taken", [req(1, 1), prefix(1, 1)], ids=["request", "prefix"])
def test_b8_key_of_a_living_cache_is_refused(pair: Pair, namespace: Namespace, taken: list[Any]) -> None:
    pair.allocate([padding(), taken])
    before = namespace.segments()
    keys = [req(1, 8), taken, req(1, 9)]
    assert pair.p.outcome("allocate", name="other", shape=[4, 8], keys=keys) == PARAM_INVALID
    assert namespace.segments() == before
    assert [pair.pull(req(1, 8)), pair.pull(req(1, 9))] == [NOT_EXIST, NOT_EXIST]
    assert pair.row_of(taken) == 1
    pair.allocate([req(1, 8), padding(), req(1, 9)], name="other")
    assert pair.row_of(req(1, 9)) == 2


def test_b8_key_of_a_deallocated_cache_is_still_bound(pair: Pair) -> None:
    pair.allocate([req(1, 1)])
    pair.p.call("deallocate", name="kv")
    assert pair.p.outcome("allocate", name="other", shape=[4, 8], keys=[req(1, 1)]) == PARAM_INVALID
    assert pair.row_of(req(1, 1)) == 0


@pytest.mark.parametrize("end", ["consume", "remove"])
def test_b8_key_may_be_bound_again_afterwards(pair: Pair, end: str) -> None:
    for _ in range(3):
        pair.allocate([padding(), req(1, 1)])
        if end == "consume":
            assert pair.row_of(req(1, 1)) == 1
        else:
            pair.p.call("remove_key", key=req(1, 1))
        assert pair.pull(req(1, 1)) == NOT_EXIST
    pair.allocate([req(1, 1)])
    assert pair.row_of(req(1, 1)) == 0


def test_b8_ambiguous_key_is_refused(pair: Pair, namespace: Namespace) -> None:
    before = namespace.segments()
    both = ["key", 1, 1, 0, 1]
    assert pair.p.outcome("allocate", name="kv", shape=[4, 8], keys=[req(1, 5), both]) == PARAM_INVALID
    assert namespace.segments() == before
    assert pair.pull(req(1, 5)) == NOT_EXIST


def test_b8_models_and_kinds_mixed_in_one_list(pair: Pair) -> None:
    keys = [req(1, 1, 0), req(1, 1, 7), prefix(1, 1, 0), prefix(1, 1, 7)]
    pair.allocate(keys)
    assert [pair.row_of(key) for key in reversed(keys)] == [3, 2, 1, 0]
    assert [pair.pull(key) for key in keys] == [NOT_EXIST, NOT_EXIST, SUCCESS, SUCCESS]
    assert [pair.pull(req(1, 1, 8)), pair.pull(prefix(1, 1, 8))] == [NOT_EXIST, NOT_EXIST]


def test_b8_cluster_of_the_key_is_ignored_at_allocation(pair: Pair) -> None:
    pair.allocate([req(99, 1)])
    assert pair.pull(req(99, 1)) == "LLM_NOT_YET_LINK"
    assert pair.row_of(req(1, 1)) == 0


def test_b8_extreme_numbers_are_keys_like_others(pair: Pair) -> None:
    keys = [req(1, 0), req(1, 2**64 - 2), prefix(1, 0, 2**64 - 1), req(1, 2**63, 2**64 - 1)]
    pair.allocate(keys)
    assert [pair.row_of(key) for key in keys] == [0, 1, 2, 3]


def test_b8_removing_what_is_not_there_is_no_error(pair: Pair) -> None:
    pair.allocate([req(1, 1), padding(), prefix(1, 1)])
    assert pair.row_of(req(1, 1)) == 0
    for key in (req(1, 1), req(1, 77), padding(), prefix(1, 77), req(1, 1, 5)):
        assert pair.p.outcome("remove_key", key=key) == SUCCESS
    assert pair.row_of(prefix(1, 1)) == 2


def test_b8_removed_key_forgets_its_coverage(pair: Pair) -> None:
    first = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    second = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
    pair.allocate([req(1, 1)])
    assert pair.pull(req(1, 1), **first) == SUCCESS
    pair.p.call("remove_key", key=req(1, 1))
    assert pair.pull(req(1, 1), **second) == NOT_EXIST
    pair.allocate([req(1, 1)], name="next")
    assert [pair.pull(req(1, 1), **how) for how in (second, second, first)] == [SUCCESS] * 3
    assert pair.pull(req(1, 1), **first) == NOT_EXIST


def test_b8_thousand_keys_of_many_caches(pair: Pair) -> None:
    commands = [("allocate", {"name": f"kv{n}", "num_tensors": 1, "shape": [4, 8],
                              "keys": [req(1, 4 * n + row) for row in range(4)]}) for n in range(250)]
    assert [answer.value for answer in pair.p.batch(commands)] == list(range(1, 251))
    pair.p.batch([("fill", {"name": f"kv{n}", "generation": n}) for n in range(250)])
    pair.d.call("allocate", name="one", num_tensors=1, shape=[4, 8])
    for number in range(0, 1000, 37):
        pair.d.call("pull", key=req(1, number), name="one", batch_index=number % 4)
        wanted = pattern(geometry(1, [4, 8], 2), number // 4)[:, :, number % 4]
        np.testing.assert_array_equal(pair.d.read("one")[:, :, number % 4], wanted)
    said = pair.d.batch([("pull", {"key": req(1, n), "name": "one"}) for n in range(1000)])
    assert {n for n, answer in enumerate(said) if answer.outcome == NOT_EXIST} == set(range(0, 1000, 37))
    assert {answer.outcome for answer in said} == {SUCCESS, NOT_EXIST}
