"""`shmkv demo`: right figures, a wrong byte found, and nothing left behind whatever happens to it."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demos import WATCHDOG_S, left_behind, run

from shmkv.cli.demo_plan import Pattern, Plan

pytestmark = pytest.mark.timeout(180)

SMALL = ("demo", "--layers", "2", "--tokens", "16")


class Demo:
    """A demo that would run for long, to be disturbed."""

    def __init__(self) -> None:
        arguments = [sys.executable, "-m", "shmkv", *SMALL, "--requests", "1000000", "--decoders", "2"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True)

    def wait_until_it_works(self) -> None:
        """The prompt and both decoders have a cache: segments of three owners."""
        self._wait(lambda: len({name.split(".")[2] for name in left_behind(self.process.pid) if ".c." in name}) == 3)

    def wait_until_nothing_is_left(self) -> None:
        self._wait(lambda: not left_behind(self.process.pid) and not self.children())

    @staticmethod
    def _wait(condition: Any) -> None:
        deadline = time.monotonic() + WATCHDOG_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.02)

    def children(self, role: str = "") -> list[int]:
        """Pids of the processes that it started, as their command lines tell."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except (OSError, ValueError):
                continue
            if entry.name.isdigit() and "shmkv.cli.demo_process" in words and role in [*words, ""] \
                    and f"SHMKV_NAMESPACE=shmkv-demo-{self.process.pid}-" in environment:
                found.append(int(entry.name))
        return found

    def finish(self) -> tuple[int, str]:
        """Exit status and stderr."""
        _, complaints = self.process.communicate(timeout=WATCHDOG_S)
        return self.process.returncode, complaints


@pytest.fixture
def demo() -> Iterator[Demo]:
    running = Demo()
    try:
        running.wait_until_it_works()
        yield running
    finally:
        running.process.kill()
        running.process.communicate(timeout=WATCHDOG_S)
        running.wait_until_nothing_is_left()


def test_small_run_prints_the_closing_table() -> None:
    done = run(*SMALL, "--requests", "6")
    assert (done.returncode, done.stderr) == (0, "")
    for wanted in ("shmkv pull_cache", "numpy slices", "GB/s", "every byte of 6 requests is right"):
        assert wanted in done.stdout


@pytest.mark.parametrize(("tokens", "compares"), [(128, False), (256, True)])
def test_times_as_fast_is_only_said_from_one_mib_a_request(tokens: int, compares: bool) -> None:
    done = run("demo", "--layers", "1", "--tokens", str(tokens), "--requests", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert ("times as fast" in done.stdout) is compares
    assert "all 3 requests went through" in done.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_every_element_type(dtype: str) -> None:
    done = run(*SMALL, "--requests", "3", "--dtype", dtype, "--heads", "3", "--head-dim", "5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    item = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1}[dtype]
    assert (figures["bytes_per_request"], figures["bytes"]) == (4 * 16 * 15 * item, 3 * 4 * 16 * 15 * item)
    assert figures["wrong"] == {}


def test_figures_of_several_decoders_and_recycled_memory() -> None:
    done = run(*SMALL, "--requests", "20", "--decoders", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["decoders"]) == (20, 2)
    assert 1 <= figures["segments"] <= 3
    for way in ("pull", "numpy"):
        assert figures[way]["gb_per_second"] > 0
        assert figures[way]["pulls_per_second"] == pytest.approx(1000 / figures[way]["median_ms"])


def test_wrong_byte_ends_with_status_1_and_a_line() -> None:
    done = run(*SMALL, "--requests", "5", "--corrupt", "3")
    assert done.returncode == 1
    assert done.stderr == "request 3: 1 of the bytes pulled wrong in tensor 2, the first one at byte 16384\n"
    assert "is right" not in done.stdout


def test_demo_that_does_not_fit_says_so() -> None:
    done = run("demo", "--tokens", "1000000000")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "--tokens" in done.stderr


def test_interrupt_of_the_process_group_leaves_nothing(demo: Demo) -> None:
    os.killpg(demo.process.pid, signal.SIGINT)
    status, complaints = demo.finish()
    assert (status, complaints.count("\n")) == (130, 1)
    assert "interrupted" in complaints
    assert left_behind(demo.process.pid) == []
    assert demo.children() == []


@pytest.mark.parametrize("role", ["prompt", "decoder"])
def test_killed_child_is_named_and_leaves_nothing(demo: Demo, role: str) -> None:
    victim = demo.children(role)[0]
    os.kill(victim, signal.SIGKILL)
    status, complaints = demo.finish()
    assert (status, complaints.count("\n")) == (1, 1)
    assert role in complaints
    assert f"(pid {victim}) was ended by signal 9 (SIGKILL)" in complaints
    assert left_behind(demo.process.pid) == []


def test_children_end_by_themselves_when_the_demo_is_killed(demo: Demo) -> None:
    demo.process.kill()
    demo.wait_until_nothing_is_left()
    assert demo.children() == []


def test_pattern_differs_in_every_byte_from_the_requests_before() -> None:
    plan = Plan(1, 1, 3, 7, "int8", 4, 1)
    pattern = Pattern(plan)
    made = [[pattern.tensor(request, tensor).copy() for tensor in range(2)] for request in range(4)]
    assert made[0][0].size == plan.tensor_nbytes
    for request in range(4):
        assert not np.array_equal(made[request][0], made[request][1])
        for earlier in range(request):
            assert all((made[request][tensor] != made[earlier][tensor]).all() for tensor in range(2))
