"""Lock, hazard, coverage and crew as threads on one mapping, under ThreadSanitizer, and under AddressSanitizer and
UndefinedBehaviorSanitizer: 0 reports. Scaled by SHMKV_ROUNDS.

What the threads do stands in `racing.py`. Each of the orders that matter is taken away once, to see that the sanitizer looks.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import builds
import pytest
from builds import Edit
from fuzz import run
from rounds import LONGER

HERE = Path(__file__).parent
DEADLINE_S = 300 * max(1, round(LONGER))
ROUNDS = {"lock": 100_000, "pulls": 300, "coverage": 30, "crew": 20}
REPORT = "ThreadSanitizer: data race"
WEAKENED = {
    "word-released-without-order": ("lock", [Edit(
        "_futex.pyx", "            if swap32_seq(word, seen, WORD_FREE):\n                return 0\n        elif",
        "            store32_relaxed(word, WORD_FREE)\n            return 0\n        elif")]),
    "hazard-cleared-without-order": ("pulls", [Edit(
        "_lookup.pyx", "    store64_release(&side.hazard, 0)", "    store64_relaxed(&side.hazard, 0)"), Edit(
        "_lookup.pyx", "    store64_release,\n", "    store64_relaxed,\n")]),
    "hazard-cleared-early": ("pulls", [Edit(
        "_core.pyx", "        if status == 0:\n            status = make_plan(",
        "        unpin(link.mine)\n        if status == 0:\n            status = make_plan(")]),
    "crew-left-without-order": ("crew", [Edit(
        "_crew.pyx", "        if add32_seq(&crew.inside, <uint32_t>-1)", "        if add32_relaxed(&crew.inside, <uint32_t>-1)"),
        Edit("_crew.pyx", "    add32_seq,\n", "    add32_relaxed,\n    add32_seq,\n")]),
}

pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]


def race(folder: Path, scenario: str, rounds: int, kind: str = "thread") -> subprocess.CompletedProcess[str]:
    """Run a scenario with a build of a kind; nothing is left in /dev/shm."""
    prefix = run.namespace()
    variables = builds.environment(kind, folder)
    if kind == "thread":
        variables["TSAN_OPTIONS"] += f":suppressions={HERE / 'tsan.supp'}"
    try:
        return subprocess.run([sys.executable, str(HERE / "racing.py"), scenario, str(rounds), prefix], cwd=folder, text=True,
                              env={**os.environ, **variables}, capture_output=True, timeout=DEADLINE_S)
    finally:
        run.clean(prefix)


@pytest.mark.parametrize("kind", ["thread", "address"])
@pytest.mark.parametrize("scenario", ROUNDS)
def test_threads_on_one_mapping_do_not_race(scenario: str, kind: str, rounds: Callable[[int], int]) -> None:
    done = race(builds.build(kind), scenario, rounds(ROUNDS[scenario]), kind)
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout.split()[1]) >= rounds(ROUNDS[scenario]), "and the scenario did something"


@pytest.mark.parametrize("name", WEAKENED)
def test_an_order_that_is_taken_away_is_reported(name: str) -> None:
    scenario, edits = WEAKENED[name]
    done = race(builds.build_edited("thread", name, edits), scenario, 10 * ROUNDS[scenario])
    assert REPORT in done.stderr
    assert done.returncode != 0


def test_suppressions_have_a_reason_each_and_none_is_of_this_library() -> None:
    lines = (HERE / "tsan.supp").read_text().splitlines()
    assert lines[0].startswith("#")
    assert [line for line in lines if line and not line.startswith("#")] == ["race:_dl_deallocate_tls"]
