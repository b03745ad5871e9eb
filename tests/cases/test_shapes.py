"""Field cases FR-030, 031, 036, 047, 053, 056, 075: sides that differ in tensors, rows, layers; special numbers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from peer import Answer, Peer, StartPeer, by_id, req
from reference import SUCCESS, Geometry, Pull, canary, expected_pull, geometry, pattern

pytestmark = pytest.mark.timeout(120)
INVALID = "LLM_PARAM_INVALID"
ITEM = {"DT_INT8": 1, "DT_FLOAT16": 2}


@dataclass
class Pair:
    """P's cache "kv" with generation 1, and D's "kv"; pull() compares everything with the twin."""

    p: Peer
    d: Peer
    src: Geometry
    dst: Geometry

    def pull(self, how: Pull) -> Answer:
        """One pull of row `src_row` of cache 1 by id; whatever it answers, the bytes are those of the twin."""
        self.d.call("canary", name="kv")
        wanted, after = expected_pull(pattern(self.src, 1), canary(self.dst), how)
        answer = self.d.attempt("pull", key=by_id(1, 1, how.src_row), name="kv", **how.options())
        assert answer.outcome == wanted, f"{how}: {answer.text}"
        np.testing.assert_array_equal(self.d.read("kv"), after, err_msg=str(how))
        return answer


class Sides:
    """One P and one D whose caches are made anew for each pair of shapes."""

    def __init__(self, prompt: StartPeer, decoder: StartPeer) -> None:
        self._peers = prompt(1), decoder(2)

    def allocate(self, src: dict[str, Any], dst: dict[str, Any]) -> Pair:
        """Cache 1 of a fresh P, which D links to again."""
        p, d = self._peers
        d.call("unlink", ids=[1])
        for peer in (d, p):
            peer.call("finalize")
        p.call("init", role="PROMPT", cluster_id=1, options={"sync_kv_timeout": 20000}, raw={})
        d.call("init", role="DECODER", cluster_id=2, options={"sync_kv_timeout": 20000}, raw={})
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
        p.call("allocate", name="kv", **src)
        p.call("fill", name="kv", generation=1)
        d.call("allocate", name="kv", **dst)
        return Pair(p, d, _geometry(**src), _geometry(**dst))


def _geometry(num_tensors: int = 4, shape: tuple[int, ...] = (2, 8), dtype: str = "DT_FLOAT16",
              batch_dim: int = 0) -> Geometry:
    return geometry(num_tensors, list(shape), ITEM[dtype], batch_dim)


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> Sides:
    return Sides(prompt, decoder)


def _int8(num_tensors: int, *shape: int, batch_dim: int = 0) -> dict[str, Any]:
    return {"num_tensors": num_tensors, "shape": shape, "dtype": "DT_INT8", "batch_dim": batch_dim}


def test_fr_030_no_number_of_tensors_is_special(sides: Sides, rng: np.random.Generator) -> None:
    for num_tensors in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025):
        pair = sides.allocate(_int8(num_tensors, 2, 24), _int8(num_tensors, 2, 24))
        assert pair.pull(Pull(src_row=1)).outcome == SUCCESS
        for first in {0, num_tensors - 1, int(rng.integers(num_tensors))}:
            layers = range(first, num_tensors)
            answer = pair.pull(Pull(src_layer_range=layers, dst_layer_range=layers, tensor_num_per_layer=1, batch_index=1))
            assert answer.outcome == SUCCESS


def test_fr_031_equal_totals_do_not_make_caches_alike(sides: Sides) -> None:
    pair = sides.allocate(_int8(4, 2, 8, 16), _int8(2, 2, 8, 32))
    answer = pair.pull(Pull())
    assert answer.outcome == INVALID, "refused before any byte is written"


def test_fr_036_rows_of_other_lengths(sides: Sides) -> None:
    for shape, batch_dim in (((4, 32), 0), ((4, 128), 0), ((2, 128), 0), ((128, 4), 0), ((4, 64), 1)):
        pair = sides.allocate(_int8(4, 4, 64), _int8(4, *shape, batch_dim=batch_dim))
        for size in (-1, 32):
            answer = pair.pull(Pull(src_row=1, batch_index=1, size=size))
            if answer.outcome == SUCCESS:
                continue
            assert {"LLMException", "ValueError"} <= set(answer.kinds), "what does not fit is an argument error"
            assert str(list(shape)) in answer.text, "the message names the destination's shape"
            if pair.dst.stride > 64:
                assert "64 bytes" in answer.text.replace(str(pair.dst.stride), ""), "and the source's row"


def test_fr_047_layer_counts_differ(sides: Sides) -> None:
    pair = sides.allocate(_int8(8, 2, 16), _int8(10, 2, 16))
    refused = [Pull(), Pull(src_layer_range=range(5)), Pull(dst_layer_range=range(4, 6)),
               Pull(src_layer_range=range(3), dst_layer_range=range(2)),
               Pull(src_layer_range=range(2, 2), dst_layer_range=range(2, 2))]
    outcomes = [pair.pull(how).outcome for how in refused]
    assert outcomes == [INVALID] * 5, "argument errors with nothing written"
    good = [pair.pull(Pull(src_layer_range=range(4), dst_layer_range=into)) for into in (range(4), range(1, 5))]
    assert [answer.outcome for answer in good] == [SUCCESS] * 2, "byte-exact by layer"


def test_fr_053_appended_layers_shift_nothing(sides: Sides) -> None:
    pair = sides.allocate(_int8(16, 2, 16), _int8(14, 2, 16))
    for source, into in ((range(7), range(7)), (range(7, 8), range(1)), (range(6, 8), range(5, 7))):
        answer = pair.pull(Pull(src_layer_range=source, dst_layer_range=into))
        assert answer.outcome == SUCCESS, "tensor by tensor, index = layer * tensor_num_per_layer + j"


def test_fr_056_tensors_that_are_no_whole_layers(sides: Sides) -> None:
    one = Pull(src_layer_range=range(1), dst_layer_range=range(1))
    for num_tensors, per_layer, wanted in ((2, 3, INVALID), (8, 5, INVALID), (8, 1, SUCCESS), (8, 8, SUCCESS)):
        pair = sides.allocate(_int8(num_tensors, 2, 16), _int8(num_tensors, 2, 16))
        how = Pull(src_layer_range=one.src_layer_range, dst_layer_range=one.dst_layer_range,
                   tensor_num_per_layer=per_layer)
        assert pair.pull(how).outcome == wanted, f"{per_layer} of {num_tensors}"


def test_fr_075_a_zero_in_a_shape_has_one_answer(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    for peer in (p, d):
        for shape in ((0,), (2, 0, 1), (1, 0, 1)):
            answer = peer.attempt("allocate", name="none", shape=shape)
            assert (answer.outcome, "ValueError" in answer.kinds) == (INVALID, True), f"shape {shape}"
        peer.call("allocate", name="kv", keys=[req(1, 7)] if peer is p else [])
    d.call("canary", name="kv")
    for how in ({"size": 0}, {"src_layer_range": range(1, 1)}, {"dst_layer_range": range(0)},
                {"src_layer_range": range(1, 1), "dst_layer_range": range(1, 1)}):
        answer = d.attempt("pull", key=req(1, 7), name="kv", **how)
        assert (answer.outcome, "ValueError" in answer.kinds) == (INVALID, True), f"{how}"
    np.testing.assert_array_equal(d.read("kv"), canary(geometry(4, [2, 8], 2)), err_msg="nothing written")
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "the key is not used up by it"


def test_fr_041_products_beyond_32_bits(rng: np.random.Generator) -> None:
    from shmkv import _plan

    gib = 1 << 30
    shape = (4096, 5 * gib, 1, 5, gib)
    for row in range(5):
        (run,) = _plan.runs([shape], [shape], src_row=row, dst_row=4 - row)
        assert run == (4096 + row * gib, 4096 + (4 - row) * gib, gib), "row index times row bytes in 64 bits"
    wide = (4096, 3 << 33, 1, 3, 1 << 33)
    edge = 2**32 - 8
    (run,) = _plan.runs([wide], [wide], size=16, src_offset=edge, src_row=2, dst_row=1)
    assert run == (4096 + 2 * (1 << 33) + edge, 4096 + (1 << 33), 16), "source offset 2**32 - 8"
    (run,) = _plan.runs([wide], [wide], size=16, dst_offset=edge, src_row=1, dst_row=2)
    assert run == (4096 + (1 << 33), 4096 + 2 * (1 << 33) + edge, 16), "destination offset 2**32 - 8"
    for _ in range(300):
        inner, rows, outer = (int(rng.integers(1, 2**int(rng.integers(1, limit)))) for limit in (34, 20, 8))
        cache = (64 * int(rng.integers(1, 2**20)), outer * rows * inner, outer, rows, inner)
        row, offset = int(rng.integers(rows)), int(rng.integers(outer * inner))
        size = int(rng.integers(1, outer * inner - offset + 1))
        found = _plan.runs([cache], [(0, outer * inner, 1, 1, outer * inner)], size=size, src_offset=offset,
                           src_row=row)
        assert found == _by_hand(cache, row, offset, size), f"{cache}, row {row}, offset {offset}, size {size}"


def _by_hand(cache: tuple[int, ...], row: int, offset: int, size: int) -> list[tuple[int, int, int]]:
    """The runs of a row of pieces, in Python's own numbers."""
    start, _, _, rows, inner = cache
    found: list[tuple[int, int, int]] = []
    done = 0
    while done < size:
        piece, within = divmod(offset + done, inner)
        step = min(size - done, inner - within)
        at = start + (piece * rows + row) * inner + within
        found.append((at, done, step))
        done += step
    return found
