"""Contenders take turns, round by round, in an order of chance; what is compared are medians of the same rounds.

A machine that slows down for a second slows all of them. Nothing here knows what a contender does.
"""
from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# What a contender with several threads may leave spinning must not run on under the next one's turn.
SETTLE_S = 0.002


@dataclass(frozen=True)
class Contender:
    """`run(n)` does the work n times and returns the nanoseconds that took; `check()` raises unless the right bytes arrived."""

    name: str
    run: Callable[[int], int]
    check: Callable[[], None] = lambda: None
    threads: int = 1


def repeat(call: Callable[[], object]) -> Callable[[int], int]:
    """The `run` of something that happens in this process."""

    def run(number: int) -> int:
        turns = range(number)
        begin = time.perf_counter_ns()
        for _ in turns:
            call()
        return time.perf_counter_ns() - begin

    return run


@dataclass(frozen=True)
class Medians:
    """Nanoseconds a contender needs for one go: the median over rounds, and all rounds."""

    samples: dict[str, list[float]]

    def __getitem__(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def ratio(self, name: str, other: str) -> float:
        """How many times as long as `other` the contender `name` takes."""
        return self[name] / self[other]

    def quartiles(self, name: str) -> list[float]:
        """First quartile, median, third quartile."""
        values = self.samples[name]
        return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


@contextmanager
def without_collector() -> Iterator[None]:
    """The garbage collector stands still meanwhile."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Turns:
    """One series of rounds. `ours` is timed by pytest-benchmark as well, so it is the target and all others go around it."""

    def __init__(self, ours: Contender, others: list[Contender], number: int) -> None:
        self._ours = ours
        self._others = others
        self._number = number
        self._chance = random.Random(len(others))
        self._later: list[Contender] = []
        self.samples: dict[str, list[float]] = {contender.name: [] for contender in (ours, *others)}

    def _warm(self, contender: Contender) -> None:
        """Work that fits the processor's cache is measured as it goes when it is done often: what the predecessor left in the
        cache is not counted. Big work does not remember."""
        if self._number > 1:
            contender.run(max(1, self._number // 5))

    def _go(self, contender: Contender) -> None:
        self.samples[contender.name].append(contender.run(self._number) / self._number)
        if contender.threads > 1:
            time.sleep(SETTLE_S)

    def before_ours(self) -> None:
        """The rest of the last round, then a part of the next one."""
        self.finish()
        order = self._chance.sample(self._others, len(self._others))
        cut = self._chance.randint(0, len(order))
        self._later = order[cut:]
        for contender in order[:cut]:
            self._warm(contender)
            self._go(contender)
        self._warm(self._ours)

    def our_turn(self) -> None:
        self._go(self._ours)

    def finish(self) -> None:
        """Whoever has not had a turn in this round."""
        for contender in self._later:
            self._warm(contender)
            self._go(contender)
        self._later = []


def interleave(benchmark: Any, ours: Contender, others: list[Contender], *, rounds: int, number: int = 1) -> Medians:
    """Check every contender's bytes, then let all take turns; a first round that warms everything up is not counted."""
    for contender in (ours, *others):
        contender.run(1)
        contender.check()
    turns = Turns(ours, others, number)
    with without_collector():
        benchmark.pedantic(turns.our_turn, setup=turns.before_ours, rounds=rounds, iterations=1, warmup_rounds=1)
        turns.finish()
    return Medians({name: values[1:] or values for name, values in turns.samples.items()})


def compare(contenders: list[Contender], *, rounds: int, number: int = 1) -> Medians:
    """The same without a target: to choose among contenders before the run that counts."""
    turns = Turns(contenders[0], contenders[1:], number)
    with without_collector():
        for _ in range(rounds + 1):
            turns.before_ours()
            turns.our_turn()
        turns.finish()
    return Medians({name: values[1:] for name, values in turns.samples.items()})
