"""Programs of scripts/, started apart and watched: what they print, how they end."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from peer import WATCHDOG_S, Namespace, Peer

SCRIPTS = Path(__file__).with_name("scripts")
TESTS = SCRIPTS.parents[1]
T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """How a program ended; a negative code is the number of a signal."""

    code: int
    said: str
    complained: str


class Program:
    """One script with a pipe to its stdin and from its stdout."""

    def __init__(self, namespace: Namespace, script: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.namespace = namespace
        paths = os.pathsep.join(filter(None, [str(TESTS), str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(SCRIPTS / script), *arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=namespace.environment({"PYTHONPATH": paths, **(env or {})}))

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line that it prints; "" at its end. The test's own time limit is the watchdog."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.namespace.somebody_died = True

    def end(self, timeout_s: float = WATCHDOG_S) -> Ended:
        """Close stdin and wait; a program that does not end fails the test."""
        try:
            said, complained = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            said, complained = self.process.communicate(timeout=5)
            self.namespace.somebody_died = True
            pytest.fail(f"{self.process.args!r} does not end:\n{said}\n{complained}")
        return Ended(self.process.returncode, said, complained)


def until(look: Callable[[], T], timeout_s: float = WATCHDOG_S) -> T:
    """The first answer that is true; the test fails if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"still {found!r} after {timeout_s} s"
        time.sleep(0.002)
    return found


def children(pid: int) -> list[int]:
    """Child processes of a process, of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def maps(peer: Peer | int, what: str) -> list[str]:
    """Mapped files of a process whose path holds `what`."""
    pid = peer if isinstance(peer, int) else peer.pid
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if what in line]


def descriptors(peer: Peer | int) -> list[str]:
    """What the descriptors of a process point to."""
    pid = peer if isinstance(peer, int) else peer.pid
    folder = f"/proc/{pid}/fd"
    found = []
    for fd in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{fd}"))
        except FileNotFoundError:       # the one that lists them
            continue
    return found
