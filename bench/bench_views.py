"""What it takes to look at a row without copying it, and to fork one."""
from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

import cluster
import numpy as np
from cluster import Source
from contenders import OURS
from measure import Contender, Medians, interleave, repeat
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, time_text
from session import Record, Run
from workloads import LARGE, PAGE, SMALL, Workload

import shmkv

OPENED, READ = "a view and its first array", "a view and one byte of each tensor"
WRITTEN_PAGES = 1024
WRITES, ANONYMOUS = "a fork and what is written", "as many pages of fresh memory"


@contextlib.contextmanager
def published(prompt: Process, workload: Workload) -> Iterator[Source]:
    made = Source(**prompt.call("publish", num_tensors=workload.num_tensors, row_nbytes=workload.row_nbytes))
    try:
        yield made
    finally:
        prompt.call("drop", cache_id=made.cache_id)


def size(workload: Workload) -> str:
    return workload.name.split(maxsplit=1)[1]


def views(manager: shmkv.KvCacheManager, source: Source) -> dict[str, Callable[[], None]]:
    def bare() -> None:
        manager.view_cache(source.key).close()

    def opened() -> None:
        with manager.view_cache(source.key) as view:
            view.tensors[0].numpy()

    def read() -> None:
        with manager.view_cache(source.key) as view:
            for tensor in view.tensors:
                int(tensor.raw[-1])

    return {OURS: bare, OPENED: opened, READ: read}


def view_contenders(manager: shmkv.KvCacheManager, source: Source, workload: Workload) -> list[Contender]:
    calls = views(manager, source)
    calls[READ]()                   # the segment is mapped from now on
    return [Contender(f"{name}, {size(workload)}", repeat(call)) for name, call in calls.items()]


def test_view(prompt: Process, manager: shmkv.KvCacheManager, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """What a view costs does not depend on its size: both sizes take turns."""
    with contextlib.ExitStack() as stack:
        ours, *others = [contender for workload in (LARGE, SMALL) for contender in
                         view_contenders(manager, stack.enter_context(published(prompt, workload)), workload)]
        medians = interleave(benchmark, ours, others, rounds=run.rounds(60), number=20)
    growth = medians.ratio(f"{OURS}, {size(LARGE)}", f"{OURS}, {size(SMALL)}")
    for workload in (SMALL, LARGE):
        of_it = Medians({name: medians.samples[f"{name}, {size(workload)}"] for name in (OURS, OPENED, READ)})
        row = Row("views", f"view of {size(workload)}", None, 0, values={"ns of a view": of_it[OURS]})
        row.notes = [f"with its first array {time_text(of_it[OPENED])}",
                     f"with a byte of each of {workload.num_tensors} tensors {time_text(of_it[READ])}"]
        if workload is LARGE:
            row.values["growth"] = growth
            row.notes.append(f"x{growth:.2f} of a view of {size(SMALL)}")
        record(row, of_it, OURS)


def forks(manager: shmkv.KvCacheManager, source: Source) -> dict[str, Callable[[], None]]:
    def bare() -> None:
        manager.deallocate_cache(manager.fork_cache(source.key))

    def written() -> None:
        fork = manager.fork_cache(source.key)
        (addresses,) = fork.per_device_tensor_addrs
        cluster.bytes_at(addresses[0], WRITTEN_PAGES * PAGE)[::PAGE] = 1
        manager.deallocate_cache(fork)

    def anonymous() -> None:
        np.frombuffer(mmap.mmap(-1, WRITTEN_PAGES * PAGE), np.uint8)[::PAGE] = 1

    return {OURS: bare, WRITES: written, ANONYMOUS: anonymous}


def test_fork(prompt: Process, manager: shmkv.KvCacheManager, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    with published(prompt, LARGE) as source:
        calls = forks(manager, source)
        calls[OURS]()
        others = [Contender(name, repeat(call)) for name, call in calls.items() if name != OURS]
        medians = interleave(benchmark, Contender(OURS, repeat(calls[OURS])), others, rounds=run.rounds(40), number=4)
    row = Row("views", "fork of 512 MiB", None, 0)
    row.values = {"ns of a fork": medians[OURS]}
    row.notes = [f"writing {WRITTEN_PAGES} pages of it adds {(medians[WRITES] - medians[OURS]) / WRITTEN_PAGES:.0f} ns a page, "
                 f"fresh memory takes {medians[ANONYMOUS] / WRITTEN_PAGES:.0f} ns a page"]
    record(row, medians, OURS)
