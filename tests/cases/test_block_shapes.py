"""Field cases FR-035, 036, 046, 047, 053, 056 on blocks: sides that differ, keys with one hash, an owner that dies."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import collisions
import numpy as np
import pytest
from peer import Answer, Namespace, Peer, StartPeer, blocks
from reference import PARAM_INVALID, SUCCESS, Geometry, PullBlocks, canary, expected_pull_blocks, geometry, pattern
from shared_bytes import LINK_HELD_BY_OWNER, SharedFile, directory_of, held_by_owner, segments_of
from started_apart import until

pytestmark = pytest.mark.timeout(120)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
T_MS = 20000
WAITED_FOR = 0x80000000


NONE = Geometry(0, 0, 0, 0)


@dataclass
class Sides:
    """One P and one D whose blocks caches are made anew for each pair of shapes."""

    p: Peer
    d: Peer
    src: Geometry = NONE
    dst: Geometry = NONE

    def allocate(self, src: tuple[int, list[int]], dst: tuple[int, list[int]]) -> None:
        """(tensors, shape) of each; P's has generation 1."""
        for peer, (tensors, shape), key in ((self.p, src, blocks(1)), (self.d, dst, None)):
            if self.src.rows:
                peer.call("deallocate", name="kv")
            peer.call("allocate_blocks", name="kv", num_tensors=tensors, shape=shape, key=key)
        self.p.call("fill", name="kv", generation=1)
        self.src, self.dst = (geometry(tensors, shape, 1) for tensors, shape in (src, dst))

    def pull(self, how: PullBlocks) -> Answer:
        """Whatever it answers, the bytes are those of the twin."""
        self.d.call("canary", name="kv")
        wanted, after = expected_pull_blocks(pattern(self.src, 1), canary(self.dst), how)
        answer = self.d.attempt("pull_blocks", key=blocks(1), name="kv", src=how.prompt_blocks, dst=how.decoder_blocks,
                                **how.options())
        assert answer.outcome == wanted, f"{how}: {answer.text}"
        np.testing.assert_array_equal(self.d.read("kv"), after, err_msg=str(how))
        return answer


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> Sides:
    return Sides(prompt(1), decoder(2))


def test_fr_036_blocks_of_other_bytes(sides: Sides) -> None:
    for shape in ([4, 32], [4, 128], [2, 128], [128, 4], [4, 63], [4, 65]):
        sides.allocate((4, [4, 64]), (4, shape))
        answer = sides.pull(PullBlocks([1], [1]))
        assert {"LLMException", "ValueError"} <= set(answer.kinds), "an argument error, before any byte is written"
        assert str(shape) in answer.text, "the message names the destination's shape"
        assert "64 bytes" in answer.text.replace(str(shape), ""), "and the source's block"
    sides.allocate((4, [4, 64]), (4, [7, 4, 16]))
    assert sides.pull(PullBlocks([3, 0], [6, 2])).outcome == SUCCESS, "equal bytes in whatever dims"


def test_fr_047_layer_counts_of_blocks_differ(sides: Sides) -> None:
    sides.allocate((8, [4, 16]), (10, [4, 16]))
    lists: dict[str, Any] = {"prompt_blocks": [3, 0], "decoder_blocks": [1, 2]}
    refused = [{}, {"src_layer_range": range(5)}, {"dst_layer_range": range(4, 6)}, {"src_layer_range": range(4)},
               {"src_layer_range": range(3), "dst_layer_range": range(2)}, {"src_layer_range": range(2, 2)}]
    assert [sides.pull(PullBlocks(**lists, **how)).outcome for how in refused] == [PARAM_INVALID] * 6
    for into in (range(4), range(1, 5)):
        answer = sides.pull(PullBlocks(**lists, src_layer_range=range(4), dst_layer_range=into))
        assert answer.outcome == SUCCESS, "byte-exact by layer"


def test_fr_053_appended_layers_shift_no_blocks(sides: Sides) -> None:
    sides.allocate((16, [4, 16]), (14, [4, 16]))
    for source, into in ((range(7), range(7)), (range(7, 8), range(1)), (range(6, 8), range(5, 7))):
        answer = sides.pull(PullBlocks([2, 3], [0, 3], source, into))
        assert answer.outcome == SUCCESS, "tensor by tensor, index = layer * tensor_num_per_layer + j"


def test_fr_056_tensors_of_blocks_that_are_no_whole_layers(sides: Sides) -> None:
    for num_tensors, per_layer, wanted in ((2, 3, PARAM_INVALID), (8, 5, PARAM_INVALID), (8, 1, SUCCESS), (8, 8, SUCCESS)):
        sides.allocate((num_tensors, [4, 16]), (num_tensors, [4, 16]))
        assert sides.pull(PullBlocks([1], [2], range(1), range(1), per_layer)).outcome == wanted, f"{per_layer} of {num_tensors}"


def test_fr_046_blocks_keys_with_one_hash_are_told_apart(sides: Sides) -> None:
    models = collisions.blocks_models(0x0123456789ABCDEF)
    p, d = sides.p, sides.d
    assert len(set(models)) == 4
    for number, model in enumerate(models[:3]):
        p.call("allocate_blocks", name=f"kv{number}", key=blocks(1, model))
        p.call("fill", name=f"kv{number}", generation=number)
    d.call("allocate_blocks", name="kv")
    for number, model in enumerate(models[:3]):
        d.call("pull_blocks", key=blocks(1, model), name="kv", src=[5], dst=[1])
        np.testing.assert_array_equal(d.read("kv")[:, :, 1], pattern(geometry(4, [8, 16], 1), number)[:, :, 5])
    assert d.outcome("pull_blocks", key=blocks(1, models[3]), name="kv", src=[5], dst=[1]) == "LLM_KV_CACHE_NOT_EXIST"
    p.call("deallocate", name="kv1")
    said = [d.outcome("pull_blocks", key=blocks(1, model), name="kv", src=[5], dst=[1]) for model in models]
    assert said == [SUCCESS, "LLM_KV_CACHE_NOT_EXIST", SUCCESS, "LLM_KV_CACHE_NOT_EXIST"]


def test_fr_035_blocks_of_an_aborted_pull_are_not_held(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                       rounds: Callable[[int], int]) -> None:
    """D waits for the link in a pull of blocks when P is killed; D's blocks can be given back each time."""
    d = decoder(2, link=(), env={"SHMKV_RECYCLE_BYTES": "0"})
    for _ in range(rounds(3)):
        p = prompt(1)
        p.call("allocate_blocks", name="kv", key=blocks(1))
        d.call("allocate_blocks", name="kv")
        d.call("canary", name="kv")
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
        with SharedFile(directory_of(namespace, 1)) as found:
            found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
            d.send("pull_blocks", key=blocks(1), name="kv", src=[0, 1], dst=[2, 3])
            until(lambda found=found: found.get("LinkRecord", "word") & WAITED_FOR)     # type: ignore[misc]
        p.kill()
        answer = d.receive()
        assert (answer.outcome, answer.ms < T_MS / 2) == (TIMED_OUT, True), "the pull ends when P dies"
        assert (d.read("kv") == 0x5A).all(), "and has written nothing"
        assert d.outcome("deallocate", name="kv") == SUCCESS, "deallocate works"
        assert segments_of(namespace, 2) == [], "and gives the memory back"
        assert d.call("unlink", ids=[1], force=True) == [SUCCESS, [SUCCESS]]


def test_pull_of_blocks_that_waits_too_long(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    """The link is P's all the time: D ends at its timeout with nothing written, and the link is as good as before."""
    p, d = prompt(1), decoder(2, sync_kv_timeout=300)
    p.call("allocate_blocks", name="kv", key=blocks(1))
    p.call("fill", name="kv", generation=1)
    d.call("allocate_blocks", name="kv")
    d.call("canary", name="kv")
    with held_by_owner(namespace):
        answer = d.attempt("pull_blocks", key=blocks(1), name="kv", src=[0, 1], dst=[2, 3])
        assert (answer.outcome, answer.ms >= 300) == (TIMED_OUT, True)
        refused = d.attempt("pull_blocks", key=blocks(1), name="kv", src=[0, 1], dst=[2, 8])
        assert refused.outcome == PARAM_INVALID, "told before the lock is waited for"
    assert (d.read("kv") == 0x5A).all()
    d.call("pull_blocks", key=blocks(1), name="kv", src=[0, 1], dst=[2, 3])
    np.testing.assert_array_equal(d.read("kv")[:, :, 2:4], pattern(geometry(4, [8, 16], 1), 1)[:, :, :2])
