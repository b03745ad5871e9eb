"""A decoder that is stopped between the first and the last byte of a copy."""
from __future__ import annotations

from typing import Any

import builds
from peer import Peer, req

NBYTES = 128 << 20
ONE: dict[str, Any] = {"num_tensors": 1, "shape": [1, NBYTES], "dtype": "DT_INT8"}
OLD, NEW = 11, 22
CONTENT = "a = agent.caches['kv'].tensors[0].numpy()\nresult = sorted({int(a.min()), int(a.max())})"
# Shares have 4 MiB, or 1 MiB where threads share.
STOP = "from shmkv import _crash\n_crash.arm('copying:9', True)"


def fill(p: Peer, name: str, value: int) -> None:
    p.call("execute", code=f"agent.caches[{name!r}].tensors[0].numpy()[...] = {value}")


def stoppable() -> dict[str, str]:
    """Variables of a decoder that can be stopped there: it has the build with crash points."""
    return builds.environment("crash", builds.build("crash"))


def stop_in_the_middle(d: Peer, key: list[Any]) -> None:
    """Start a pull of D and let it stop when it has copied some shares and not all."""
    d.call("execute", code=STOP)
    d.send("pull", key=key, name="kv")
    assert d.wait_stopped_or_dead()


def caught_in_the_middle(p: Peer, d: Peer, key: list[Any]) -> None:
    """D is stopped in the middle of a pull of "old" when this returns; it has the key, or request 7 if `key` is no key."""
    p.call("allocate", name="old", keys=[key if key[0] == "key" else req(1, 7)], **ONE)
    fill(p, "old", OLD)
    d.call("allocate", name="kv", **ONE)
    stop_in_the_middle(d, key)
