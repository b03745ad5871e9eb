"""What a prompt pays before its first step: naming its blocks and looking them up at one and at several peers, without vLLM.

The scheduler's side of the vLLM connector runs in a process of its own, as it does in an engine.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from measure import Contender, interleave
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, time_text
from session import Record, Run

PEERS = (1, 4)
BLOCKS = (1, 8, 32)
AGAIN, HASHING = "again", "hashing"
# Of the prompt that is published, and of one that nobody has.
THERE, NOT_THERE = 1, 0


class Looker:
    """The side that looks up, with a number of peers of which the last one that it asks has the prompt."""

    def __init__(self, stack: contextlib.ExitStack, producers: dict[int, Process]) -> None:
        self._process = stack.enter_context(Process("engine_blocks.py", "consumer"))
        peers: list[int] = self._process.call("peers")
        assert set(peers) == set(producers), "every peer is linked when the side is made"
        producers[peers[-1]].call("publish", seed=THERE + len(peers))

    def contender(self, what: str, seed: int, blocks: int) -> Contender:
        return Contender(what, lambda number: int(self._process.call(what, seed=seed, blocks=blocks, number=number)))

    def found(self, seed: int, blocks: int) -> int:
        return int(self._process.call("matched", seed=seed, blocks=blocks))


@pytest.fixture(scope="module")
def lookers(namespace: str) -> Iterator[dict[int, Looker]]:
    """One side for each number of PEERS. A side knows the producers that were there when it was made."""
    with contextlib.ExitStack() as stack:
        producers: dict[int, Process] = {}
        made: dict[int, Looker] = {}
        for count in PEERS:
            new = [stack.enter_context(Process("engine_blocks.py", "producer")) for _ in range(count - len(producers))]
            producers |= {process.call("publish", seed=NOT_THERE + 100 + number): process for number, process in enumerate(new)}
            made[count] = Looker(stack, producers)
        yield made


@pytest.mark.parametrize("is_hit", [True, False], ids=["hit", "miss"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("peers", PEERS)
def test_match(lookers: dict[int, Looker], peers: int, blocks: int, is_hit: bool, run: Run, record: Record,
               benchmark: BenchmarkFixture) -> None:
    """Of a prompt that is a miss the first block is looked up at every peer, and no other."""
    looker, seed = lookers[peers], THERE + peers if is_hit else NOT_THERE
    assert looker.found(seed, blocks) == (blocks if is_hit else 0)
    others = [looker.contender(what, seed, blocks) for what in (AGAIN, HASHING)]
    medians = interleave(benchmark, looker.contender("match", seed, blocks), others, rounds=run.rounds(30), number=10)
    row = Row("look-ups", f"match {blocks} of {'1 peer' if peers == 1 else f'{peers} peers'}, {'hit' if is_hit else 'miss'}")
    row.values = {"ns a block": medians["match"] / blocks}
    row.notes = [f"{time_text(row.values['ns a block'])} a block", f"hashing {time_text(medians[HASHING])}",
                 f"again, with its hashes known, {time_text(medians[AGAIN])}"]
    record(row, medians, "match")
