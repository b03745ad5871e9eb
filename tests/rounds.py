"""How long tests go on, from SHMKV_ROUNDS: a factor, 1 if it is not set, or "full".

With "full" each field case that names a count of its own runs as often, and all others as with 1. Deadlines are longer then.
"""
from __future__ import annotations

import os
import re

ASKED = os.environ.get("SHMKV_ROUNDS", "1")
IS_FULL = ASKED == "full"
ROUNDS = 1.0 if IS_FULL else float(ASKED)
LONGER = 60.0 if IS_FULL else max(1.0, ROUNDS)          # how many times as long a deadline is

# What the cases say of themselves; what is counted stands in each test. 28: after the first 20. 33: of each of four readers. 66:
# for each delay. 67: besides its seconds. 81: seconds.
CASES = {15: 200, 20: 50, 28: 280, 33: 5000, 34: 50, 35: 500, 45: 30, 57: 200, 66: 100, 67: 10, 69: 1000, 70: 100_000, 72: 200,
         81: 30}
CASE_SECONDS = {67: 60.0}                               # for so long, whatever the count


def rounds_of(test: str, few: int) -> int:
    """`few` times the factor, at least 1; with "full" the count of the test's case, if it has one."""
    case = re.match(r"test_fr_(\d{3})_", test)
    if IS_FULL and case and int(case[1]) in CASES:
        return CASES[int(case[1])]
    return max(1, round(few * ROUNDS))


def seconds_of(case: int) -> float:
    """For how long a case says that it goes on, at least."""
    return CASE_SECONDS[case] if IS_FULL else 0.0
