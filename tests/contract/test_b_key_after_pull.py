"""Contract, appendix B2, B4, B5 and B9: what a successful pull does to the key that named its row."""
from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, by_id, prefix, req
from reference import NOT_EXIST, SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
KEY, OTHER, PREFIX = req(1, 1), req(1, 2), prefix(1, 3)
SHAPE = geometry(4, [3, 8], 2)
FIRST_LAYER = {"src_layer_range": range(1), "dst_layer_range": range(1)}
SECOND_LAYER = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """A prompt whose cache "kv" (id 1) binds KEY, OTHER and PREFIX to rows 0, 1, 2, and a linked decoder."""
    p, d = prompt(1), decoder(2)
    assert p.call("allocate", name="kv", shape=[3, 8], keys=[KEY, OTHER, PREFIX]) == 1
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv", shape=[3, 8])
    return p, d


def _pull(d: Peer, key: list[Any], **how: Any) -> str:
    return d.outcome("pull", key=key, name="kv", **how)


AFTER: list[tuple[str, list[Any] | int, list[dict[str, Any]], str]] = [
    # what is pulled (a key, or a row by id), how often and how; what a plain pull of KEY says afterwards
    ("the whole row", KEY, [{}], NOT_EXIST),
    ("both offsets of 0", KEY, [{"src_cache_offset": 0, "dst_cache_offset": 0}], SUCCESS),
    ("a source offset of 0", KEY, [{"src_cache_offset": 0}], SUCCESS),
    ("a destination offset of 0", KEY, [{"dst_cache_offset": 0}], SUCCESS),
    ("the row's end", KEY, [{"dst_cache_offset": 8, "src_cache_offset": 8}], SUCCESS),
    ("some source tensors", KEY, [FIRST_LAYER], SUCCESS),
    ("all source tensors, layer after layer", KEY, [FIRST_LAYER, SECOND_LAYER], NOT_EXIST),
    ("the same layer twice", KEY, [FIRST_LAYER, FIRST_LAYER], SUCCESS),
    ("layers with offsets", KEY, [{**FIRST_LAYER, "src_cache_offset": 0},
                                  {**SECOND_LAYER, "dst_cache_offset": 0}], SUCCESS),
    ("one layer with an offset", KEY, [FIRST_LAYER, {**SECOND_LAYER, "src_cache_offset": 0}], SUCCESS),
    ("all tensors said explicitly", KEY, [{"src_layer_range": range(2)}], NOT_EXIST),
    ("all source tensors into a range", KEY, [{"dst_layer_range": range(2)}], NOT_EXIST),
    ("a few bytes of each tensor", KEY, [{"size": 1}], NOT_EXIST),
    ("a few bytes of each layer", KEY, [{**FIRST_LAYER, "size": 1}, {**SECOND_LAYER, "size": 3}], NOT_EXIST),
    ("by id", 0, [{}], NOT_EXIST),
    ("by id, some source tensors", 0, [SECOND_LAYER], SUCCESS),
    ("by id, layer after layer", 0, [SECOND_LAYER, FIRST_LAYER], NOT_EXIST),
    ("by id with an offset", 0, [{"src_cache_offset": 0}], SUCCESS),
    ("by id, another row", 1, [{}], SUCCESS),
    ("another key", OTHER, [{}], SUCCESS),
]


def test_b2_pull_again_after(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    said = {}
    for name, key, pulls, again in AFTER:
        cache_id = _bind_anew(p)
        named = by_id(1, cache_id, key) if isinstance(key, int) else key
        before = [_pull(d, named, **how) for how in pulls]
        said[name] = ([*before, _pull(d, KEY), _pull(d, KEY)], [*[SUCCESS] * len(pulls), again, NOT_EXIST])
    assert {name: got for name, (got, wanted) in said.items() if got != wanted} == {}


def _bind_anew(p: Peer) -> int:
    """All keys name rows of a new cache "kv", whatever became of them before: its id."""
    for key in (KEY, OTHER, PREFIX):
        p.call("remove_key", key=key)
    cache_id: int = p.call("allocate", name="kv", shape=[3, 8], keys=[KEY, OTHER, PREFIX])
    return cache_id


def test_b2_only_the_destination_has_a_layer_range(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    d.call("allocate", name="wide", num_tensors=8, shape=[3, 8])
    d.call("canary", name="wide")
    d.call("pull", key=KEY, name="wide", dst_layer_range=range(2, 4))
    after = d.read("wide")
    np.testing.assert_array_equal(after[4:, :, 0], pattern(SHAPE, 1)[:, :, 0])
    assert (after[:4] == 0x5A).all()
    assert _pull(d, KEY) == NOT_EXIST


def test_b2_prefix_key_pulled_by_id_stays(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    for _ in range(2):
        assert _pull(d, by_id(1, 1, 2), batch_index=1) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 1], pattern(SHAPE, 1)[:, :, 2])
    assert _pull(d, PREFIX) == SUCCESS


def test_b2_row_without_a_key_is_pulled_by_id_any_number_of_times(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    cache_id = p.call("allocate", name="bare", shape=[3, 8])
    p.call("fill", name="bare", generation=2)
    for row in (0, 2, 2, 0):
        assert _pull(d, by_id(1, cache_id, row)) == SUCCESS
        np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(SHAPE, 2)[:, :, row])


def test_b2_consumed_row_is_still_pulled_by_id(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert _pull(d, KEY) == SUCCESS
    assert _pull(d, by_id(1, 1, 0)) == SUCCESS
    assert _pull(d, by_id(1, 1, 0)) == SUCCESS


def test_b2_failed_pulls_do_not_count(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert _pull(d, KEY, **FIRST_LAYER) == SUCCESS
    assert _pull(d, KEY, **SECOND_LAYER, batch_index=3) == "LLM_PARAM_INVALID"
    assert _pull(d, KEY, **FIRST_LAYER) == SUCCESS
    assert _pull(d, KEY, **SECOND_LAYER) == SUCCESS
    assert _pull(d, KEY, **SECOND_LAYER) == NOT_EXIST


WINDOWS = [
    *itertools.permutations([(0, 1), (1, 2), (2, 3)]),
    ((0, 2), (1, 3)), ((1, 3), (1, 2), (0, 2)), ((2, 3), (2, 3), (0, 1), (0, 1), (1, 2)), ((1, 2), (0, 3)),
]


def test_b4_key_goes_with_the_last_missing_layer(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", num_tensors=6)
    for generation, windows in enumerate(WINDOWS):
        p.call("allocate", name="kv", num_tensors=6, keys=[KEY])
        p.call("fill", name="kv", generation=generation)
        for window in (range(start, stop) for start, stop in windows):
            assert _pull(d, KEY, src_layer_range=window, dst_layer_range=window) == SUCCESS, windows
        assert _pull(d, KEY, src_layer_range=range(1), dst_layer_range=range(1)) == NOT_EXIST, windows
        wanted = pattern(geometry(6, [2, 8], 2), generation)
        np.testing.assert_array_equal(d.read("kv")[:, :, 0], wanted[:, :, 0])


def test_b4_coverage_of_many_tensors(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="one", num_tensors=1)
    for num_tensors in (63, 64, 65, 129, 200):
        p.call("allocate", name="kv", num_tensors=num_tensors, keys=[KEY])
        order = [*range(1, num_tensors, 2), *range(0, num_tensors, 2)]
        pulls = [("pull", {"key": KEY, "name": "one", "src_layer_range": range(tensor, tensor + 1),
                           "tensor_num_per_layer": 1}) for tensor in [*order, 0]]
        said = [answer.outcome for answer in d.batch(pulls)]
        assert said == [SUCCESS] * num_tensors + [NOT_EXIST]


def test_b4_different_sizes_of_layers_add_up(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    single = {"src_layer_range": range(2, 3), "dst_layer_range": range(2, 3), "tensor_num_per_layer": 1}
    last = {"src_layer_range": range(3, 4), "dst_layer_range": range(3, 4), "tensor_num_per_layer": 1}
    assert [_pull(d, KEY, **how) for how in (single, FIRST_LAYER, last)] == [SUCCESS] * 3
    assert _pull(d, KEY, **last) == NOT_EXIST


def test_b4_two_decoders_cover_one_key_together(pair: tuple[Peer, Peer], decoder: StartPeer) -> None:
    _, d = pair
    other = decoder(3)
    other.call("allocate", name="kv", shape=[3, 8])
    assert _pull(d, KEY, **FIRST_LAYER) == SUCCESS
    assert _pull(other, KEY, **SECOND_LAYER) == SUCCESS
    assert _pull(d, KEY, **FIRST_LAYER) == NOT_EXIST


def test_b5_two_keys_of_one_cache_are_covered_apart(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert _pull(d, KEY, **FIRST_LAYER) == SUCCESS
    assert _pull(d, OTHER, **SECOND_LAYER) == SUCCESS
    assert _pull(d, KEY, **FIRST_LAYER) == SUCCESS
    assert _pull(d, KEY, **SECOND_LAYER) == SUCCESS
    assert _pull(d, KEY, **SECOND_LAYER) == NOT_EXIST
    assert _pull(d, OTHER, **FIRST_LAYER, batch_index=1) == SUCCESS
    assert _pull(d, OTHER) == NOT_EXIST
    np.testing.assert_array_equal(d.read("kv")[:2, :, 1], pattern(SHAPE, 1)[:2, :, 1])


def test_b9_prefix_key_pulled_three_times_then_removed(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    for row in range(3):
        assert _pull(d, PREFIX, batch_index=row) == SUCCESS
        np.testing.assert_array_equal(d.read("kv")[:, :, row], pattern(SHAPE, 1)[:, :, 2])
    p.call("remove_key", key=PREFIX)
    assert _pull(d, PREFIX) == NOT_EXIST


def test_b9_prefix_key_pulled_in_parts_stays(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    said = [_pull(d, PREFIX, **how) for how in (FIRST_LAYER, SECOND_LAYER, {}, {"src_cache_offset": 0}, {})]
    assert said == [SUCCESS] * 5
