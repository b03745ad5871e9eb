"""The two ends of a load, as many as a test wants."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from peer import Namespace
from vllm_ends import Consumer, ProducerProcess, StartConsumer, StartProducer


@pytest.fixture
def producer(namespace: Namespace) -> Iterator[StartProducer]:
    """producer(settings, identity, seed, shard): a process."""
    made: list[ProducerProcess] = []

    def start(settings: dict[str, Any] | None = None, identity: dict[str, Any] | None = None, seed: int = 1,
              shard: int = 0) -> ProducerProcess:
        made.append(ProducerProcess(namespace, settings or {}, identity or {}, seed, shard))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.close()


@pytest.fixture
def consumer(namespace: Namespace, rng: np.random.Generator) -> Iterator[StartConsumer]:
    """consumer(settings, produces): in this process, one at a time."""
    made: list[Consumer] = []

    def start(settings: dict[str, Any] | None = None, *, produces: bool = False) -> Consumer:
        made.append(Consumer(settings or {}, rng, produces=produces))
        return made[-1]

    yield start
    for each in made:
        each.close()
