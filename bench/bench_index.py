"""Does a pull take longer the more there is? The same small pull from prompt processes with few and many keys, few and many links.

All of them stand side by side and take turns, so that the ratio is one of the same rounds.
"""
from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import cluster
import pytest
import yardstick
from contenders import BARE, Target
from measure import Contender, Medians, interleave, repeat
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row
from session import Record, Run
from workloads import SMALL

import shmkv

PREFIX_ID = 5
KEYED_PROMPT_ID, LINKED_PROMPT_ID, FIRST_CROWD_ID = 100, 200, 1000
ROWS = 1000
KEYS = (10, 1_000, 100_000, 1_000_000)
LINKS = (1, 16, 64, 256)
# Different keys, and how many of them are pulled in a turn.
MANY_KEYS, ANY_KEYS = 20_000, 100


@dataclass
class Side:
    """One prompt process with `count` of something, and our way to pull from it."""

    count: int
    process: Process
    target: Target

    @property
    def rows(self) -> int:
        """Rows of one of its small caches, if it has keys: 1,000 or all there are."""
        return min(self.count, ROWS)

    def contender(self) -> Contender:
        return self.target.pull(str(self.count))


def start(count: int, prompt_id: int, dist: shmkv.LLMDataDist, stack: contextlib.ExitStack) -> Side:
    """A prompt process with the small workload, linked to this process; it is pulled by key."""
    process = stack.enter_context(Process("prompt.py", str(prompt_id)))
    source = cluster.Source(**process.call("publish", num_tensors=SMALL.num_tensors, row_nbytes=SMALL.row_nbytes,
                                           prefix_id=PREFIX_ID))
    cluster.link(dist, prompt_id)
    stack.callback(cluster.unlink, dist, prompt_id)
    target = Target(dist.kv_cache_manager, source, SMALL.num_tensors, SMALL.row_nbytes, 0)
    target.key = shmkv.CacheKey(prompt_id, 2**64 - 1, 0, PREFIX_ID)
    stack.callback(target.close)
    return Side(count, process, target)


def take_turns(what: str, sides: list[Side], run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """A row for each count, all from the same rounds. The most first: it is the one that pytest-benchmark reports. The bare copy is
    of the side with the fewest."""
    few, *_, many = sides
    loop = yardstick.choose(few.target, run.rounds(yardstick.ROUNDS), SMALL.number)
    others = [side.contender() for side in sides if side is not many]
    others.append(few.target.bare(loop.kernel, loop.streaming))
    medians = interleave(benchmark, many.contender(), others, rounds=run.rounds(300), number=20)
    for side in sides:
        name = str(side.count)
        row = Row("index", f"small, {side.count:,} {what}", 0, SMALL.nbytes)
        row.values = {"growth": medians.ratio(name, str(few.count))}
        row.notes = [f"C: {loop}", f"x{row.values['growth']:.3f} of {few.count} {what}"]
        record(row, Medians({name: medians.samples[name], BARE: medians.samples[BARE]}), name)


@pytest.fixture(scope="module")
def keyed(decoder: shmkv.LLMDataDist) -> Iterator[list[Side]]:
    """Prompt processes with as many keys as KEYS says, besides the one that is pulled."""
    with contextlib.ExitStack() as stack:
        sides = [start(count, KEYED_PROMPT_ID + place, decoder, stack) for place, count in enumerate(KEYS)]
        for side in sides:
            side.process.call("crowd", caches=side.count // side.rows, rows=side.rows)
        yield sides


@pytest.mark.timeout(300)
def test_keys(keyed: list[Side], run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    take_turns("keys", keyed, run, record, benchmark)


@pytest.mark.timeout(300)
def test_any_key(keyed: list[Side], manager: shmkv.KvCacheManager, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """A row of 8 bytes by another key each time: nothing of the index is in the processor's cache but what always is."""
    few, many = keyed[0], keyed[-1]
    target = manager.allocate_cache(shmkv.CacheDesc(1, [1, 8], shmkv.DataType.DT_INT8))
    medians = interleave(benchmark, any_key(manager, target, many), [any_key(manager, target, few)], rounds=run.rounds(50),
                         number=ANY_KEYS)
    row = Row("index", f"8 bytes, any of {many.count:,} keys", 0)
    row.notes = [f"x{medians.ratio(str(many.count), str(few.count)):.2f} of any of {few.count} keys: the cache misses of a look-up"]
    record(row, medians, str(many.count))
    manager.deallocate_cache(target)


def any_key(manager: shmkv.KvCacheManager, target: shmkv.KvCache, side: Side) -> Contender:
    """Pulls by keys of chance; every segment is mapped beforehand."""
    def key(cache: int, row: int) -> shmkv.CacheKey:
        return shmkv.CacheKey(side.target.source.cluster_id, 2**64 - 1, 0, (cache + 1 << 32) + row)

    chance = random.Random(side.count)
    caches = side.count // side.rows
    for cache in range(caches):
        manager.pull_cache(key(cache, 0), target)
    keys = itertools.cycle([key(chance.randrange(caches), chance.randrange(side.rows)) for _ in range(MANY_KEYS)])
    return Contender(str(side.count), repeat(lambda: manager.pull_cache(next(keys), target)))


@pytest.mark.timeout(300)
def test_links(decoder: shmkv.LLMDataDist, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """The other links are those of living processes that do nothing."""
    with contextlib.ExitStack() as stack:
        sides = [start(count, LINKED_PROMPT_ID + place, decoder, stack) for place, count in enumerate(LINKS)]
        pairs = [f"{side.count - 1}:{LINKED_PROMPT_ID + place}" for place, side in enumerate(sides)]
        crowd = stack.enter_context(Process("crowd.py", str(FIRST_CROWD_ID), str(max(LINKS) - 1), *pairs))
        assert crowd.call("linked") == max(LINKS) - 1
        take_turns("links", sides, run, record, benchmark)
