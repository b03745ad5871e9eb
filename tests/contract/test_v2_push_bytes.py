"""Pushes by key of random shapes against numpy: whole source rows to the beginning of rows of the destination, no byte else."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, blocks, by_id
from reference import Bytes

pytestmark = pytest.mark.timeout(120)
OTHERS = np.uint8(0x5A)


def as_rows(content: Bytes) -> Bytes:
    """(tensors, outer, rows, inner) as (tensors, rows, bytes of a row)."""
    return content.transpose(0, 2, 1, 3).reshape(content.shape[0], content.shape[2], -1)


def shape_of(rng: np.random.Generator, batch_dim: int, rows: int, at_least: int) -> list[int]:
    """A shape with that many rows of at least so many elements."""
    before = [int(rng.integers(1, 4)) for _ in range(batch_dim)]
    product = int(np.prod(before, dtype=int))
    return [*before, rows, -(-at_least // product) + int(rng.integers(0, 3))]


@pytest.mark.parametrize("copy", ["memory", "pread"])
@pytest.mark.parametrize("made_by", ["source", "target"])
def test_rows_of_random_shapes(member: StartPeer, rng: np.random.Generator, copy: str, made_by: str) -> None:
    source, target = linked(member, made_by, {"SHMKV_COPY": copy})
    for case in range(12):
        src_dim, dst_dim, tensors = (int(rng.integers(0, 3)), int(rng.integers(0, 3)), int(rng.integers(1, 7)))
        rows, dst_rows = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        src_shape = shape_of(rng, src_dim, rows, int(rng.integers(1, 200)))
        row_nbytes = int(np.prod(src_shape, dtype=int)) // rows
        dst_shape = shape_of(rng, dst_dim, dst_rows, row_nbytes)
        source.call("v2_allocate", name="kv", num_tensors=tensors, shape=src_shape, dtype="DT_INT8", batch_dim=src_dim)
        cache_id = target.call("v2_allocate", name="kv", num_tensors=tensors, shape=dst_shape, dtype="DT_INT8", batch_dim=dst_dim)
        source.call("noise", name="kv", seed=case)
        target.call("canary", name="kv")
        row, dst_row = int(rng.integers(rows)), int(rng.integers(dst_rows))
        first = int(rng.integers(tensors))
        layers: dict[str, Any] = {"src_layer_range": range(first, tensors), "dst_layer_range": range(tensors - first)}
        source.call("v2_push", key=by_id(1, cache_id, dst_row), name="kv", src_batch_index=row, tensor_num_per_layer=1,
                    **(layers if case % 2 else {}))
        expected = np.full_like(as_rows(target.read("kv")), OTHERS)
        pushed = as_rows(source.read("kv"))[first if case % 2 else 0:, row]
        expected[:len(pushed), dst_row, :row_nbytes] = pushed
        np.testing.assert_array_equal(as_rows(target.read("kv")), expected)
        source.call("v2_deallocate", name="kv")
        target.call("v2_deallocate", name="kv")


def linked(member: StartPeer, made_by: str, env: dict[str, str]) -> tuple[Peer, Peer]:
    """(cluster 2, cluster 1), linked by the one or the other."""
    if made_by == "source":
        target = member(1, remote=True, env=env)
        return member(2, link=(1,), remote=True, env=env), target
    source = member(2, remote=True, env=env)
    return source, member(1, link=(2,), remote=True, env=env)


@pytest.mark.parametrize("made_by", ["source", "target"])
def test_blocks_of_random_lists(member: StartPeer, rng: np.random.Generator, made_by: str) -> None:
    source, target = linked(member, made_by, {})
    for case in range(6):
        nbytes, tensors = int(rng.integers(1, 100)), int(rng.integers(1, 5))
        longer = int(rng.integers(0, 2)) * 7
        source.call("v2_allocate_blocks", name="b", num_tensors=tensors, shape=[12, nbytes])
        target.call("v2_allocate_blocks", name="b", num_tensors=tensors, shape=[9, nbytes + longer], key=blocks(1, case))
        source.call("noise", name="b", seed=case)
        target.call("canary", name="b")
        count = int(rng.integers(1, 12))
        src, dst = rng.integers(0, 12, count).tolist(), rng.integers(0, 9, count).tolist()
        source.call("v2_push_blocks", key=blocks(1, case), name="b", src=src, dst=dst, tensor_num_per_layer=1)
        expected, content = np.full_like(as_rows(target.read("b")), OTHERS), as_rows(source.read("b"))
        for here, there in zip(src, dst, strict=True):
            expected[:, there, :nbytes] = content[:, here]
        np.testing.assert_array_equal(as_rows(target.read("b")), expected)
        source.call("v2_deallocate", name="b")
        target.call("v2_deallocate", name="b")


def test_a_push_of_many_megabytes(member: StartPeer) -> None:
    source, target = linked(member, "source", {"SHMKV_COPY_THREADS": "2"})
    big: dict[str, Any] = {"num_tensors": 2, "shape": [1, 12 << 20], "dtype": "DT_INT8"}
    source.call("v2_allocate", name="kv", **big)
    cache_id = target.call("v2_allocate", name="kv", **big)
    source.call("noise", name="kv", seed=1)
    source.call("v2_push", key=by_id(1, cache_id), name="kv")
    assert target.call("digest", name="kv") == source.call("digest", name="kv")


@pytest.mark.parametrize("longer", [0, 1], ids=["as much as the threshold", "less"])
def test_the_loop_follows_from_the_bytes_of_the_whole_transfer(member: StartPeer, longer: int) -> None:
    """Two layers are pushed one by one, each smaller than what is streamed alone."""
    shape: dict[str, Any] = {"num_tensors": 4, "shape": [1, 1024], "dtype": "DT_INT8"}
    source, target = linked(member, "source", {"SHMKV_NT_THRESHOLD": str(4 * 1024 + longer)})
    source.call("v2_allocate", name="kv", **shape)
    cache_id = target.call("v2_allocate", name="kv", **shape)
    source.call("noise", name="kv", seed=1)
    layer = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    source.call("v2_push", key=by_id(1, cache_id), name="kv", **layer)
    assert source.call("execute", code=STREAMED) == 0
    source.call("v2_transfer", name="kv", configs=[[by_id(1, cache_id), range(2), range(2)]])
    assert source.call("results", timeout=20_000) == ["LLM_SUCCESS"]
    assert source.call("execute", code=STREAMED) == (0 if longer else 2)
    assert target.call("digest", name="kv") == source.call("digest", name="kv")


STREAMED = "from shmkv import _copy\nresult = _copy.streamed()"
