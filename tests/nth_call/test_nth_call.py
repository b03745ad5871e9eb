"""Every system call and allocation of the library fails, one position after the other, once and for ever.

A position's report is of one process of its own (program.py); what it has to hold is worked out there, as a list of faults.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from lives import SMALL, RunPositions
from peer import Peer, req
from reference import SUCCESS, geometry, pattern
from scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 20
# What a whole life has to be seen doing, or the library that counts does not count.
WHOLE_LIFE = "a whole life, again"
CALLS = {"open", "shm_open", "shm_unlink", "ftruncate", "posix_fallocate", "fchmod", "fcntl", "mmap", "madvise", "opendir", "read",
         "calloc", "malloc", "realloc"}


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
    assert scenario != WHOLE_LIFE or set(clean["tally"]) >= CALLS, "and their calls are counted"
    hows = {report["how"]: report for report in reports}
    assert len(hows) == 4
    assert all(last["failed"] == 0 for last in hows.values()), "until a run passed clean"
    print(f"{scenario} | {clean['seen']} calls | {_shown(reports)} | {clean['tally']}")
    assert healthy.outcome("allocate", name="after", keys=[req(1, 77)]) == SUCCESS, "the peer does not mind"
    wanted = pattern(geometry(SMALL[1], list(SMALL[2]), 1), SMALL[3])
    np.testing.assert_array_equal(healthy.read("small"), wanted, err_msg="nor do its bytes")


def _shown(reports: list[dict[str, Any]]) -> str:
    """For the table: how many positions, and how often which status was the last."""
    failed = [report for report in reports if report["failed"]]
    outcomes = Counter(report["outcomes"][-1].partition(": ")[2] for report in failed)
    return f"{len(failed)} positions | {dict(outcomes.most_common())} | {max(report['seconds'] for report in reports):.2f} s"
