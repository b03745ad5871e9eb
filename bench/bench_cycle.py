"""The life of a cache: allocate, publish, pull, consume, free, over and over; and the first pull of a segment against a later one.

Page faults are counted on both sides, for they cost as much as the copy where they happen.
"""
from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

import cluster
import pytest
import yardstick
from contenders import BARE, OURS, BareCopy, Target
from measure import Contender, interleave
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, signed_text, time_text
from session import PROMPT_ID, Record, Run
from workloads import MEDIUM

import shmkv
from shmkv._copy import RunList

WARM, COLD_BARE, WARM_BARE = "later pull", "bare C, cold", "bare C, warm"
PROMPT_ALONE = "the prompt's part, back to back"
WARM_UP = 4
AT = 16


class Cycle:
    """Cycles of one cache after another between the prompt process and this one.

    A key is pulled to the end, so it is consumed, and its cache is freed; the next one gets the same memory. The two processes
    tell each other by a pipe when it is their turn: that is not counted in `own_ns`.
    """

    def __init__(self, manager: shmkv.KvCacheManager, prompt: Process) -> None:
        desc = shmkv.CacheDesc(MEDIUM.num_tensors, [1, MEDIUM.row_nbytes // 2], shmkv.DataType.DT_FLOAT16)
        self._manager = manager
        self._prompt = prompt
        self._cache = manager.allocate_cache(desc)
        self._next_req_id = 0
        self.prompt_ns: list[int] = []
        self.handed_ns: list[int] = []

    def run(self, number: int) -> int:
        """Nanoseconds that both sides spent in the library."""
        return sum(self._go() for _ in range(number))

    def _go(self) -> int:
        self._next_req_id += 1
        key = shmkv.CacheKey(PROMPT_ID, self._next_req_id, 0)
        begin = time.perf_counter_ns()
        prompt_ns: int = self._prompt.call("cycle_begin", num_tensors=MEDIUM.num_tensors, row_nbytes=MEDIUM.row_nbytes,
                                           req_id=self._next_req_id)
        begin_pull = time.perf_counter_ns()
        self._manager.pull_cache(key, self._cache)
        end = time.perf_counter_ns()
        self.handed_ns.append(end - begin)
        self.prompt_ns.append(prompt_ns)
        return prompt_ns + end - begin_pull

    def faults(self, number: int) -> list[float]:
        """(minor, major) page faults of a cycle: the prompt's, then ours, over `number` cycles."""
        before = [*self._prompt.call("faults"), *cluster.faults()]
        self.run(number)
        after = [*self._prompt.call("faults"), *cluster.faults()]
        return [(late - early) / number for early, late in zip(before, after, strict=True)]

    def prompt_alone(self, number: int) -> int:
        """The prompt's part back to back in its process: nothing is handed over, and no copy comes in between."""
        self._next_req_id += 1
        return int(self._prompt.call("cycle_again", num_tensors=MEDIUM.num_tensors, row_nbytes=MEDIUM.row_nbytes,
                                     req_id=self._next_req_id, number=number))

    def runs(self) -> BareCopy:
        """The copy of a cycle: from where the cache lies now, which is where the next one will lie."""
        source = cluster.Source(**self._prompt.call("cycle_source"))
        starts = [tensor.data_ptr for tensor in self._cache.tensors]
        runs = [(offset, start - starts[0], MEDIUM.row_nbytes) for offset, start in zip(source.offsets, starts, strict=True)]
        return BareCopy(source, starts[0], runs)

    def bare(self, copy: RunList) -> Contender:
        """That copy, after the same hand-over, and nothing else."""
        return Contender(BARE, lambda number: sum(self._timed(copy) for _ in range(number)))

    def _timed(self, copy: RunList) -> int:
        self._prompt.call("faults")
        begin = time.perf_counter_ns()
        copy.copy()
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        self._prompt.call("cycle_end")
        self._manager.deallocate_cache(self._cache)


@pytest.fixture
def cycle(manager: shmkv.KvCacheManager, prompt: Process) -> Iterator[Cycle]:
    made = Cycle(manager, prompt)
    yield made
    made.close()


def test_cycle(cycle: Cycle, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """64 MiB in steady state; the work of filling the cache is left out, since it is not the library's."""
    cycle.run(WARM_UP)
    runs = cycle.runs()
    loop = yardstick.choose(runs, run.rounds(yardstick.ROUNDS))
    others = [cycle.bare(runs.run_list(loop.kernel, loop.streaming)), Contender(PROMPT_ALONE, cycle.prompt_alone)]
    medians = interleave(benchmark, Contender(OURS, cycle.run), others, rounds=run.rounds(30), number=2)
    counted = cycle.faults(run.rounds(30))
    handed = statistics.median(cycle.handed_ns[WARM_UP:])
    row = Row("cycles", "cycle of 64 MiB", 0, MEDIUM.nbytes)
    row.values = {"minor faults of a side": max(counted[0], counted[2]), "major faults": max(counted[1], counted[3])}
    row.notes = [f"C: {loop}", f"{1e9 / medians[OURS]:.0f} a second, {1e9 / handed:.0f} with the hand-over by pipe",
                 f"beyond the copy {signed_text(medians[OURS] - medians[BARE])}",
                 f"of it the prompt's {time_text(statistics.median(cycle.prompt_ns[WARM_UP:]))}, "
                 f"back to back without the copy {time_text(medians[PROMPT_ALONE])}",
                 "faults a cycle (minor/major): prompt {:.1f}/{:.1f}, decoder {:.1f}/{:.1f}".format(*counted)]
    record(row, medians, OURS)


class Fresh:
    """Segments that nobody has mapped yet, and the way a pull of each goes the first and the second time."""

    def __init__(self, manager: shmkv.KvCacheManager, prompt: Process, count: int, loop_rounds: int) -> None:
        self._manager = manager
        self._prompt = prompt
        self._sources = [self._publish() for _ in range(count)]
        self._left = list(self._sources)
        self.target = Target(manager, self._publish(), MEDIUM.num_tensors, MEDIUM.row_nbytes, AT)
        self.loop = yardstick.choose(self.target, loop_rounds)

    def _publish(self) -> cluster.Source:
        return cluster.Source(**self._prompt.call("publish", num_tensors=MEDIUM.num_tensors, row_nbytes=MEDIUM.row_nbytes))

    def cold(self, number: int) -> int:
        """The first pull of another segment each time."""
        return sum(self._pull(self._left.pop()) for _ in range(number))

    def _pull(self, source: cluster.Source) -> int:
        begin = time.perf_counter_ns()
        self._manager.pull_cache(source.key, self.target.cache, size=MEDIUM.row_nbytes, dst_cache_offset=AT)
        return time.perf_counter_ns() - begin

    def bare_cold(self, number: int) -> int:
        """Map a segment and copy, with the page table filled as the copy goes."""
        begin = time.perf_counter_ns()
        for _ in range(number):
            attached = cluster.Attached(self._sources[0].path, warm=False)
            RunList(self.target.runs, attached.base, self.target.base, kernel=self.loop.kernel,
                    streaming=self.loop.streaming).copy()
        return time.perf_counter_ns() - begin

    def bare_warm(self) -> Contender:
        return self.target.bare(self.loop.kernel, self.loop.streaming, WARM_BARE)

    def close(self) -> None:
        self.target.close()
        for source in (*self._sources, self.target.source):
            self._prompt.call("drop", cache_id=source.cache_id)


def test_cold(manager: shmkv.KvCacheManager, prompt: Process, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """The first pull of a segment maps it; every later one, of this cache or of one that got its memory, does not."""
    rounds = run.rounds(8)
    fresh = Fresh(manager, prompt, rounds + 2, run.rounds(yardstick.ROUNDS))        # two go before the rounds that count
    with contextlib.closing(fresh):
        others = [Contender(COLD_BARE, fresh.bare_cold), fresh.target.pull(WARM), fresh.bare_warm()]
        medians = interleave(benchmark, Contender(OURS, fresh.cold), others, rounds=rounds)
    row = Row("cycles", "first pull of 64 MiB", AT, MEDIUM.nbytes)
    row.notes = [f"C: {fresh.loop}", f"x{medians.ratio(OURS, WARM):.2f} of a later pull",
                 f"x{medians.ratio(OURS, COLD_BARE):.2f} of mapping and bare C",
                 f"mapping costs {time_text((medians[OURS] - medians[WARM]) / (MEDIUM.nbytes >> 20))} a MiB"]
    record(row, medians, OURS)
