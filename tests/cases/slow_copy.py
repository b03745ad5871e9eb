"""A reader that is stopped in the middle of its copy: a pull long enough that the test sees its first byte before its last one."""
from __future__ import annotations

from typing import Any

import pytest
from peer import Namespace, Peer, by_id, req
from reference import SUCCESS
from shared_bytes import SharedFile, segments_of

from shmkv import _layout

NBYTES = 128 << 20
ONE: dict[str, Any] = {"num_tensors": 1, "shape": [1, NBYTES], "dtype": "DT_INT8"}
OLD, NOTHING = 11, 0
CONTENT = "a = agent.caches['kv'].tensors[0].numpy()\nresult = sorted({int(a.min()), int(a.max())})"
TRIES = 40


def fill(p: Peer, name: str, value: int) -> None:
    """Every byte of the only tensor of a cache."""
    p.call("execute", code=f"agent.caches[{name!r}].tensors[0].numpy()[...] = {value}")


def _stop_in_the_middle(d: Peer, key: list[Any], segment: SharedFile) -> bool:
    """Start a pull and stop D between its first and its last byte; False if it was too fast for us."""
    first, last = _layout.SEGMENT_DATA, _layout.SEGMENT_DATA + NBYTES - 1
    segment.bytes[first], segment.bytes[last] = NOTHING, NOTHING
    d.send("pull", key=key, name="kv")
    while segment.bytes[first] == NOTHING:
        pass
    d.stop()
    return segment.bytes[last] == NOTHING


def made_for_it(p: Peer, d: Peer) -> None:
    """P has "old" under req(1, 7), D has mapped it."""
    p.call("allocate", name="old", keys=[req(1, 7)], **ONE)
    fill(p, "old", OLD)
    d.call("allocate", name="kv", **ONE)
    d.call("pull", key=by_id(1, 1), name="kv", src_cache_offset=0)      # maps it; an offset keeps the key


def stopped_in_the_middle(namespace: Namespace, p: Peer, d: Peer, key: list[Any]) -> None:
    """D is stopped in the middle of a pull of "old" when this returns."""
    with SharedFile(segments_of(namespace, 2)[0]) as destination:
        for _ in range(TRIES):
            if _stop_in_the_middle(d, key, destination):
                return
            d.cont()
            assert d.receive().outcome == SUCCESS
            p.call("bind", name="old", keys=[(0, req(1, 7))])
    pytest.fail(f"no pull of {NBYTES} bytes was slow enough in {TRIES} tries")


def caught_in_the_middle(namespace: Namespace, p: Peer, d: Peer, key: list[Any]) -> None:
    """Both of these."""
    made_for_it(p, d)
    stopped_in_the_middle(namespace, p, d, key)
