"""Blocks that their owner publishes one by one, seen from another process."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, blocks, req
from reference import NOT_EXIST, SUCCESS, Bytes, geometry, pattern

pytestmark = pytest.mark.timeout(300)
BLOCKS: dict[str, Any] = {"num_tensors": 4, "shape": (8, 16), "dtype": "DT_INT8"}
FORM = geometry(4, [8, 16], 1)
KEY = blocks(1)


def content(generation: int) -> Bytes:
    return pattern(FORM, generation)


def pull(d: Peer, src: list[int], dst: list[int], key: list[Any] = KEY, **how: Any) -> str:
    return d.outcome("pull_blocks", key=key, name="kv", src=src, dst=dst, **how)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    p.call("allocate_blocks", name="kv", key=KEY, publish=False, **BLOCKS)
    p.call("fill", name="kv", generation=1)
    d.call("allocate_blocks", name="kv", **BLOCKS)
    d.call("canary", name="kv")
    return p, d


def test_nothing_is_pulled_before_it_is_published(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert [pull(d, [block], [0]) for block in range(8)] == [NOT_EXIST] * 8
    assert "not published" in d.attempt("pull_blocks", key=KEY, name="kv", src=[3], dst=[0]).text
    p.call("publish", name="kv", rows=[3, 5])
    for listed in ([3, 4], [4, 3], [0, 3, 5], [3, 5, 7, 3]):
        assert pull(d, listed, list(range(len(listed)))) == NOT_EXIST
    assert (d.read("kv") == 0x5A).all(), "one block that is not there, and nothing was copied"
    assert pull(d, [5, 3, 5], [0, 1, 2]) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, :3], content(1)[:, :, [5, 3, 5]])


def test_block_whose_destination_comes_again_has_to_be_published_too(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("publish", name="kv", rows=[3])
    assert pull(d, [2, 3], [0, 0]) == NOT_EXIST
    assert (d.read("kv") == 0x5A).all()
    assert pull(d, [3, 3], [0, 0]) == SUCCESS


def test_layers_of_blocks_are_published_one_by_one(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    first, second = ({"src_layer_range": layer, "dst_layer_range": layer} for layer in (range(1), range(1, 2)))
    p.call("publish", name="kv", rows=[1, 2], layers=1)
    assert [pull(d, [1, 2], [0, 1], **how) for how in ({}, second, first)] == [NOT_EXIST, NOT_EXIST, SUCCESS]
    p.call("publish", name="kv", rows=[2], layers=2)
    assert [pull(d, [1, 2], [0, 1], **second), pull(d, [2], [1], **second)] == [NOT_EXIST, SUCCESS]
    after = d.read("kv")
    np.testing.assert_array_equal(after[:2, :, :2], content(1)[:2, :, 1:3])
    np.testing.assert_array_equal(after[2:, :, 1], content(1)[2:, :, 2])
    assert (after[2:, :, 0] == 0x5A).all()


def test_block_is_filled_again(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("publish", name="kv")
    p.call("unbind", name="kv", rows=[2])
    assert [pull(d, [2], [0]), pull(d, [1, 2], [0, 1]), pull(d, [1], [1])] == [NOT_EXIST, NOT_EXIST, SUCCESS]
    p.call("fill", name="kv", generation=2)
    p.call("publish", name="kv", rows=[2])
    assert pull(d, [2], [0]) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], content(2)[:, :, 2])


def test_blocks_may_have_keys_of_requests_as_well(pair: tuple[Peer, Peer]) -> None:
    """A block is a row: its key is consumed, and the block stays where the blocks key finds it."""
    p, d = pair
    p.call("bind", name="kv", keys=[(6, req(1, 7))])
    assert [d.outcome("pull", key=req(1, 7), name="kv", batch_index=1) for _ in range(2)] == [SUCCESS, NOT_EXIST]
    assert pull(d, [6], [2]) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 1:3], content(1)[:, :, [6, 6]])
