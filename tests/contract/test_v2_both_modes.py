"""Clusters of both generations of the API in one namespace: what is shared is the same."""
from __future__ import annotations

import numpy as np
import pytest
from peer import StartPeer, blocks, by_id, req

pytestmark = pytest.mark.timeout(120)
GONE = "LLM_KV_CACHE_NOT_EXIST"


def test_a_decoder_of_the_first_generation_pulls_and_is_pushed_to(member: StartPeer, decoder: StartPeer) -> None:
    source = member(1, role="PROMPT", remote=True)
    source.call("v2_allocate", name="kv", keys=[req(1, 1)])
    source.call("noise", name="kv", seed=1)
    content = source.read("kv")
    target = decoder(2, link=(1,))
    cache_id = target.call("allocate", name="kv")
    target.call("pull", key=req(1, 1), name="kv")
    np.testing.assert_array_equal(target.read("kv")[:, :, 0], content[:, :, 0])
    assert target.outcome("pull", key=req(1, 1), name="kv") == GONE
    source.call("v2_push", key=by_id(2, cache_id, 1), name="kv", src_batch_index=1)
    np.testing.assert_array_equal(target.read("kv"), content)


def test_a_prompt_of_the_first_generation_is_pulled_from_and_pushed_to(prompt: StartPeer, member: StartPeer) -> None:
    source = prompt(1)
    cache_id = source.call("allocate", name="kv", keys=[req(1, 1)])
    source.call("allocate_blocks", name="b", key=blocks(1))
    source.call("noise", name="kv", seed=2)
    content = source.read("kv")
    target = member(2, link=(1,), remote=True)
    target.call("v2_allocate", name="kv")
    target.call("v2_allocate_blocks", name="b")
    target.call("noise", name="b", seed=3)
    target.call("v2_pull", key=by_id(1, cache_id), name="kv")
    np.testing.assert_array_equal(target.read("kv")[:, :, 0], content[:, :, 0])
    target.call("v2_push", key=by_id(1, cache_id, 1), name="kv")
    target.call("v2_push_blocks", key=blocks(1), name="b", src=[2], dst=[5])
    np.testing.assert_array_equal(source.read("kv")[:, :, 1], content[:, :, 0])
    np.testing.assert_array_equal(source.read("b")[:, :, 5], target.read("b")[:, :, 2])


def test_unpublished_rows_are_no_source_but_a_destination(prompt: StartPeer, member: StartPeer) -> None:
    owner = prompt(1)
    cache_id = owner.call("allocate", name="kv", publish=False)
    other = member(2, link=(1,), remote=True)
    other.call("v2_allocate", name="kv")
    other.call("noise", name="kv", seed=4)
    assert other.outcome("v2_pull", key=by_id(1, cache_id), name="kv") == GONE
    other.call("v2_push", key=by_id(1, cache_id), name="kv")
    owner.call("publish", name="kv")
    other.call("v2_pull", key=by_id(1, cache_id), name="kv", batch_index=1)
    read = other.read("kv")
    np.testing.assert_array_equal(read[:, :, 0], read[:, :, 1])
