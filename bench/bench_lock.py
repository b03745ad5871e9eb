"""The link's lock word without contention, against threading.Lock: what every pull pays, whatever its size."""
from __future__ import annotations

import os
import threading

from measure import Contender, interleave, repeat
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row
from session import Record, Run

from shmkv._futex import LockWord
from shmkv._mapping import Region

PAIRS = 20_000
WORD, WORD_IN_C, LOCK = "lock word", "lock word, loop in C", "threading.Lock"


def test_uncontended_pair(run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """Take and give back, in a loop in C; the same and threading.Lock in a Python loop."""
    fd = os.memfd_create("lock-word")
    os.ftruncate(fd, 4096)
    region = Region.map(fd, 4096)
    os.close(fd)
    word, lock = LockWord(region, region.base, 0), threading.Lock()

    def pair_of_word() -> None:
        word.acquire(1000)
        word.release()

    def pair_of_lock() -> None:
        lock.acquire()
        lock.release()

    others = [Contender(WORD, repeat(pair_of_word)), Contender(LOCK, repeat(pair_of_lock))]
    medians = interleave(benchmark, Contender(WORD_IN_C, word.pairs), others, rounds=run.rounds(30), number=PAIRS)
    row = Row("lock", "uncontended lock pair")
    row.notes = [f"in C, as a pull does it: x{medians.ratio(WORD_IN_C, LOCK):.2f} of a threading.Lock in a Python loop",
                 f"called from Python, which no pull does, x{medians.ratio(WORD, LOCK):.2f}"]
    record(row, medians, WORD_IN_C)
