"""Which tests a host may be unable to run: what stands in skips.txt, and what is wrong with a skip that does not."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

LIST = Path(__file__).with_name("skips.txt")
PROBE_DEADLINE_S = 60
TO_DO = "let it run here, or add a line to tests/skips.txt: the test, two spaces, #, a command that fails where it cannot run"


@dataclass(frozen=True)
class Entry:
    """`place`: a file, or a test without its parameters, with "*" for any text; `probe`: a command that fails where it cannot run,
    to which $1 is the parameters."""

    place: str
    probe: str

    def covers(self, place: str) -> bool:
        return fnmatchcase(place, self.place) or fnmatchcase(place.partition("::")[0], self.place)


@lru_cache
def entries(path: Path) -> Sequence[Entry]:
    """All lines of a list."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    split = [line.partition("  # ") for line in lines]
    assert all(probe for _, _, probe in split), f"each line of {path.name} is a place, two spaces, # and a probe"
    return [Entry(place, probe) for place, _, probe in split]


def complaint(nodeid: str, reason: str, path: Path = LIST) -> str:
    """What is wrong with the skip of a test; "" if nothing is."""
    place, _, parameters = nodeid.partition("[")
    entry = next((each for each in entries(path) if each.covers(place)), None)
    if entry is None:
        return f"{nodeid} was skipped ({reason}) and is not listed: {TO_DO}"
    if _succeeds(entry.probe, parameters.removesuffix("]")):
        return f"{nodeid} was skipped ({reason}), but its probe in tests/skips.txt says that this host can run it: {entry.probe}"
    return ""


@lru_cache
def _succeeds(probe: str, parameters: str) -> bool:
    """`python` is the one that runs the tests."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    done = subprocess.run(["sh", "-c", probe, "sh", parameters], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=PROBE_DEADLINE_S, check=False)
    return done.returncode == 0
