"""A decoder process: pulls, or copies the same runs bare, when told. Started as ``decoder.py CLUSTER_ID PROMPT_CLUSTER_ID``."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import cluster
import programs
from contenders import Target

import shmkv


class Decoder:
    """One method a command."""

    def __init__(self, cluster_id: int, prompt_id: int) -> None:
        self._dist = cluster.join(shmkv.LLMRole.DECODER, cluster_id)
        cluster.link(self._dist, prompt_id)
        self._target: Target | None = None
        self._calls: dict[str, Callable[[], object]] = {}

    def target(self, source: dict[str, object], num_tensors: int, row_nbytes: int, at: int, kernel: str,
               streaming: bool) -> None:
        """Allocate a destination for `source` and prepare both ways to fill it."""
        self.forget()
        target = Target(self._dist.kv_cache_manager, cluster.Source(**source), num_tensors, row_nbytes, at)  # type: ignore[arg-type]
        self._target = target
        self._calls = {"pull": target.pull_call(), "bare": target.run_list(kernel, streaming).copy}

    def forget(self) -> None:
        if self._target is not None:
            self._calls.clear()
            self._target.close()
            self._target = None
            self._dist.kv_cache_manager.collect()

    def check(self) -> None:
        """RuntimeError unless the bytes arrived."""
        assert self._target is not None
        self._target.pull().check()

    def run(self, way: str, number: int) -> int:
        """Nanoseconds of `number` goes."""
        call = self._calls[way]
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
            "target": decoder.target, "forget": decoder.forget, "check": decoder.check, "run": decoder.run,
            "run_between": decoder.run_between, "threads": decoder.threads,
        })
    finally:
        decoder.close()


if __name__ == "__main__":
    main()
