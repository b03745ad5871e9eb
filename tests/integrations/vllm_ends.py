"""The two ends of a load without vLLM: a producer in a process of its own, a consumer in this one."""
from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peer import Namespace
from vllm_parts import BLOCK_NBYTES, IDENTITY, NAMES, random_layers

from shmkv.integrations.vllm.block_keys import key_words
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import Shared, open_shared
from shmkv.integrations.vllm.worker import WorkerSide

PROGRAM = Path(__file__).with_name("vllm_producer.py")
DEADLINE_S = 20.0
ROW = BLOCK_NBYTES * len(NAMES)
HEADER = 4096                                   # of a segment
StartProducer = Callable[..., "ProducerProcess"]
StartConsumer = Callable[..., "Consumer"]


class ProducerProcess:
    """vllm_producer.py in a process of its own; its blocks are `layers`."""

    def __init__(self, namespace: Namespace, settings: dict[str, Any], identity: dict[str, Any], seed: int,
                 shard: int) -> None:
        self.layers = random_layers(16, np.random.default_rng(seed))
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), json.dumps([settings, identity, seed, shard])],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=namespace.environment({}))
        self.cluster_id: int = self._answer()

    def call(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def store(self, block_hashes: list[bytes], block_ids: list[int]) -> None:
        self.call("store", [each.hex() for each in block_hashes], block_ids)

    def _answer(self) -> Any:
        """One answer a command, so nothing of the next one is in the buffer."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, f"no answer after {DEADLINE_S} s"
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate("", timeout=DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


class Consumer:
    """A worker's side in this process."""

    def __init__(self, settings: dict[str, Any], rng: np.random.Generator, *, produces: bool = False) -> None:
        self.shared = open_shared(ConnectorSettings.of({"look_ms": 20, **settings}), IDENTITY, consumes=True, produces=produces)
        self.layers = random_layers(16, rng)
        self.worker = WorkerSide(self.shared, [self.layers], IDENTITY, 0, consumes=True, produces=produces)

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.shared.counters.take().items() if not name.endswith("_ns")}

    def has(self, source: Layers, theirs: list[int], ours: list[int]) -> bool:
        return all(np.array_equal(mine[ours], other[theirs])
                   for mine, other in zip(self.layers.arrays, source.arrays, strict=True))

    def wait_for(self, cluster_id: int) -> None:
        wait_until(lambda: cluster_id in self.shared.peers.usable)

    def close(self) -> None:
        self.worker.close()
        self.shared.close()


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finished_of(worker: WorkerSide, count: int = 1) -> set[str]:
    """Requests whose loads beside the batch have ended, as soon as there are so many."""
    finished: set[str] = set()

    def are_there() -> bool:
        finished.update(worker.take_finished())
        return len(finished) >= count

    wait_until(are_there)
    return finished


def found(shared: Shared, block_hash: bytes, group: int = 0) -> bool:
    return shared.peers.find(key_words(block_hash, 0, group)) is not None
