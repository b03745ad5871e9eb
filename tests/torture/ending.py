"""The end of a run: some decoders are killed, the others end, then the prompts free everything, then `shmkv gc`; what is left."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from torture.board import Field, Wanted
from torture.referee import SHM, Referee

END_S = 30.0


@dataclass
class Left:
    """After all processes ended; all zero if nothing leaked. The first four: of those that ended by themselves, together."""

    ended: int = 0
    descriptors: int = 0
    mappings: int = 0
    mapped_nbytes: int = 0
    caches: int = 0
    files_before_gc: int = 0
    files: int = 0
    nbytes: int = 0


def end(referee: Referee) -> Left:
    """Also after a fault, so that nothing is left behind."""
    plan = referee.plan
    while referee.dying or referee.waiting:
        referee.bury(time.monotonic_ns())
        for _, number in referee.waiting:
            referee.start(number, apart=False)
        referee.waiting.clear()
    decoders = [number for number in referee.living if number >= plan.prompts]
    wait_until_ready(referee)
    for number in decoders[::2]:
        kill(referee, number)
    finish(referee, decoders[1::2])
    prompts = list(referee.living)
    finish(referee, prompts[:-1])
    for number in list(referee.living):         # the last one leaves something for gc
        kill(referee, number)
    left = Left()
    for number in range(plan.workers):
        row = referee.board.fields[number]
        if row[Field.ENDED]:
            left.ended += 1
            left.descriptors += int(row[Field.FDS])
            left.mappings += int(row[Field.MAPS])
            left.mapped_nbytes += int(row[Field.MAP_NBYTES])
            left.caches += int(row[Field.CACHES])
    collect(plan.namespace, left)
    referee.starter.close()
    return left


def give_up(referee: Referee) -> None:
    """An interrupted run: nobody and nothing of it is left."""
    lives = [*referee.living.values(), *(life for life, _ in referee.dying.values())]
    for life in lives:
        referee.send(life.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        referee.starter.close()                 # who was forked there dies with it
    for name in files(referee.plan.namespace):
        with contextlib.suppress(FileNotFoundError):
            (SHM / name).unlink()


def wait_until_ready(referee: Referee) -> None:
    deadline = time.monotonic() + END_S
    rows = referee.board.fields[list(referee.living)]
    while time.monotonic() < deadline and not referee.seen.faults and (rows[:, Field.READY] != rows[:, Field.LIFE]).any():
        time.sleep(0.01)
        rows = referee.board.fields[list(referee.living)]
        referee.look()


def kill(referee: Referee, number: int) -> None:
    referee.kill_one(number)
    referee.seen.kills -= 1                     # one that nothing has to survive
    while referee.dying:
        referee.bury(time.monotonic_ns())
        time.sleep(0.001)
    referee.waiting.clear()


def finish(referee: Referee, numbers: list[int]) -> None:
    """Tell them to end, and wait for it; whoever does not end hangs, and is killed."""
    for number in numbers:
        referee.board.fields[number, Field.WANTED] = Wanted.END
    deadline = time.monotonic() + END_S
    for number in numbers:
        life = referee.living.pop(number, None)
        if life is None:
            continue
        while not life.is_dead() and time.monotonic() < deadline:
            time.sleep(0.002)
        if not life.is_dead():
            referee.seen.hangs += 1
            referee.fault(f"worker {number}, process {life.pid}, does not end")
            life.signal(signal.SIGKILL)
            while not life.is_dead():
                time.sleep(0.002)
        status = life.reap()
        if status and not referee.seen.faults:
            referee.fault(f"worker {number}, process {life.pid}, ended with status {status:#x}")


def collect(namespace: str, left: Left) -> None:
    """`shmkv gc`, as a person calls it, and what is there afterwards."""
    left.files_before_gc = len(files(namespace))
    subprocess.run([sys.executable, "-m", "shmkv", "gc"], env={**os.environ, "SHMKV_NAMESPACE": namespace}, check=True,
                   stdout=subprocess.DEVNULL, timeout=60)
    for name in files(namespace):
        left.files += 1
        with contextlib.suppress(FileNotFoundError):
            left.nbytes += (SHM / name).stat().st_blocks * 512
            (SHM / name).unlink()


def files(namespace: str) -> list[str]:
    return [name for name in os.listdir(SHM) if name.startswith(f"{namespace}.")]
