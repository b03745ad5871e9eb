"""Two sides of the vLLM connector without vLLM, each in a process: one publishes blocks of prompts, the other looks them up.

Started as ``engine_blocks.py producer`` or ``engine_blocks.py consumer``.
"""
from __future__ import annotations

import itertools
import random
import sys
import time

import numpy as np
import programs

from shmkv.integrations.vllm.block_keys import Prompt, block_hashes, key_words
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.identity import CacheIdentity, GroupLayout
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.plans import BlockPlace, StepPlan, Store
from shmkv.integrations.vllm.scheduler import SchedulerSide
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import open_shared
from shmkv.integrations.vllm.worker import WorkerSide

BLOCK_SIZE, BLOCK_NBYTES, MOST_BLOCKS = 128, 4096, 32
IDENTITY = CacheIdentity(
    model="bench", model_digest="", weights="", weight_files="", layout="", attention="", engine="", block_size=BLOCK_SIZE,
    num_shards=1, groups=(GroupLayout(window=0, cache_dtype="", block_nbytes=BLOCK_NBYTES, num_layers=1, num_kv_heads=1,
                                      head_size=1),))
# Nobody is looked for while something is measured.
SETTINGS = ConnectorSettings(look_ms=1_000_000)


def prompt(seed: int, blocks: int) -> Prompt:
    """Tokens of chance, the same for the same seed, and one more than the blocks have."""
    chance = random.Random(seed)
    return Prompt([chance.randrange(1 << 17) for _ in range(blocks * BLOCK_SIZE + 1)])


class Producer:
    """One method a command."""

    def __init__(self) -> None:
        self._shared = open_shared(SETTINGS, IDENTITY, consumes=False, produces=True)
        self._layers = Layers({"layer": np.zeros((MOST_BLOCKS, BLOCK_NBYTES), np.uint8)})
        self._worker = WorkerSide(self._shared, [self._layers], IDENTITY, 0, consumes=False, produces=True)

    def publish(self, seed: int) -> int:
        """All blocks of a prompt. Answers the cluster's id."""
        names = block_hashes(IDENTITY.seed(), prompt(seed, MOST_BLOCKS), BLOCK_SIZE)
        places = tuple(BlockPlace(name, place) for place, name in enumerate(names))
        plan = StepPlan(stores=(Store("bench", places, (), tuple(range(MOST_BLOCKS))),))
        self._worker.save_layer(plan, "layer")
        self._worker.end_step(plan)
        return self._shared.endpoint.cluster_id

    def close(self) -> None:
        self._worker.close()
        self._shared.close()


class Consumer:
    """One method a command."""

    def __init__(self) -> None:
        self._shared = open_shared(SETTINGS, IDENTITY, consumes=True, produces=False)
        self._side = SchedulerSide(IDENTITY.seed(), BLOCK_SIZE, [0], self._is_found, most_blocks=0, is_async=False,
                                   counters=Counters())
        self._numbers = itertools.count()

    def _is_found(self, block_hash: bytes, group: int) -> bool:
        return self._shared.peers.find(key_words(block_hash, 0, group)) is not None

    def peers(self) -> list[int]:
        """Whose blocks can be used, in the order in which they are asked."""
        return [each for each in self._shared.peers.usable if each != self._shared.endpoint.cluster_id]

    def matched(self, seed: int, blocks: int) -> int:
        """Blocks of a prompt that are found."""
        asked = prompt(seed, blocks)
        try:
            return self._side.match("checked", asked, len(asked.token_ids), 0)[0] // BLOCK_SIZE
        finally:
            self._side.finished("checked")

    def match(self, seed: int, blocks: int, number: int) -> int:
        """Nanoseconds of the first match of so many requests, one after the other."""
        asked = prompt(seed, blocks)
        names = [str(next(self._numbers)) for _ in range(number)]
        begin = time.perf_counter_ns()
        for name in names:
            self._side.match(name, asked, len(asked.token_ids), 0)
        end = time.perf_counter_ns()
        for name in names:
            self._side.finished(name)
        return end - begin

    def again(self, seed: int, blocks: int, number: int) -> int:
        """Nanoseconds of matches of one request that waits: its hashes are known."""
        asked = prompt(seed, blocks)
        self._side.match("waits", asked, len(asked.token_ids), 0)
        begin = time.perf_counter_ns()
        for _ in range(number):
            self._side.match("waits", asked, len(asked.token_ids), 0)
        end = time.perf_counter_ns()
        self._side.finished("waits")
        return end - begin

    def hashing(self, seed: int, blocks: int, number: int) -> int:
        """Nanoseconds of naming the blocks, and nothing else."""
        asked, seed_bytes = prompt(seed, blocks), IDENTITY.seed()
        begin = time.perf_counter_ns()
        for _ in range(number):
            block_hashes(seed_bytes, asked, BLOCK_SIZE)
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        self._shared.close()


def main() -> None:
    side: Producer | Consumer = Producer() if sys.argv[1] == "producer" else Consumer()
    try:
        programs.serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_") and name != "close"})
    finally:
        side.close()


if __name__ == "__main__":
    main()
