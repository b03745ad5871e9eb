"""From how many bytes on stores past the processor's cache and a second thread pay: bare copies around both thresholds.

Bytes come from memory: each go takes another piece of what is bigger than the processor's cache. Only where "in cache" is said, it
is the same piece again.
"""
from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import yardstick
from cluster import Source
from contenders import BareCopy, ParkedThread, same_bytes
from measure import Contender, Medians, interleave, repeat
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, time_text
from session import Record, Run

import shmkv
from shmkv._copy import RunList

SIZES = [mib << 20 for mib in (1, 2, 4, 8, 16)]
TURN_NBYTES = 32 << 20              # two goes of the biggest: a turn of several begins with one that is not counted
WHOLE_NBYTES = 128 << 20            # on each side
ROUNDS = 20
LOOK_NBYTES = 16 << 10
ORDINARY, STREAMING, IN_CACHE, READ = "ordinary", "streaming", ", in cache", ", then read"
TWO, WOKEN = "on 2 threads", "2 threads and no bytes"


class Pieces:
    """Source and destination, cut into pieces of one size. Piece 0 is the one that stays in the cache; of the others all ways take
    the next one, which is the one that was copied longest ago."""

    def __init__(self, source: Source, base: int, nbytes: int) -> None:
        offset = source.offsets[0]
        self.nbytes = nbytes
        self.choice = yardstick.library_choice(nbytes)
        self._whole = BareCopy(source, base, [(offset + at, at, nbytes) for at in range(0, WHOLE_NBYTES, nbytes)])
        self._scratch = np.zeros(LOOK_NBYTES, np.uint8)
        self._order = itertools.cycle(range(1, WHOLE_NBYTES // nbytes))
        self._last = 0

    def _copies(self, streaming: bool, begin: int, end: int) -> list[RunList]:
        """Bytes `begin` to `end` of each piece, by our loop."""
        attached = self._whole.attached
        return [RunList([(src + begin, dst + begin, end - begin)], attached.base, self._whole.base, kernel=self.choice.kernel,
                        streaming=streaming) for src, dst, _ in self._whole.runs]

    def _advance(self) -> int:
        self._last = next(self._order)
        return self._last

    def _check(self, name: str) -> Callable[[], None]:
        """Looks at the piece that was copied last."""
        return lambda: same_bytes(name, [self._whole.src_rows[self._last]], [self._whole.rows[self._last]])()

    def from_memory(self, name: str, streaming: bool) -> Contender:
        copies = self._copies(streaming, 0, self.nbytes)
        return Contender(name, repeat(lambda: copies[self._advance()].copy()), self._check(name))

    def in_cache(self, name: str, streaming: bool) -> Contender:
        """The same piece again and again, after a go that is not counted."""
        copy = self._copies(streaming, 0, self.nbytes)[0].copy

        def run(number: int) -> int:
            self._last = 0
            copy()
            return repeat(copy)(number)

        return Contender(name, run, self._check(name))

    def then_read(self, name: str, streaming: bool) -> Contender:
        """The copy, and a look at all of it, as a decoder takes next: into a few bytes that stay in the cache."""
        copies, to = self._copies(streaming, 0, self.nbytes), self._scratch.ctypes.data
        looks = [RunList([(dst + at, 0, LOOK_NBYTES) for at in range(0, self.nbytes, LOOK_NBYTES)], self._whole.base, to,
                         kernel=self.choice.kernel) for _, dst, _ in self._whole.runs]

        def once() -> None:
            piece = self._advance()
            copies[piece].copy()
            looks[piece].copy()

        return Contender(name, repeat(once), self._check(name))

    def on_two(self, name: str, stack: contextlib.ExitStack) -> Contender:
        """By our choice, half of each piece on a thread that is parked in between."""
        first = self._copies(self.choice.streaming, 0, self.nbytes // 2)
        second = self._copies(self.choice.streaming, self.nbytes // 2, self.nbytes)
        pair = stack.enter_context(ParkedThread(lambda: second[self._last].copy()))

        def once() -> None:
            piece = self._advance()
            pair.go()
            first[piece].copy()
            pair.wait()

        return Contender(name, repeat(once), self._check(name), threads=2)


def woken(name: str, stack: contextlib.ExitStack) -> Contender:
    """The same thread woken and waited for, with nothing to copy."""
    nothing = RunList([], 0, 0)
    pair = stack.enter_context(ParkedThread(nothing.copy))

    def once() -> None:
        pair.go()
        nothing.copy()
        pair.wait()

    return Contender(name, repeat(once), threads=2)


@pytest.fixture(scope="module")
def source(prompt: Process) -> Iterator[Source]:
    made = Source(**prompt.call("publish", num_tensors=1, row_nbytes=WHOLE_NBYTES))
    yield made
    prompt.call("drop", cache_id=made.cache_id)


@pytest.fixture(scope="module")
def base(manager: shmkv.KvCacheManager) -> Iterator[int]:
    """Where the destination begins."""
    cache = manager.allocate_cache(shmkv.CacheDesc(1, [1, WHOLE_NBYTES // 2], shmkv.DataType.DT_FLOAT16))
    yield cache.tensors[0].data_ptr
    manager.deallocate_cache(cache)


def notes(pieces: Pieces, medians: Medians, ours: str) -> list[str]:
    """How the two decisions would have come out, each way against the other."""
    memory, cache, read = (medians.ratio(STREAMING + where, ORDINARY + where) for where in ("", IN_CACHE, READ))
    return [f"{pieces.choice}", f"streaming x{memory:.2f} of ordinary, x{cache:.2f} in cache, x{read:.2f} with a read of the copy",
            f"2 threads x{medians.ratio(TWO, ours):.2f} of one; waking one and waiting for it {time_text(medians[WOKEN])}"]


@pytest.mark.parametrize("nbytes", SIZES, ids=lambda nbytes: f"{nbytes >> 20}-MiB")
def test_threshold(source: Source, base: int, nbytes: int, run: Run, record: Record, benchmark: BenchmarkFixture) -> None:
    """Ours is what a pull of so many bytes uses on one thread."""
    pieces = Pieces(source, base, nbytes)
    ours, other = (STREAMING, ORDINARY) if pieces.choice.streaming else (ORDINARY, STREAMING)
    with contextlib.ExitStack() as stack:
        others = [pieces.from_memory(other, other == STREAMING), pieces.on_two(TWO, stack), woken(WOKEN, stack)]
        for name in (ORDINARY, STREAMING):
            others += [pieces.in_cache(name + IN_CACHE, name == STREAMING), pieces.then_read(name + READ, name == STREAMING)]
        medians = interleave(benchmark, pieces.from_memory(ours, ours == STREAMING), others, rounds=run.rounds(ROUNDS),
                             number=TURN_NBYTES // nbytes)
    row = Row("thresholds", f"copy of {nbytes >> 20} MiB", 0, nbytes, notes=notes(pieces, medians, ours))
    record(row, medians, ours)
