"""Every system call and allocation of the library fails, one position after the other, once and for ever.

A position's report is of one process of its own (program.py); what it has to hold is worked out there, as a list of faults.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from conftest import RunPositions
from lives import SMALL
from peer import Peer, req
from reference import SUCCESS
from scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 20
# What a whole life has to be seen doing, or the library that counts does not count.
CALLS = {"open", "shm_open", "shm_unlink", "ftruncate", "posix_fallocate", "fchmod", "fcntl", "mmap", "madvise", "opendir", "read",
         "calloc", "malloc", "realloc"}


def _check(report: dict[str, Any]) -> None:
    where = f"position {report['position']}, {report['call']} failed, then {report['outcomes']}"
    assert report["faults"] == [], where
    assert report["seconds"] < DEADLINE_S / 2, where


@pytest.mark.parametrize("how", ["once", "for ever"])
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_a_status_each_time_and_nothing_is_left(run_positions: RunPositions, healthy: Peer, scenario: str, how: str) -> None:
    for variant in (0, 1):
        clean, *reports = run_positions(scenario, how, variant)
        _check(clean)
        assert clean["seen"] > 0, "there is something that can fail"
        assert clean["failed"] == 0
        for report in reports:
            _check(report)
        assert reports[-1]["failed"] == 0, "until a run passed clean"
        outcomes = Counter(report["outcomes"][-1] for report in reports[:-1] if report["outcomes"])
        print(f"{scenario} | {how} | {variant} | {len(reports) - 1} positions | {dict(outcomes)} | "
              f"{sum(report['swept'] for report in reports)} swept by the next init | "
              f"{max(report['seconds'] for report in reports):.2f} s at the most | {clean['tally']}")
    assert healthy.outcome("allocate", name="after", keys=[req(1, 77)]) == SUCCESS, "the peer does not mind"
    assert healthy.call("digest", name="small"), f"cache {SMALL[0]} is there"


def test_the_calls_are_counted(run_positions: RunPositions) -> None:
    clean = run_positions("a whole life, twice", "once", 0)[0]
    assert set(clean["tally"]) >= CALLS
    assert clean["extensions"] >= 20, "their addresses are known"
