"""examples/paged.py as it stands there: a prefill process with rows, a decoder with blocks in memory of its own."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(120)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "paged.py"
WATCHDOG_S = 60


def test_blocks_go_from_process_to_process_and_within_one(namespace: Namespace) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], env=namespace.environment({}), capture_output=True, text=True,
                          timeout=WATCHDOG_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *checks, last = done.stdout.splitlines()
    assert len(checks) == 7
    assert all(line.startswith("ok: ") for line in checks), done.stdout
    assert last == "both processes ended"
    assert namespace.names() == set(), "nothing is left in /dev/shm"
