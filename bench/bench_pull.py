"""A pull against everything else that moves the same bytes: the four workloads, small pulls, several decoders at once."""
from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import contenders as ways
import pytest
import yardstick
from arena import Arena, opened
from cluster import Source
from contenders import Target
from measure import Contender, Medians, interleave, repeat
from on_two import Helper
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, signed_text, time_text
from session import PROMPT_ID, Record, Run
from workloads import DESTINATIONS, LARGE, MEDIUM, SMALL, Workload

import shmkv

FOUR_KIB = 4096
MANY = 64
# The small workload with a quarter and half of its bytes, and whole.
LESS = [dataclasses.replace(SMALL, name=f"{SMALL.nbytes // part >> 10} KiB", tokens=SMALL.tokens // part) for part in (4, 2, 1)]
DECODERS = (1, 2, 4, 8)
SPAN_NS = 300_000_000       # of one round of several decoders
LEAD_NS = 20_000_000        # before it, for each: all of them warm up first, and take turns where processors are fewer

Manager = shmkv.KvCacheManager


# -- the workloads -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=[SMALL, MEDIUM, LARGE], ids=lambda workload: str(workload.name.split()[0]))
def arena(request: pytest.FixtureRequest, manager: Manager, prompt: Process) -> Iterator[Arena]:
    workload: Workload = request.param
    try:
        with opened(manager, prompt, workload) as made:
            yield made
    except MemoryError as error:
        pytest.skip(str(error))


def ways_on_two(helper: Helper, arena: Arena, at: int, loop: yardstick.Loop) -> list[Contender]:
    """None for the small workload: below 8 MiB the library lets the second thread sleep."""
    if arena.workload is SMALL:
        return []
    return helper.contenders("target", source=arena.source.to_json(), num_tensors=arena.workload.num_tensors,
                             row_nbytes=arena.workload.row_nbytes, at=at, kernel=loop.kernel, streaming=loop.streaming)


def private_ways(arena: Arena, at: int, stack: contextlib.ExitStack) -> Iterator[Contender]:
    """What a user would write, into memory of this process."""
    workload, source, shared = arena.workload, arena.source, arena.shared
    rows = arena.private.rows(workload.num_tensors, workload.row_nbytes, at)
    yield shared.numpy(rows)
    torch = ways.import_torch()
    if torch is not None:
        yield shared.torch(torch, rows, 1)
        yield shared.torch(torch, rows, 2)
    yield ways.readv(source.pid, source.addresses, shared.rows, rows)
    yield ways.unix_socket(arena.prompt, source, shared.rows, rows, stack)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", DESTINATIONS)
def test_workload(arena: Arena, at: int, two_threads: Helper, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """A whole cache, by cache id, so that nothing is consumed."""
    workload = arena.workload
    rounds = run.rounds(workload.rounds)
    row = Row("workloads", workload.name, at, workload.nbytes)
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(arena.target(at))
        stack.callback(two_threads.process.call, "forget")
        loop = yardstick.choose(target, run.rounds(min(workload.rounds, yardstick.ROUNDS)), workload.number)
        others = [target.bare(loop.kernel, loop.streaming), *private_ways(arena, at, stack)]
        others += [way for way in (target.prepared(),) if way is not None]
        others += ways_on_two(two_threads, arena, at, loop)
        medians = interleave(benchmark, target.pull(), others, rounds=rounds, number=workload.number)
    row.notes = [f"C: {loop}", above_bare(medians)]
    if ways.OURS_TWO_WOKEN in medians:
        row.notes.append(f"2 threads that have slept: {time_text(medians[ways.OURS_TWO_WOKEN])}")
    elif ways.TORCH_TWO in medians:
        row.notes.append(f"x{medians.ratio(ways.OURS, ways.TORCH_TWO):.2f} of torch on 2 threads")
    record(row, medians, ways.OURS)


def above_bare(medians: Medians) -> str:
    """What a pull costs besides its copy."""
    texts = [f"{name.removeprefix('ours').strip(', ') or 'plain'} {signed_text(medians[name] - medians[ways.BARE])}"
             for name in (ways.OURS, ways.PREPARED) if name in medians]
    return "beyond the copy: " + ", ".join(texts)


# -- small pulls -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workload", LESS, ids=lambda workload: str(workload.name.split()[0]))
def test_less(workload: Workload, manager: Manager, prompt: Process, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """As many runs as the small workload has, of fewer bytes, and that workload once more: in what do these pulls differ from their
    copies, when source and destination together leave more or less of L2 to the rest?"""
    with opened(manager, prompt, workload) as arena, arena.target(0) as target:
        loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), workload.number)
        others = [target.bare(loop.kernel, loop.streaming), *(way for way in (target.prepared(),) if way is not None)]
        medians = interleave(benchmark, target.pull(), others, rounds=run.rounds(workload.rounds), number=workload.number)
    row = Row("small pulls", f"{workload.nbytes >> 10} KiB in {workload.num_tensors} runs", 0, workload.nbytes)
    row.notes = [f"C: {loop}", above_bare(medians)]
    record(row, medians, ways.OURS)


def test_four_kib(manager: Manager, prompt: Process, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """One run of 4 KiB: what a pull costs when there is nothing to copy."""
    source = Source(**prompt.call("publish", num_tensors=1, row_nbytes=FOUR_KIB))
    target = Target(manager, source, 1, FOUR_KIB, 0)
    shared = ways.Shared(prompt, source, 1, FOUR_KIB)
    private = ways.Private(FOUR_KIB).rows(1, FOUR_KIB, 0)
    loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), 200)
    others = [target.bare(loop.kernel, loop.streaming), shared.numpy(private)]
    others += [way for way in (target.prepared(),) if way is not None]
    medians = interleave(benchmark, target.pull(), others, rounds=run.rounds(300), number=200)
    row = Row("small pulls", "one run of 4 KiB", 0, FOUR_KIB)
    row.notes = [f"C: {loop}", *(f"{name.replace('ours, ', '').replace('ours', 'plain')} {1e9 / medians[name]:,.0f} a second"
                                 for name in (ways.OURS, ways.PREPARED) if name in medians)]
    record(row, medians, ways.OURS)
    target.close()
    shared.close()
    prompt.call("drop", cache_id=source.cache_id)


def test_by_key(manager: Manager, prompt: Process, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """By a prefix key against by cache id."""
    source = Source(**prompt.call("publish", num_tensors=SMALL.num_tensors, row_nbytes=SMALL.row_nbytes, prefix_id=7))
    target = Target(manager, source, SMALL.num_tensors, SMALL.row_nbytes, 0)
    by_id = target.pull("by id")
    target.key = shmkv.CacheKey(PROMPT_ID, 2**64 - 1, 0, 7)
    loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), SMALL.number)
    others = [by_id, target.bare(loop.kernel, loop.streaming)]
    medians = interleave(benchmark, target.pull(), others, rounds=run.rounds(200), number=20)
    row = Row("small pulls", "small by prefix key", 0, SMALL.nbytes)
    row.notes = [f"C: {loop}", f"x{medians.ratio(ways.OURS, 'by id'):.2f} of by id"]
    record(row, medians, ways.OURS)
    target.close()
    prompt.call("drop", cache_id=source.cache_id)


def test_pull_many(manager: Manager, prompt: Process, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """Rows of 4 KiB by one call, against the same rows by a call each."""
    if not hasattr(manager, "pull_many"):
        pytest.skip("this version has no pull_many")
    source = Source(**prompt.call("publish", num_tensors=1, row_nbytes=FOUR_KIB, rows=MANY))
    target = manager.allocate_cache(shmkv.CacheDesc(1, [MANY, FOUR_KIB // 2], shmkv.DataType.DT_FLOAT16))
    keys = [shmkv.CacheKeyByIdAndIndex(PROMPT_ID, source.cache_id, row) for row in range(MANY)]
    requests = [shmkv.PullRequest(key, target, row) for row, key in enumerate(keys)]

    def one_by_one() -> None:
        for row, key in enumerate(keys):
            manager.pull_cache(key, target, row)

    many = Contender(ways.OURS, repeat(partial(manager.pull_many, requests)))
    medians = interleave(benchmark, many, [Contender("one by one", repeat(one_by_one))], rounds=run.rounds(100), number=5)
    row = Row("small pulls", f"{MANY} rows of 4 KiB, one call", 0, MANY * FOUR_KIB)
    row.notes = [f"{time_text(medians[ways.OURS] / MANY)} a row", f"x{medians.ratio(ways.OURS, 'one by one'):.2f} of a call each"]
    record(row, medians, ways.OURS)
    manager.deallocate_cache(target)
    prompt.call("drop", cache_id=source.cache_id)


# -- several decoders --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Decoders:
    """Decoder processes, and the loop of their bare copies."""

    processes: list[Process]
    loop: yardstick.Loop


@pytest.fixture(scope="module")
def decoders(prompt: Process, manager: Manager, run: Run) -> Iterator[Decoders]:
    """Decoder processes, each with a destination of its own for the same medium cache."""
    source = Source(**prompt.call("publish", num_tensors=MEDIUM.num_tensors, row_nbytes=MEDIUM.row_nbytes))
    with contextlib.closing(Target(manager, source, MEDIUM.num_tensors, MEDIUM.row_nbytes, 16)) as target:
        loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), MEDIUM.number)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Process("decoder.py", str(10 + number), str(PROMPT_ID))) for number in range(max(DECODERS))]
        for process in made:        # all start at the same time
            process.send("target", source=source.to_json(), num_tensors=MEDIUM.num_tensors, row_nbytes=MEDIUM.row_nbytes, at=16,
                         kernel=loop.kernel, streaming=loop.streaming)
        for process in made:
            process.receive()
        yield Decoders(made, loop)
    prompt.call("drop", cache_id=source.cache_id)


def all_at_once(processes: list[Process], way: str) -> Callable[[], float]:
    """Total goes a second of all processes in one span of time."""

    def rate() -> float:
        begin = time.monotonic_ns() + LEAD_NS * len(processes)
        for process in processes:
            process.send("run_between", way=way, begin_ns=begin, end_ns=begin + SPAN_NS)
        return float(sum(process.receive() for process in processes))

    return rate


def _time_each(rate: Callable[[], float]) -> Callable[[int], int]:
    """A rate as nanoseconds for one go, to compare like everything else."""
    return lambda number: round(1e9 * number / rate())


@pytest.mark.parametrize("count", DECODERS)
def test_decoders(decoders: Decoders, count: int, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """As many processes pull the same 64 MiB at the same time; the yardstick is as many bare copies at the same time."""
    chosen = decoders.processes[:count]
    ours = Contender(ways.OURS, _time_each(all_at_once(chosen, "pull")))
    bare = Contender(ways.BARE, _time_each(all_at_once(chosen, "bare")))
    medians = interleave(benchmark, ours, [bare], rounds=run.rounds(5))
    row = Row("decoders", f"{count} decoders, medium", 16, MEDIUM.nbytes, notes=[f"C: {decoders.loop}", "GB/s of all together"])
    record(row, medians, ways.OURS)
