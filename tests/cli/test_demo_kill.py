"""`shmkv demo --kill`: the prompt dies in the middle of a pull, and all that follows is as it should be."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from demos import WATCHDOG_S, left_behind, run

pytestmark = pytest.mark.timeout(180)


def test_it_tells_what_happens() -> None:
    done = run("demo", "--kill")
    assert (done.returncode, done.stderr) == (0, "")
    acts = ["was pulled in", "killed (SIGKILL) in the middle of the next pull", "the decoder got LLM_WAIT_PROCESS_TIMEOUT",
            "on_link_lost was called: cluster 1 died", "shmkv ls:", "shmkv gc: 2 files of the dead process are gone",
            "with the same cluster id was linked", "64 of 64 tensors are right", "nothing is left in /dev/shm"]
    places = [done.stdout.find(act) for act in acts]
    assert -1 not in places, done.stdout
    assert places == sorted(places)
    assert "dead" in done.stdout
    assert "broken" in done.stdout


def test_figures() -> None:
    done = run("demo", "--kill", "--json", "--dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert (seen["status"], seen["next_pull"], seen["faults"]) == ("LLM_WAIT_PROCESS_TIMEOUT", "LLM_SUCCESS", [])
    assert seen["removed_bytes"] >= seen["bytes"] > 0
    assert 0 <= seen["tensors_arrived"] < seen["next_tensors_right"] == seen["tensors"] == 64
    assert 1 <= seen["tries"] <= 10
    assert 0 < seen["status_after_ms"] < WATCHDOG_S / 2 * 1000
    assert seen["link_lost_after_ms"] > 0


def test_pull_that_is_too_short_to_be_hit_is_a_fault() -> None:
    done = run("demo", "--kill", "--layers", "1", "--tokens", "1", "--heads", "1")
    assert done.returncode == 1
    assert done.stderr == "no pull of 512 B was hit in 10 tries: more --tokens\n"


def test_demo_that_does_not_fit_says_so() -> None:
    done = run("demo", "--kill", "--tokens", "1000000000")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "--tokens" in done.stderr


def test_interrupt_leaves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-m", "shmkv", "demo", "--kill"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as process:
        deadline = time.monotonic() + WATCHDOG_S
        while not any(".c." in name for name in left_behind(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, complaints.count("\n")) == (130, 1)
    assert "interrupted" in complaints
    assert left_behind(process.pid) == []
