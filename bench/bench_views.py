"""What it takes to look at a row without copying it, and to fork one."""
from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import cluster
import numpy as np
import pytest
from cluster import Source
from contenders import OURS
from measure import Contender, interleave, repeat
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, time_text
from session import Record, Run
from workloads import LARGE, PAGE, SMALL, Workload

import shmkv

OPENED, READ = "a view and its first array", "a view and one byte of each tensor"
WRITTEN_PAGES = 1024
WRITES, ANONYMOUS = "a fork and what is written", "as many pages of fresh memory"


@pytest.fixture(params=[SMALL, LARGE], ids=lambda workload: str(workload.name.split()[0]))
def workload(request: pytest.FixtureRequest) -> Workload:
    made: Workload = request.param
    return made


@pytest.fixture
def source(prompt: Process, workload: Workload) -> Iterator[Source]:
    made = Source(**prompt.call("publish", num_tensors=workload.num_tensors, row_nbytes=workload.row_nbytes))
    yield made
    prompt.call("drop", cache_id=made.cache_id)


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


def test_view(source: Source, workload: Workload, manager: shmkv.KvCacheManager, run: Run, record: Record,
              benchmark: BenchmarkFixture) -> None:
    """The segment is mapped already, and an array is made when it is asked for: what a view and its first array cost does not
    depend on its size."""
    calls = views(manager, source)
    calls[READ]()
    others = [Contender(name, repeat(call)) for name, call in calls.items() if name != OURS]
    medians = interleave(benchmark, Contender(OURS, repeat(calls[OURS])), others, rounds=run.rounds(60), number=20)
    row = Row("views", f"view of {workload.name.split(maxsplit=1)[1]}", None, 0)
    row.values = {"ns of a view": medians[OURS]}
    row.notes = [f"with its first array {time_text(medians[OPENED])}",
                 f"with a byte of each of {workload.num_tensors} tensors {time_text(medians[READ])}"]
    record(row, medians, OURS)


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
    source = Source(**prompt.call("publish", num_tensors=LARGE.num_tensors, row_nbytes=LARGE.row_nbytes))
    calls = forks(manager, source)
    calls[OURS]()
    others = [Contender(name, repeat(call)) for name, call in calls.items() if name != OURS]
    medians = interleave(benchmark, Contender(OURS, repeat(calls[OURS])), others, rounds=run.rounds(40), number=4)
    prompt.call("drop", cache_id=source.cache_id)
    row = Row("views", "fork of 512 MiB", None, 0)
    row.values = {"ns of a fork": medians[OURS]}
    row.notes = [f"writing {WRITTEN_PAGES} pages of it adds {(medians[WRITES] - medians[OURS]) / WRITTEN_PAGES:.0f} ns a page, "
                 f"fresh memory takes {medians[ANONYMOUS] / WRITTEN_PAGES:.0f} ns a page"]
    record(row, medians, OURS)
