"""Layers that are pulled while the prefill goes on: how late the last one is, and what a wait costs that has nothing to do."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
import yardstick
from contenders import BARE, OURS, BareCopy, same_bytes
from measure import Contender, interleave
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, time_text
from session import PROMPT_ID, Record, Run
from workloads import MEDIUM

import shmkv

LAYERS, TENSORS = MEDIUM.layers, MEDIUM.num_tensors
LAYER_NBYTES = 2 * MEDIUM.row_nbytes
PAUSE_MS, LAYER_MS = 13, 10         # the first layers take 5 ms of the pause
WOKEN, WHOLE = "woken by a pipe, bare C", "pull after the prefill"
WAITER_ID = 4
WAITS = 8
WINDOW_S = 2.0


class Streamed:
    """64 MiB in 32 layers: the source in the prompt process, and a cache of this one that gets them layer by layer."""

    def __init__(self, manager: shmkv.KvCacheManager, prompt: Process) -> None:
        self.source = cluster.Source(**prompt.call("publish", num_tensors=TENSORS, row_nbytes=MEDIUM.row_nbytes))
        self.cache = manager.allocate_cache(shmkv.CacheDesc(TENSORS, [1, MEDIUM.row_nbytes // 2], shmkv.DataType.DT_FLOAT16))
        starts = [tensor.data_ptr for tensor in self.cache.tensors]
        runs = [(offset, start - starts[0], MEDIUM.row_nbytes)
                for offset, start in zip(self.source.offsets, starts, strict=True)]
        self.all = BareCopy(self.source, starts[0], runs)
        self.last = BareCopy(self.source, starts[0], runs[-2:])
        self._manager = manager
        self.prompt = prompt

    def pull_layers(self) -> int:
        """Until all layers are here: when that was."""
        for _ in self._manager.pull_layers(self.source.key, self.cache):
            pass
        return time.monotonic_ns()

    def pull_whole(self) -> int:
        """The same by one pull, once all of it is published."""
        self._manager.wait_for_key(self.source.key)
        self._manager.pull_cache(self.source.key, self.cache)
        return time.monotonic_ns()

    def close(self) -> None:
        self._manager.deallocate_cache(self.cache)
        self.prompt.call("drop", cache_id=self.source.cache_id)


@pytest.fixture
def streamed(manager: shmkv.KvCacheManager, prompt: Process) -> Iterator[Streamed]:
    made = Streamed(manager, prompt)
    yield made
    made.close()


def last_layer(streamed: Streamed) -> int:
    """Nanoseconds from the mark of the last layer, for which this process sleeps, to its bytes."""
    prompt, cache_id = streamed.prompt, streamed.source.cache_id
    prompt.call("take_back", cache_id=cache_id, layers=LAYERS - 1)
    prompt.send("mark", cache_id=cache_id, layer=LAYERS - 1, pause_ms=PAUSE_MS)
    arrived = streamed.pull_layers()
    return arrived - int(prompt.receive())


def bare_layer(streamed: Streamed, copy: Callable[[], None], *, woken: bool = False) -> int:
    """The copy of that layer and nothing else, after the same work of the prompt and the same sleep; `woken`: with the time from
    the mark to the answer that says so."""
    marked = streamed.prompt.call("mark", cache_id=streamed.source.cache_id, layer=LAYERS - 1, pause_ms=PAUSE_MS, publish=False)
    begin = time.monotonic_ns()
    copy()
    return time.monotonic_ns() - (int(marked) if woken else begin)


def contender(name: str, once: Callable[[], int], copied: BareCopy) -> Contender:
    """`once` answers how many nanoseconds of it count."""
    return Contender(name, lambda number: sum(once() for _ in range(number)), same_bytes(name, copied.src_rows, copied.rows))


@pytest.mark.timeout(300)
def test_last_layer(streamed: Streamed, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """The prompt marks the last layer; the decoder, which sleeps, is woken and copies its 2 MiB."""
    loop = yardstick.choose(streamed.last, run.rounds(yardstick.ROUNDS), 1)
    ours = contender(OURS, lambda: last_layer(streamed), streamed.all)
    copy = streamed.last.run_list(loop.kernel, loop.streaming).copy
    bare = contender(BARE, lambda: bare_layer(streamed, copy), streamed.last)
    woken = contender(WOKEN, lambda: bare_layer(streamed, copy, woken=True), streamed.last)
    medians = interleave(benchmark, ours, [bare, woken], rounds=run.rounds(100))
    row = Row("streaming", "last layer of 2 MiB", 0, LAYER_NBYTES)
    row.values = {"ns beyond C": medians[OURS] - medians[BARE]}
    row.notes = [f"C: {loop}", f"from the mark to the last byte; beyond the copy: {time_text(row.values['ns beyond C'])}",
                 f"of who is woken by a pipe: {time_text(medians[WOKEN] - medians[BARE])}"]
    record(row, medians, OURS)


def after_prefill(streamed: Streamed, *, by_layer: bool) -> int:
    """Nanoseconds from the end of a prefill to the last byte."""
    prompt, cache_id = streamed.prompt, streamed.source.cache_id
    prompt.call("take_back", cache_id=cache_id)
    prompt.send("prefill", cache_id=cache_id, layer_ms=LAYER_MS, by_layer=by_layer)
    arrived = streamed.pull_layers() if by_layer else streamed.pull_whole()
    return arrived - int(prompt.receive())


@pytest.mark.timeout(300)
def test_prefill(streamed: Streamed, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """How long after the last of 32 layers everything is here, and how long a pull takes that begins then."""
    ours = contender(OURS, lambda: after_prefill(streamed, by_layer=True), streamed.all)
    whole = contender(WHOLE, lambda: after_prefill(streamed, by_layer=False), streamed.all)
    medians = interleave(benchmark, ours, [whole], rounds=run.rounds(25))
    row = Row("streaming", f"prefill of {LAYERS} x {LAYER_MS} ms", 0)
    row.values = {"ns after the last layer": medians[OURS], "streamed/whole": medians.ratio(OURS, WHOLE)}
    row.notes = [f"until all {MEDIUM.nbytes >> 20} MiB are here, from the last mark on",
                 f"x{medians.ratio(OURS, WHOLE):.2f} of a pull that begins then, {time_text(medians[WHOLE])}"]
    record(row, medians, OURS)


# -- waiting for nothing -----------------------------------------------------------------------------------------------

def voluntary(pid: int) -> int:
    """Voluntary context switches of all threads of a process so far."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines()
               if line.startswith("voluntary_ctxt_switches"))


def wake_ups(pid: int) -> float:
    """Wake-ups a second, counted by the kernel."""
    before, begin = voluntary(pid), time.monotonic()
    time.sleep(WINDOW_S)
    return (voluntary(pid) - before) / (time.monotonic() - begin)


def test_idle_waits(prompt: Process, run: Run, benchmark: Any) -> None:
    """Threads that wait for keys that do not come, against one that asks every millisecond."""
    counts: dict[str, list[float]] = {"waits": [], "asks": []}
    with Process("decoder.py", str(WAITER_ID), str(PROMPT_ID)) as waiter:

        def both() -> None:
            for way, found in counts.items():
                waiter.call("wait_idle", way=way, number=WAITS if way == "waits" else 1)
                found.append(wake_ups(waiter.pid))
                waiter.call("stop_waiting")

        benchmark.pedantic(both, rounds=run.rounds(3), iterations=1)
    row = Row("streaming", f"{WAITS} waits for keys")
    row.values = {"wake-ups a second": statistics.median(counts["waits"])}
    row.notes = [f"{row.values['wake-ups a second']:.3g} wake-ups a second of the process",
                 f"one thread that asks every ms: {statistics.median(counts['asks']):,.0f}"]
    run.rows.append(row)
