"""Steps of a life that pushes: over a link that a decoder made to it, and to a cache of its own."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cache_bytes
import numpy as np
from agent import cluster_info
from lives import LINK_TIMEOUT_MS, OWN_ID, SMALL, Life, _desc, _expected

import shmkv

DECODER_ID = 3
ROW = 1
DONE = b"d"                                     # what the pusher says when all its pushes were done


class Ready(shmkv.LayerSynchronizer):
    """Every layer is computed."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@dataclass
class PushLife(Life):
    """`addresses`: of the decoder's tensors, in its process."""

    addresses: list[int] = field(default_factory=list)

    def allocate_source(self) -> None:
        self.allocate_small()
        cache_bytes.write(self.caches["small"], _expected(SMALL))

    def allocate_target(self) -> None:
        self._allocate("target", SMALL)

    def push(self) -> Any:
        return self._push([shmkv.TransferConfig(DECODER_ID, self.addresses, None, ROW)])

    def push_blocks(self) -> Any:
        """Rows change places."""
        blocks = {"src_block_indices": [0, 1], "dst_block_indices": [1, 0]}
        return self._push([shmkv.TransferConfig(DECODER_ID, self.addresses)], **blocks)

    def push_own(self) -> Any:
        (addresses,) = self.caches["target"].per_device_tensor_addrs
        said = self._push([shmkv.TransferConfig(OWN_ID, list(addresses), None, ROW)])
        found = cache_bytes.read(self.caches["target"])[:, :, 0]
        if said[0] == shmkv.LLMStatusCode.LLM_SUCCESS and not np.array_equal(found, _expected(SMALL)[:, :, ROW]):
            self.faults.append("wrong bytes after a push to the own cluster")
        return said

    def _push(self, configs: list[Any], **blocks: Any) -> Any:
        task = self.dist.kv_cache_manager.transfer_cache_async(self.caches["small"], Ready(), configs, **blocks)
        return (task.synchronize(),)


def invite(life: Life) -> Callable[[], None]:
    """A decoder in a process of its own links to this one. What takes it back hears that its cache has nothing but zeros and the
    bytes that were pushed, each in its place, and that it ended well."""
    assert isinstance(life, PushLife)
    (from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_child)
        status = 1
        try:
            status = 0 if _receive(to_parent, from_parent) else 2
        finally:
            os._exit(status)
    os.close(to_parent)
    os.close(from_parent)
    with os.fdopen(from_child) as lines:
        life.addresses = json.loads(lines.readline() or "[]")

    def take_back() -> None:
        if all(said.endswith("LLM_SUCCESS") for said in life.outcomes):
            os.write(to_child, DONE)
        os.close(to_child)
        _, status = os.waitpid(child, 0)
        if status != 0:
            life.faults.append(f"the decoder that was pushed to ended with wait status {status}")

    return take_back


def _receive(to_parent: int, from_parent: int) -> bool:
    """Until the pusher closes its end. Are all bytes zero or those of one of the pushed rows, in their places, and if all pushes
    were done, those of the last one?"""
    dist = shmkv.LLMDataDist(shmkv.LLMRole.DECODER, DECODER_ID)
    dist.init(shmkv.LLMConfig().generate_options())
    dist.link_clusters([cluster_info(OWN_ID)], LINK_TIMEOUT_MS)
    cache = dist.kv_cache_manager.allocate_cache(_desc(SMALL), (), zero=True)
    os.write(to_parent, json.dumps(list(cache.per_device_tensor_addrs[0])).encode() + b"\n")
    all_done = os.read(from_parent, 1) == DONE
    found, sent = cache_bytes.read(cache), _expected(SMALL)
    is_right = all(bool(((found[:, :, row] == 0) | (found[:, :, row] == sent[:, :, 0]) | (found[:, :, row] == sent[:, :, 1])).all())
                   for row in range(SMALL[2][0]))
    dist.finalize()
    return is_right and (not all_done or np.array_equal(found, sent[:, :, ::-1]))
