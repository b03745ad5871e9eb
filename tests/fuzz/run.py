"""Starts a worker under a sanitizer and watches it: an input that takes too long, a signal and a report are failures."""
from __future__ import annotations

import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import builds

from . import flips
from .counts import EPISODE

INPUT_DEADLINE_S = 20.0             # an input takes less than a millisecond; a deadline of the library can be in it
POLL_S = 0.05
SHM = Path("/dev/shm")
running: set[subprocess.Popen[bytes]] = set()       # workers that have not ended


@dataclass
class Outcome:
    """What became of a run: counts if it ended well, else a sentence that says on which input it did not."""

    counts: dict[str, Any] | None
    fault: str = ""


def namespace() -> str:
    """A name prefix that nobody else has."""
    return f"fuzz-{secrets.token_hex(4)}"


def clean(prefix: str) -> list[str]:
    """Remove what a worker left: the names."""
    left = sorted(path.name for path in SHM.glob(f"{prefix}*"))
    for name in left:
        (SHM / name).unlink(missing_ok=True)
    return left


def stop_all() -> bool:
    """An interrupted run: whoever watches a worker sees that it ended, and removes what it left. Was there any?"""
    found = list(running)
    for worker in found:
        worker.kill()
    return bool(found)


def folder_of(flipping: bool) -> Path:
    """The build to run with."""
    return flips.build() if flipping else builds.build("address")


def environment(folder: Path) -> dict[str, str]:
    """A worker's variables: this process's, without what points to another build."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHMKV_") and name != "PYTHONPATH"}
    return {**kept, **builds.environment("address", folder)}


def run(seed: int, first: int, end: int, *, flipping: bool = False, folder: Path | None = None) -> Outcome:
    """Inputs [first, end) of a seed, from the beginning of the first one's episode."""
    again = f"input {{}} of seed {seed}: again by python -m fuzz --seed {seed} --only {{}}" + (" --flips" if flipping else "")
    return _worker(folder or folder_of(flipping), again, f"--seed={seed}", f"--first={first}", f"--end={end}",
                   *(["--flips"] if flipping else []))


def run_shared(seed: int, end: int, jobs: int, *, flipping: bool = False) -> Outcome:
    """Inputs [0, end) on several processors, each with whole episodes of its own; the counts added up."""
    folder = folder_of(flipping)
    cuts = [end * job // jobs // EPISODE * EPISODE for job in range(jobs)] + [end]
    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(run, seed, first, last, flipping=flipping, folder=folder)
                 for first, last in pairwise(cuts)]
    outcomes = [part.result() for part in parts]
    faults = [outcome.fault for outcome in outcomes if outcome.fault]
    if faults:
        return Outcome(None, "\n".join(faults))
    return Outcome(_sum([outcome.counts or {} for outcome in outcomes]))


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of runs that went on at the same time."""
    total = {name: sum(part[name] for part in parts) for name in parts[0] if name != "answers"}
    total["seconds"] = max(part["seconds"] for part in parts)
    answers: Counter[str] = Counter()
    for part in parts:
        answers.update(part["answers"])
    return {**total, "answers": dict(answers)}


def live(seed: int, seconds: float) -> Outcome:
    """Calls for some seconds while another process rewrites the tables."""
    return _worker(folder_of(False), f"call {{}} of a live run of seed {seed}", f"--seed={seed}", "--first=0", "--end=0",
                   f"--live={seconds}", f"--program={scribbler()}")


def scribbler() -> Path:
    """The program of the other process, compiled."""
    program = builds.BUILDS / "scribbler"
    source = builds.ROOT / "tests" / "c" / "scribbler.c"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(program)], check=True,
                       timeout=INPUT_DEADLINE_S * 3)
    return program


def _worker(folder: Path, what: str, *options: str) -> Outcome:
    """Start one and see how it ends; `what` names the input that it was at."""
    prefix = namespace()
    fd = os.memfd_create("fuzz-progress")
    os.ftruncate(fd, 4096)
    arguments = [sys.executable, "-m", "fuzz.worker", f"--progress={fd}", f"--namespace={prefix}", *options]
    with mmap.mmap(fd, 4096) as progress, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        worker = subprocess.Popen(arguments, cwd=folder, env=environment(folder), stdout=out, stderr=err, pass_fds=[fd])
        running.add(worker)
        try:
            stuck = _watch(worker, progress)
        finally:
            worker.kill()
            worker.wait()
            running.discard(worker)
            os.close(fd)
            left = clean(prefix)
        number = int.from_bytes(progress[0:8], "little")
        out.seek(0), err.seek(0)
        said, complaint = out.read(), err.read()
    if stuck or worker.returncode != 0 or complaint:
        how = f"took over {INPUT_DEADLINE_S} s" if stuck else f"ended with {worker.returncode}"
        return Outcome(None, f"{what.format(number, number)}: {how}\n{complaint[:6000]}")
    return Outcome(json.loads(said), f"left behind: {left}" if left else "")


def _watch(worker: subprocess.Popen[bytes], progress: mmap.mmap) -> bool:
    """Wait for the worker's end; True if an input took too long. It is stopped by SIGABRT then, which tells where it was."""
    seen, since = b"", time.monotonic()
    while worker.poll() is None:
        now = progress[0:8]
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > INPUT_DEADLINE_S:
            worker.send_signal(signal.SIGABRT)
            worker.wait(INPUT_DEADLINE_S)
            return True
        time.sleep(POLL_S)
    return False

