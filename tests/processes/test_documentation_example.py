"""The documentation's own example of pull_cache between two processes, with a look at every byte.

Two requests of one batch: the first is pulled plainly; of the second one, two layers are pulled into two
later layers, and after that a part of each row is pulled by offsets.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, req
from reference import NOT_EXIST, SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
LAYERS: dict[str, Any] = {"num_tensors": 8, "shape": [2, 64], "dtype": "DT_FLOAT16"}
SOURCE = pattern(geometry(8, [2, 64], 2), 1)
ROW_BYTES = 128
FIRST, SECOND = req(1, 1), req(1, 2)
# The way a program fills its cache: through the tensors of the cache itself, here with the bytes of SOURCE.
FILL = """
import reference
cache = agent.caches["kv"]
content = reference.pattern(reference.geometry(8, [2, 64], 2), 1)
for tensor, wanted in zip(cache.tensors, content):
    assert tensor.shape == (2, 64)
    tensor.numpy().view(np.uint8)[...] = wanted.reshape(2, 128)
"""


@pytest.fixture
def d(prompt: StartPeer, decoder: StartPeer) -> Peer:
    """The decoder of the example: its cache "kv" has the shape of the prompt's and holds 0x5A."""
    p, pulling = prompt(1, listen_ip_info="127.0.0.1:26000"), decoder(2)
    p.call("allocate", name="kv", keys=[FIRST, SECOND], **LAYERS)
    p.call("execute", code=FILL)
    pulling.call("allocate", name="kv", **LAYERS)
    pulling.call("canary", name="kv")
    return pulling


def test_first_request_is_pulled_plainly(d: Peer) -> None:
    d.call("pull", key=FIRST, name="kv", batch_index=0, size=-1)
    after = d.read("kv")
    np.testing.assert_array_equal(after[:, :, 0], SOURCE[:, :, 0])
    assert (after[:, :, 1] == 0x5A).all()
    assert d.outcome("pull", key=FIRST, name="kv") == NOT_EXIST


def test_second_request_is_pulled_by_layers_and_then_by_offsets(d: Peer) -> None:
    d.call("pull", key=SECOND, name="kv", batch_index=1, src_layer_range=range(2),
           dst_layer_range=range(2, 4), tensor_num_per_layer=2)
    after = d.read("kv")
    np.testing.assert_array_equal(after[4:8, :, 1], SOURCE[0:4, :, 1])
    assert (after[:4] == 0x5A).all()
    assert (after[:, :, 0] == 0x5A).all()
    d.call("pull", key=SECOND, name="kv", batch_index=1, size=32, src_cache_offset=64, dst_cache_offset=16)
    later = d.read("kv")
    np.testing.assert_array_equal(later[:, 0, 1, 16:48], SOURCE[:, 0, 1, 64:96])
    after[:, 0, 1, 16:48] = later[:, 0, 1, 16:48]
    np.testing.assert_array_equal(later, after)


def test_second_request_is_still_there_after_parts_of_it(d: Peer) -> None:
    parts: list[dict[str, Any]] = [{"src_layer_range": range(2), "dst_layer_range": range(2, 4)},
                                   {"src_cache_offset": 64, "dst_cache_offset": 64}]
    assert [d.outcome("pull", key=SECOND, name="kv", **part) for part in parts] == [SUCCESS, SUCCESS]
    assert d.outcome("pull", key=SECOND, name="kv", batch_index=1) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 1], SOURCE[:, :, 1])
    assert d.outcome("pull", key=SECOND, name="kv") == NOT_EXIST


def test_default_size_reaches_to_the_end_of_the_destination_row(d: Peer) -> None:
    d.call("pull", key=SECOND, name="kv", batch_index=0, dst_cache_offset=ROW_BYTES - 8)
    after = d.read("kv")
    np.testing.assert_array_equal(after[:, 0, 0, -8:], SOURCE[:, 0, 1, :8])
    assert (after[:, 0, 0, :-8] == 0x5A).all()
