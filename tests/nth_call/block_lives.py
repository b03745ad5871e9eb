"""Steps of a life with memory of its own: registering it, pulls of blocks into it, copies of blocks."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference
from lives import OWN_ID, PEER_ID, SMALL, Life

import shmkv

TENSORS, BLOCKS, BLOCK = 4, 4, 32           # a row of the peer's small cache makes two blocks
MODEL_ID = 9
PEER_BLOCKS = reference.Geometry(TENSORS, 1, BLOCKS, BLOCK)
GENERATION = 8


@dataclass
class BlockLife(Life):
    """`memory` by the names of the registered caches over it."""

    memory: dict[str, bytearray] = field(default_factory=dict)

    def register(self) -> None:
        self._register("device", shmkv.Placement.DEVICE)

    def register_host(self) -> None:
        self._register("host", shmkv.Placement.HOST)

    def unregister(self) -> None:
        for name in list(self.memory):
            self.dist.kv_cache_manager.unregister_cache(self.caches.pop(name))
            self._must_be_free(self.memory.pop(name))

    def pull_row_into_blocks(self) -> None:
        key = shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], 1)
        sent = reference.pattern(reference.geometry(SMALL[1], list(SMALL[2]), 1), SMALL[3])[:, 0, 1].reshape(TENSORS, 2, BLOCK)
        self._changes("device", {3: sent[:, 0], 0: sent[:, 1]},
                      lambda: self.dist.kv_cache_manager.pull_blocks(key, self.caches["device"], [], [3, 0]))

    def pull_blocks(self) -> None:
        key, sent = shmkv.BlocksCacheKey(PEER_ID, MODEL_ID), reference.pattern(PEER_BLOCKS, GENERATION)[:, 0]
        self._changes("device", {2: sent[:, 0], 1: sent[:, 3]},
                      lambda: self.dist.kv_cache_manager.pull_blocks(key, self.caches["device"], [0, 3], [2, 1]))

    def pull_own_blocks(self) -> None:
        """Out of a cache of this process: no link, a temporary copy where the two might share bytes."""
        own = self.caches["small"]
        sent = np.stack([tensor.numpy()[1].view(np.uint8).reshape(2, BLOCK) for tensor in own.tensors])
        key = shmkv.CacheKeyByIdAndIndex(OWN_ID, own.cache_id, 1)
        self._changes("device", {1: sent[:, 0], 2: sent[:, 1]},
                      lambda: self.dist.kv_cache_manager.pull_blocks(key, self.caches["device"], [], [1, 2]))

    def copy_blocks(self) -> None:
        before = self._blocks("device")
        self._changes("device", {1: before[:, 0], 2: before[:, 0]},
                      lambda: self.dist.kv_cache_manager.copy_blocks(self.caches["device"], {0: [1, 2]}))

    def copy_in_turn(self) -> None:
        """The second copy sees the first, so they are two: the first may be done when the second fails."""
        after = self._blocks("device")
        states = [after.copy()]
        for src, dst in ((3, 1), (1, 2)):
            after[:, dst] = after[:, src]
            states.append(after.copy())
        try:
            self.dist.kv_cache_manager.copy_blocks(self.caches["device"], {3: [1], 1: [2]})
            del states[:2]
        finally:
            if not any(np.array_equal(self._blocks("device"), state) for state in states):
                self.faults.append("wrong bytes in device")

    def swap_blocks(self) -> None:
        manager, before = self.dist.kv_cache_manager, self._blocks("device")
        self._changes("host", {3: before[:, 0]},
                      lambda: manager.swap_blocks(self.caches["device"], self.caches["host"], {0: 3}))
        self._changes("device", {1: before[:, 0]},
                      lambda: manager.swap_blocks(self.caches["host"], self.caches["device"], {3: 1}))

    def swap_by_address(self) -> None:
        """The other end has never been registered."""
        (addresses,) = self.caches["host"].per_device_tensor_addrs
        bare = shmkv.KvCache.create_cpu_cache(_desc(shmkv.Placement.HOST), addresses)
        before = self._blocks("device")
        self._changes("host", {1: before[:, 2]},
                      lambda: self.dist.kv_cache_manager.swap_blocks(self.caches["device"], bare, {2: 1}))

    # -- what a step looks at -------------------------------------------------------------------------------------------

    def _register(self, name: str, placement: shmkv.Placement) -> None:
        memory = bytearray(TENSORS * BLOCKS * BLOCK)
        try:
            self.caches[name] = self.dist.kv_cache_manager.register_blocks_cache(_desc(placement), memory)
        except shmkv.LLMException:
            self._must_be_free(memory)
            raise
        self.memory[name] = memory

    def _must_be_free(self, memory: bytearray) -> None:
        try:
            memory.append(0)
        except BufferError:
            self.faults.append("memory is held that no cache has")

    def _blocks(self, name: str) -> Any:
        """A copy: (tensors, blocks, bytes)."""
        return np.frombuffer(self.memory[name], np.uint8).reshape(TENSORS, BLOCKS, BLOCK).copy()

    def _changes(self, name: str, wanted: dict[int, Any], call: Callable[[], None]) -> None:
        """These blocks change and no other; nothing does if the call fails."""
        after = before = self._blocks(name)
        try:
            call()
            after = before.copy()
            for block, content in wanted.items():
                after[:, block] = content
        finally:
            if not np.array_equal(self._blocks(name), after):
                self.faults.append(f"wrong bytes in {name}")


def _desc(placement: shmkv.Placement) -> shmkv.CacheDesc:
    return shmkv.CacheDesc(TENSORS, [BLOCKS, BLOCK], shmkv.DataType.DT_INT8, placement)


def peer_blocks() -> str:
    """Run by the healthy peer: the blocks that are pulled."""
    return f"""
import caller_memory
caller_memory.allocate_blocks(agent, "blocks", {TENSORS}, [{BLOCKS}, {BLOCK}], "DT_INT8", {MODEL_ID})
agent.fill("blocks", {GENERATION})
"""
