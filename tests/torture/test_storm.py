"""A short storm, the rules that judge its pulls, and that a seeded bug ends one."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rounds import ROUNDS

from torture import pattern, seeded
from torture.arguments import Plan
from torture.board import Board, Field
from torture.clock import Clock, Moment, lasted
from torture.pattern import Stamp
from torture.report import quantiles
from torture.shelves import BIG, ROWS, Shape

TESTS = Path(__file__).resolve().parent.parent
KILLS = max(500, int(500 * ROUNDS))
DEADLINE_S = 600 * max(1.0, ROUNDS)


def storm(log: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A run in an interpreter of its own, and its report."""
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-m", "torture", "--json", str(log), *arguments], env=env, capture_output=True,
                          text=True, timeout=DEADLINE_S)
    return done, json.loads(log.read_text())


@pytest.mark.timeout(DEADLINE_S + 60)
def test_storm_of_kills_finds_no_fault(tmp_path: Path) -> None:
    done, found = storm(tmp_path / "log", "--minutes", "0", "--kills", str(KILLS), "--kills-per-s", "60", "--phase-s", "4")
    assert found["faults"] == [], done.stdout
    assert done.returncode == 0, done.stderr
    assert found["kills"] >= KILLS
    assert found["holding"] > 0
    assert found["pulls"] > KILLS
    assert found["looks"] > 0
    assert found["pushes"] > KILLS // 10
    assert found["pushed_by_key"] > 0
    assert found["waited"] > found["layered"] > 0
    assert found["recoveries_ms"]["again"]["count"] > 0
    status, running = found["recoveries_ms"]["status"], found["recoveries_ms"]["status_running"]
    assert 0 < running["count"] == status["count"]
    assert running["max"] <= status["max"], "a part of it"
    assert found["left"]["ended"] > 0
    assert found["left"]["files"] == found["left"]["caches"] == found["left"]["mappings"] == found["left"]["descriptors"] == 0


@pytest.mark.timeout(1300)
def test_storm_finds_memory_used_again_during_a_copy(tmp_path: Path) -> None:
    """The seeded bug that is found soonest; the others need up to minutes."""
    seeded.build_with("hazard")
    done, found = storm(tmp_path / "log", "--seeded", "hazard")
    assert done.returncode == 1, done.stdout
    assert any("has written" in fault for fault in found["faults"]), done.stdout


@pytest.mark.parametrize("shape", [ROWS, BIG], ids=["one block", "many blocks"])
def test_bytes_tell_what_they_belong_to(shape: Shape) -> None:
    row = np.empty((shape.tensors, shape.words), np.uint64)
    stamp = Stamp(7, 513, 3, pattern.generation(9, 4))
    pattern.fill(row, pattern.pack(stamp))
    word = pattern.read(row)
    assert word is not None
    assert pattern.unpack(word) == stamp


@pytest.mark.parametrize("shape", [ROWS, BIG], ids=["one block", "many blocks"])
def test_one_foreign_word_is_seen(shape: Shape) -> None:
    row = np.empty((shape.tensors, shape.words), np.uint64)
    pattern.fill(row, pattern.pack(Stamp(1, 2, 3, 5)))
    row[-1, -1] -= np.uint64(1)
    assert pattern.read(row) is None


@pytest.mark.parametrize("shape", [ROWS, BIG], ids=["one block", "many blocks"])
def test_words_of_two_pushes_are_told_from_a_third(shape: Shape) -> None:
    row, other = np.empty((2, shape.tensors, shape.words), np.uint64)
    stamps = [pattern.pack(Stamp(cluster, 2, 3, 5)) for cluster in (1, 2, 3)]
    pattern.fill(row, stamps[0])
    pattern.fill(other, stamps[1])
    row[-1, 3:] = other[-1, 3:]
    assert pattern.has_only(row, (stamps[0], stamps[1]))
    assert not pattern.has_only(row, (stamps[0], stamps[2]))
    row[0, 0] = other[0, 1]
    assert not pattern.has_only(row, (stamps[0], stamps[1])), "in another's place"


def test_rows_in_each_other_s_places_are_seen() -> None:
    row = np.empty((4, 2 * pattern.BLOCK), np.uint64)
    pattern.fill(row, pattern.pack(Stamp(1, 2, 3, 5)))
    blocks = row.reshape(4, 2, pattern.BLOCK)
    blocks[0, [0, 1]] = blocks[0, [1, 0]].copy()
    assert pattern.read(row) is None


def test_stops_and_waits_for_a_processor_are_no_part_of_what_a_worker_needed() -> None:
    killed, began, ended = Moment(100, 5), Moment(90, 2), Moment(180, 35)
    assert lasted(killed, began, ended) == (80, 50)
    assert lasted(began, killed, ended) == (80, 50), "from the later one of the two"


def test_a_stop_counts_from_its_beginning_to_its_end() -> None:
    board = Board.make(Plan("clock", 1))
    stopped = board.fields[3]
    with Clock(board, 3) as clock:
        before = clock.now()
        stopped[Field.STOPPED_NS] -= before.ns
        during = clock.now()
        assert during.stalled_ns - before.stalled_ns >= during.ns - before.ns
        stopped[Field.STOPPED_NS] += before.ns + 70
        assert clock.now().stalled_ns >= before.stalled_ns + 70
    os.close(board.fd)


def test_the_kernel_counts_waits_for_a_processor() -> None:
    """Two that want the same one."""
    board, cores = Board.make(Plan("clock", 1)), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with Clock(board, 3) as clock:
            before, until = clock.now(), time.monotonic() + 20
            while clock.now().stalled_ns - before.stalled_ns < 10**7 and time.monotonic() < until:
                pass
            after = clock.now()
        assert 10**7 <= after.stalled_ns - before.stalled_ns <= after.ns - before.ns
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, cores)
        os.close(board.fd)


def test_late_ones_are_counted() -> None:
    assert quantiles([99_999_999, 100_000_000, 100_000_001, 1])["late"] == 1
