"""Every system call and allocation of the library fails, one position after the other, once and for ever.

A position's report is of one process of its own (program.py); what it has to hold is worked out there, as a list of faults.
"""
from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lives import SMALL, RunPositions
from peer import Peer, req
from reference import SUCCESS, geometry, pattern
from scenarios import SCENARIOS

from shmkv import _layout

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 20
# What a whole life has to be seen doing, or the library that counts does not count.
WHOLE_LIFE = "a whole life, again"
CALLS = {"open", "shm_open", "shm_unlink", "ftruncate", "posix_fallocate", "fchmod", "fcntl", "mmap", "madvise", "opendir", "read",
         "calloc", "malloc", "realloc"}
# What the scenarios of a name have to be seen calling: the way that they are about.
SEEN = {"pull by pread": {"pread"}, "push by pwrite": {"pwrite"}, "fallocate unsupported": {"posix_fallocate", "pwrite"},
        "what the kernel allows": {"fork", "waitpid", "prctl"}, WHOLE_LIFE: CALLS}
# Functions of the C library that extensions of shmkv call and that are not made to fail.
NEVER_FAIL = {"close", "munmap", "free", "clock_gettime", "geteuid", "getpid", "getppid", "_exit", "raise", "snprintf", "strtoull",
              "memcmp", "memcpy", "memmove", "memset", "strchr", "strcmp", "strlen", "strrchr", "sigfillset", "pthread_sigmask",
              "pthread_attr_init", "pthread_attr_destroy", "pthread_attr_setdetachstate", "pthread_attr_setstacksize",
              "pthread_mutex_init", "pthread_mutex_lock", "pthread_mutex_unlock"}


def _check(report: dict[str, Any]) -> None:
    where = f"position {report['position']} {report.get('how')}, {report['call']} failed, then {report['outcomes']}"
    assert report["faults"] == [], where
    assert report["seconds"] < DEADLINE_S / 2, where


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_a_status_each_time_and_nothing_is_left(run_positions: RunPositions, healthy: Peer, scenario: str) -> None:
    clean, *reports = run_positions(scenario)
    for report in (clean, *reports):
        _check(report)
    assert clean["seen"] > 0, "there is something that can fail"
    assert clean["extensions"] >= 20, "the addresses of the extensions are known"
    assert set(clean["tally"]) >= SEEN.get(scenario, set()), "and their calls are counted"
    hows = {report["how"]: report for report in reports}
    assert len(hows) == 4
    assert all(last["failed"] == 0 for last in hows.values()), "until a run passed clean"
    print(f"{scenario} | {clean['seen']} calls | {_shown(reports)} | {clean['tally']}")
    assert healthy.outcome("allocate", name="after", keys=[req(1, 77)]) == SUCCESS, "the peer does not mind"
    wanted = pattern(geometry(SMALL[1], list(SMALL[2]), 1), SMALL[3])
    np.testing.assert_array_equal(healthy.read("small"), wanted, err_msg="nor do its bytes")


def _symbols(kind: str, *files: Path) -> set[str]:
    """Names in the tables of shared objects, without their versions: of `kind` undefined, or defined."""
    done = subprocess.run(["nm", "--dynamic", f"--{kind}-only", *files], capture_output=True, text=True, timeout=60, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split()[1:]}


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_every_call_of_the_extensions_is_made_to_fail_or_cannot(failing_library: Path) -> None:
    """So a new call of one is not left out unseen. What begins with two underscores is the compiler's, but for __register_atfork,
    which fails in tests/cases/test_imports.py."""
    extensions = sorted(Path(_layout.__file__).parent.glob("_*.so"))
    assert len(extensions) >= 20
    called = {name for name in _symbols("undefined", *extensions) if not name.startswith(("Py", "_Py", "_ITM_", "__"))}
    assert called - _symbols("defined", failing_library) - NEVER_FAIL == set()


def _shown(reports: list[dict[str, Any]]) -> str:
    """For the table: how many positions, and how often which status was the last."""
    failed = [report for report in reports if report["failed"]]
    outcomes = Counter(report["outcomes"][-1].partition(": ")[2] for report in failed)
    return f"{len(failed)} positions | {dict(outcomes.most_common())} | {max(report['seconds'] for report in reports):.2f} s"
