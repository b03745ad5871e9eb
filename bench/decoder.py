"""A decoder process: pulls, or copies the same runs bare, when told. Started as ``decoder.py CLUSTER_ID PROMPT_CLUSTER_ID``."""
from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import cluster
import programs
from blocks import Blocks
from contenders import Target
from measure import Contender

import shmkv

IDLE_MODEL = 77             # of keys that nobody binds
WAIT_MS = 100_000
ASK_S = 0.001
SETTLE_S = 0.3              # until all threads sleep


class Decoder:
    """One method a command."""

    def __init__(self, cluster_id: int, prompt_id: int) -> None:
        self._dist = cluster.join(shmkv.LLMRole.DECODER, cluster_id)
        cluster.link(self._dist, prompt_id)
        self._target: Target | Blocks | None = None
        self._parked = contextlib.ExitStack()       # the thread that copies beside this one
        self._calls: dict[str, Callable[[], object]] = {}
        self._prompt_id = prompt_id
        self._stopped = False
        self._waiters: list[threading.Thread] = []

    def target(self, source: dict[str, object], num_tensors: int, row_nbytes: int, at: int, kernel: str,
               streaming: bool) -> None:
        """Allocate a destination for `source` and prepare all ways to fill it."""
        self.forget()
        target = Target(self._dist.kv_cache_manager, cluster.Source(**source), num_tensors, row_nbytes, at)  # type: ignore[arg-type]
        self._aim(target, kernel, streaming)

    def target_blocks(self, source: dict[str, object], at: int, kernel: str, streaming: bool) -> None:
        """The same for the paged workload."""
        self.forget()
        target = Blocks(self._dist.kv_cache_manager, cluster.Source(**source), at)    # type: ignore[arg-type]
        self._aim(target, kernel, streaming)

    def _aim(self, target: Target | Blocks, kernel: str, streaming: bool) -> None:
        self._target = target
        self._calls = {"pull": target.pull_call(), "bare": target.run_list(kernel, streaming).copy,
                       "bare on two": self._bare_on_two(partial(target.bare_two, kernel, streaming, self._parked))}

    @staticmethod
    def _bare_on_two(make: Callable[[], Contender]) -> Callable[[], object]:
        """The second thread is there from the first go on: before it, `threads` counts those of the library."""
        made: list[Contender] = []

        def call() -> None:
            if not made:
                made.append(make())
            made[0].run(1)

        return call

    def forget(self) -> None:
        if self._target is not None:
            self._parked.close()
            self._calls.clear()
            self._target.close()
            self._target = None
            self._dist.kv_cache_manager.collect()

    def check(self) -> None:
        """RuntimeError unless the bytes arrived."""
        assert self._target is not None
        self._target.pull().check()

    def run(self, way: str, number: int, first: int = 0) -> int:
        """Nanoseconds of `number` goes; `first` goes before them that are not counted."""
        call = self._calls[way]
        for _ in range(first):
            call()
        begin = time.perf_counter_ns()
        for _ in range(number):
            call()
        return time.perf_counter_ns() - begin

    def run_between(self, way: str, begin_ns: int, end_ns: int) -> float:
        """Goes a second between two moments of CLOCK_MONOTONIC, which all processes share."""
        call = self._calls[way]
        call()
        while time.monotonic_ns() < begin_ns:
            continue
        number, begin, now = 0, time.monotonic_ns(), 0
        while now < end_ns:
            call()
            number += 1
            now = time.monotonic_ns()
        return number * 1e9 / (now - begin)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait_idle(self, way: str, number: int) -> None:
        """So many threads wait for keys that nobody binds ("waits"), or ask for them again and again ("asks")."""
        self._stopped = False
        call = self._wait if way == "waits" else self._ask
        self._waiters = [threading.Thread(target=call, args=(shmkv.CacheKey(self._prompt_id, place, IDLE_MODEL),), daemon=True)
                         for place in range(number)]
        for thread in self._waiters:
            thread.start()
        time.sleep(SETTLE_S)

    def _wait(self, key: shmkv.CacheKey) -> None:
        with contextlib.suppress(shmkv.LLMException):
            self._dist.kv_cache_manager.wait_for_key(key, WAIT_MS)

    def _ask(self, key: shmkv.CacheKey) -> None:
        while not self._stopped:
            self._dist.kv_cache_manager.contains(key)
            time.sleep(ASK_S)

    def stop_waiting(self) -> None:
        """End those threads: the waits by removing the link, which is made again."""
        self._stopped = True
        cluster.unlink(self._dist, self._prompt_id)
        for thread in self._waiters:
            thread.join(programs.DEADLINE_S)
        cluster.link(self._dist, self._prompt_id)

    @staticmethod
    def threads() -> int:
        """Threads of this process, those of libraries included."""
        return len(os.listdir("/proc/self/task"))

    def close(self) -> None:
        self.forget()
        self._dist.finalize()


def main() -> None:
    decoder = Decoder(int(sys.argv[1]), int(sys.argv[2]))
    try:
        programs.serve({
            "target": decoder.target, "target_blocks": decoder.target_blocks, "forget": decoder.forget, "check": decoder.check,
            "run": decoder.run, "run_between": decoder.run_between, "threads": decoder.threads, "wait_idle": decoder.wait_idle,
            "stop_waiting": decoder.stop_waiting,
        })
    finally:
        decoder.close()


if __name__ == "__main__":
    main()
