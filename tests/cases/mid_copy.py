"""A decoder that is stopped between the first and the last byte of a copy."""
from __future__ import annotations

from typing import Any

import pytest
from peer import Namespace, Peer, by_id, req
from reference import SUCCESS
from shared_bytes import SharedFile, segments_of

from shmkv import _layout

NBYTES = 128 << 20
ONE: dict[str, Any] = {"num_tensors": 1, "shape": [1, NBYTES], "dtype": "DT_INT8"}
OLD, NEW, NOTHING = 11, 22, 0
CONTENT = "a = agent.caches['kv'].tensors[0].numpy()\nresult = sorted({int(a.min()), int(a.max())})"
TRIES = 40


def fill(p: Peer, name: str, value: int) -> None:
    p.call("execute", code=f"agent.caches[{name!r}].tensors[0].numpy()[...] = {value}")


def stop_in_the_middle(d: Peer, key: list[Any], segment: SharedFile) -> bool:
    """Start a pull and stop D between its first and its last byte; False if it was too fast for us."""
    first, last = _layout.SEGMENT_DATA, _layout.SEGMENT_DATA + NBYTES - 1
    segment.bytes[first], segment.bytes[last] = NOTHING, NOTHING
    d.send("pull", key=key, name="kv")
    while segment.bytes[first] == NOTHING:
        pass
    d.stop()
    return segment.bytes[last] == NOTHING


def caught_in_the_middle(namespace: Namespace, p: Peer, d: Peer, key: list[Any]) -> None:
    """D is stopped in the middle of a pull of "old" when this returns; it has the key, or request 7 if `key` is no key."""
    bound = key if key[0] == "key" else req(1, 7)
    p.call("allocate", name="old", keys=[bound], **ONE)
    fill(p, "old", OLD)
    d.call("allocate", name="kv", **ONE)
    d.call("pull", key=by_id(1, 1), name="kv", src_cache_offset=0)      # maps it; an offset keeps the key
    with SharedFile(segments_of(namespace, 2)[0]) as destination:
        for _ in range(TRIES):
            if stop_in_the_middle(d, key, destination):
                return
            d.cont()
            assert d.receive().outcome == SUCCESS
            p.call("bind", name="old", keys=[(0, bound)])
    pytest.fail(f"no pull of {NBYTES} bytes was slow enough in {TRIES} tries")
