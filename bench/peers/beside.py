"""A race of one peer against a pull and the bare copy, for the files of this folder."""
from __future__ import annotations

import contextlib
from collections.abc import Callable

import contenders as ways
import yardstick
from arena import Arena, opened
from cluster import ByteArray
from measure import Contender, interleave, repeat
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row
from session import Record, Run
from workloads import Workload

import shmkv

AT = 16
# fetch = prepare(rows of the source, rows of the destination, place to clean up at the end)
Prepare = Callable[[list[ByteArray], list[ByteArray], contextlib.ExitStack], Callable[[], None]]


class Race:
    """What a test of a peer needs. `run_against` adds one row to the table."""

    def __init__(self, manager: shmkv.KvCacheManager, prompt: Process, run: Run, record: Record,
                 benchmark: BenchmarkFixture) -> None:
        self._manager, self._prompt = manager, prompt
        self._run, self._record, self._benchmark = run, record, benchmark

    def run_against(self, name: str, workload: Workload, prepare: Prepare) -> None:
        """`fetch()` brings all rows into private memory that begins where numpy's does."""
        with opened(self._manager, self._prompt, workload) as arena, contextlib.ExitStack() as stack:
            self._go(name, arena, prepare, stack)

    def _go(self, name: str, arena: Arena, prepare: Prepare, stack: contextlib.ExitStack) -> None:
        workload = arena.workload
        target = stack.enter_context(arena.target(AT))
        rows = arena.private.rows(workload.num_tensors, workload.row_nbytes, AT)
        fetch = prepare(target.src_rows, rows, stack)
        peer = Contender(name, repeat(fetch), ways.same_bytes(name, target.src_rows, rows))
        loop = yardstick.choose(target, self._run.rounds(yardstick.ROUNDS), workload.number)
        others = [peer, target.bare(loop.kernel, loop.streaming), arena.shared.numpy(rows)]
        medians = interleave(self._benchmark, target.pull(), others, rounds=self._run.rounds(workload.rounds // 2),
                             number=workload.number)
        row = Row("peers", f"{workload.name}, {name}", AT, workload.nbytes)
        row.notes = [f"{medians.ratio(ways.OURS, name):.3f} of {name}"]
        self._record(row, medians, ways.OURS)
