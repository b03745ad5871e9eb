"""Two engines of two tensor-parallel ranks each: scheduler and workers are processes of their own, and each rank has its part of a
block."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine
from house import House
from models import make
from prompts import prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
BLOCK = 128
RANKS = 2
NEW_TOKENS = 12
LENGTHS = (1, BLOCK, 3 * BLOCK + 5, 900)


def names_of_vllm(engine: Engine) -> set[Path]:
    """Shared memory of vLLM's own, by which ranks of one engine speak with each other. It leaves it behind now and then."""
    pids = [engine.pid]
    for pid in pids:            # grows as it goes: children of children
        threads = Path(f"/proc/{pid}/task").iterdir()
        pids += [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return {Path(name) for pid in pids for name in re.findall(r"/dev/shm/vllm_dist_\S+", Path(f"/proc/{pid}/maps").read_text())}


@pytest.fixture
def pair(house: House) -> Iterator[tuple[Engine, Engine]]:
    """A consumer and a producer. They end with the test, well or not, and what vLLM's ranks leave goes."""
    model = make("tiny", house.folder)
    consumer = house.start("consumer", model, "kv_consumer", tensor_parallel_size=RANKS)
    producer = house.start("producer", model, "kv_producer", tensor_parallel_size=RANKS)
    left: set[Path] = set()
    try:
        for engine in (consumer, producer):
            engine.wait_until_ready()
            left |= names_of_vllm(engine)           # now, for one that dies cannot be asked
        yield consumer, producer
    finally:
        for engine in (consumer, producer):
            engine.close()
        for path in left:
            path.unlink(missing_ok=True)


def test_ranks_share_blocks_with_their_like(house: House, pair: tuple[Engine, Engine]) -> None:
    consumer, producer = pair
    # The consumer's scheduler finds what the producer's ranks have; the producer's scheduler publishes nothing.
    house.wait_until(lambda: len(consumer.call("state")["peers"]) == 1 + RANKS)
    asked = [prompt(tokens, tokens) for tokens in LENGTHS]
    said = producer.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    blocks = sum(tokens // BLOCK for tokens in LENGTHS)
    assert producer.counted("published_blocks") == RANKS * blocks
    assert consumer.call("each", prompts=asked, max_tokens=NEW_TOKENS) == said
    assert consumer.counted("hit_tokens") >= sum(min(tokens // BLOCK * BLOCK, tokens - 1) for tokens in LENGTHS)
    assert consumer.counted("loaded_blocks") == RANKS * blocks
    assert consumer.call("computed_tokens") == sum(max(tokens % BLOCK, 1) for tokens in LENGTHS)
