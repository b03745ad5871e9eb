"""The process that feeds inputs to the library: it ends by itself, or by the signal that the fuzzer is looking for.

Inputs come in episodes. Each begins with fresh tables and a generator seeded by (seed, episode), so that one input is made again by
running its episode up to it.
"""
from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from . import flips, guards
from .counts import EPISODE, Counts
from .later import LaterReader
from .live import LiveRun
from .mutate import Mutator
from .owners import OwnerRun
from .readers import Reader
from .world import World

OWNER_EVERY = 8                     # one episode of so many is the owner's


class Worker:
    """Runs inputs [first, first + count) and tells how far it is through a shared page."""

    def __init__(self, namespace: str, seed: int, progress: mmap.mmap) -> None:
        self.seed, self.progress = seed, progress
        self.namespace = namespace
        self.counts = Counts()
        self.world = World(namespace)

    def run(self, first: int, end: int) -> Counts:
        """From the beginning of the first input's episode."""
        began, began_cpu = time.monotonic(), time.process_time()
        for number in range(first // EPISODE * EPISODE, end, EPISODE):
            self.episode(number, min(number + EPISODE, end))
        self.counts.seconds = round(time.monotonic() - began, 3)
        self.counts.cpu_seconds = round(time.process_time() - began_cpu, 3)
        return self.counts

    def episode(self, first: int, end: int) -> None:
        rng = random.Random(self.seed << 40 | first)
        if first // EPISODE % OWNER_EVERY == OWNER_EVERY - 1:
            self.owner_episode(rng, first, end)
        else:
            self.reader_episode(rng, first, end)

    def note(self, number: int) -> None:
        """Before an input: the watching process reads this."""
        self.progress[0:8] = number.to_bytes(8, "little")

    def owner_episode(self, rng: random.Random, first: int, end: int) -> None:
        run = OwnerRun(rng)
        for number in range(first, end):
            self.note(number)
            self.counts.inputs += 1
            self.counts.owner_inputs += 1
            with flips.armed(rng, run.owner.region, run.owner.members):
                run.run()
        self.counts.refusals += run.refusals
        run.close()

    def reader_episode(self, rng: random.Random, first: int, end: int) -> None:
        self.world.begin()
        mutator, reader = Mutator(rng), Reader(self.world, rng)
        later = LaterReader(self.world, random.Random(f"later {self.seed} {first}"))
        for number in range(first, end):
            self.note(number)
            self.counts.inputs += 1
            if not rng.randrange(3):
                self.world.handle = self.world.new_handle()         # has mapped nothing: headers are looked at again
            mutator.world(self.world)
            self.counts.good_headers += self.world.has_good_headers()
            before = reader.copies + later.copies
            with flips.armed(rng, self.world.owner.region, self.world.owner.members):
                reader.run()
                later.run()
            self.counts.copies += reader.copies + later.copies > before
            self.world.put_back()
        self._add(reader, later)

    def live(self, program: Path, seconds: float) -> Counts:
        """Instead of inputs: calls while another process scribbles."""
        self.world.begin()
        run = LiveRun(self.world, self.seed, self.note)
        self.counts = run.counts
        began, began_cpu = time.monotonic(), time.process_time()
        run.run(program, seconds)
        self.counts.seconds = round(time.monotonic() - began, 3)
        self.counts.cpu_seconds = round(time.process_time() - began_cpu, 3)
        self._add(run.reader, run.later)
        run.close()
        return self.counts

    def _add(self, *readers: Reader) -> None:
        guarded, mapped = guards.guarded_mappings(self.world.prefix)
        self.counts.mapped += mapped - len(self.world.sources)      # the owner's own are where the kernel wanted them
        self.counts.guarded += guarded
        for reader in readers:
            self.counts.pushes += reader.pushes
            self.counts.waits += reader.waits
            for status, times in reader.answers.items():
                self.counts.pulls += times
                self.counts.answers[status] = self.counts.answers.get(status, 0) + times


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("--seed", "--first", "--end", "--progress"):
        options.add_argument(name, type=int, required=True)
    options.add_argument("--namespace", required=True)
    options.add_argument("--flips", action="store_true")
    options.add_argument("--live", type=float, default=0.0)
    options.add_argument("--program", type=Path)
    wanted = options.parse_args()
    if wanted.flips:
        flips.prepare()
    with mmap.mmap(wanted.progress, 4096) as progress:
        worker = Worker(wanted.namespace, wanted.seed, progress)
        try:
            counts = worker.live(wanted.program, wanted.live) if wanted.live else worker.run(wanted.first, wanted.end)
        finally:
            worker.world.close()
        counts.flips += flips.count()
    sys.stdout.write(json.dumps(asdict(counts)) + "\n")
    sys.stdout.flush()
    os._exit(0)                     # the interpreter's own end is not what is tested


if __name__ == "__main__":
    main()
