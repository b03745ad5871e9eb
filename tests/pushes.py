"""What tests of pushes share: a source and a destination, and which threads of transfers still run."""
from __future__ import annotations

from peer import Peer

WORKERS = """
import threading
for thread in threading.enumerate():
    if thread.name == "shmkv-push":
        thread.join()           # its results are there: it is about to end
result = [thread.name for thread in threading.enumerate() if thread.name == "shmkv-push"]
"""


def start(source: Peer, target: Peer, shape: tuple[int, ...] = (2, 8), tensors: int = 4) -> list[int]:
    """A source of noise and a destination of canaries, alike: the destination's addresses."""
    source.call("allocate", name="src", num_tensors=tensors, shape=shape)
    source.call("noise", name="src", seed=3)
    target.call("allocate", name="dst", num_tensors=tensors, shape=shape)
    target.call("canary", name="dst")
    return list(target.call("addresses", name="dst"))
