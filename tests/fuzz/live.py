"""A peer that rewrites fields while they are used: a second process (`tests/c/scribbler.c`) with the files mapped writable.

This process pulls, links, looks and, as an owner, binds and frees, without a change of its own to any table.
"""
from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shmkv import segment

from .counts import Counts
from .later import LaterReader
from .mutate import DIRECTORY_PLACES, LOCK, MEMBER_PLACES, MEMBERS_HEADER, SEGMENT_HEADER, Place
from .owners import OwnerRun
from .readers import Reader
from .world import World

FEW = {"index": 256, "coverage": 64, "unlinked": 4}
ROUND = 64                          # calls between two looks at the clock
START_S = 20.0


def _lines(fd: int, places: Sequence[Place], few: int = 4) -> Iterator[str]:
    for place in places:
        for number in range(min(place.records, few)):
            yield f"{fd} {place.of(number)} {place.width}\n"


def _directory_lines(fd: int) -> Iterator[str]:
    for table, places in DIRECTORY_PLACES.items():
        yield from _lines(fd, places, FEW.get(table, 4))
    yield from _lines(fd, [LOCK], 2)


class Scribbler:
    """The other process. Use as a context manager: it writes from the beginning to the end of the `with`."""

    def __init__(self, program: Path, seed: int, fds: Sequence[int], lines: str) -> None:
        self.program, self.seed, self.fds, self.lines = program, seed, fds, lines
        self.rounds = 0

    def __enter__(self) -> Scribbler:
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self.process = subprocess.Popen([str(self.program), str(self.seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, pass_fds=self.fds, env=env)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(self.lines + "go\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().startswith("ready")
        return self

    def __exit__(self, *_: object) -> None:
        said, _error = self.process.communicate(timeout=START_S)
        assert self.process.returncode == 0
        self.rounds = int(said.split()[1])


class LiveReader(Reader):
    """A reader that seldom ends links itself: an ended one is of no use until the other process puts its state back."""

    def others(self) -> list[Callable[[], None]]:
        ending = [self.claim, self.acceptor]
        return super().others() if not self.rng.randrange(64) else [path for path in super().others() if path not in ending]


class LiveRun:
    """Calls under a scribbler for some seconds."""

    def __init__(self, world: World, seed: int, note: Callable[[int], None]) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.reader, self.owner = LiveReader(world, self.rng), OwnerRun(self.rng)
        self.later = LaterReader(world, random.Random(f"later {seed}"), changes=False)
        self.counts, self.seed, self.note = Counts(), seed, note

    def run(self, program: Path, seconds: float) -> Counts:
        """Under the scribbler: pulls and all else of a reader, and every fourth time the calls of an owner."""
        fds = [self.world.owner.fd, self.world.owner.members_fd, self.owner.owner.fd]
        segments = [os.open(f"{segment.SHM_DIR}/{source.path}", os.O_RDWR | os.O_CLOEXEC) for source in self.world.sources]
        lines = "".join([*_directory_lines(fds[0]), *_lines(fds[1], [*MEMBERS_HEADER, *MEMBER_PLACES]), *_directory_lines(fds[2]),
                         *(line for fd in segments for line in _lines(fd, SEGMENT_HEADER))])
        until = time.monotonic() + seconds
        with Scribbler(program, self.seed, fds + segments, lines) as scribbler:
            while time.monotonic() < until:
                self.some_calls()
        for fd in segments:
            os.close(fd)
        self.counts.flips = scribbler.rounds
        return self.counts

    def close(self) -> None:
        self.counts.refusals += self.owner.refusals
        self.owner.close()

    def some_calls(self) -> None:
        for number in range(ROUND):
            self.note(self.counts.inputs)
            self.counts.inputs += 1
            if number % 4 == 0:
                self.owner.call_some()
                self.counts.owner_inputs += 1
                continue
            self.counts.good_headers += self.world.has_good_headers()
            before = self.reader.copies + self.later.copies
            self.look_again()
            self.reader.run()
            self.later.run()
            self.counts.copies += self.reader.copies + self.later.copies > before

    def look_again(self) -> None:
        """Now and then a reader that has mapped nothing; a record that names no member is refused."""
        if not self.rng.randrange(3):
            try:
                self.world.handle = self.world.new_handle()
            except ValueError:
                self.counts.refusals += 1


assert set(FEW) <= set(DIRECTORY_PLACES)
