"""examples/prefixes.py as it stands there: views, forks and kept prefixes between two processes."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(120)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prefixes.py"
WATCHDOG_S = 60


def test_a_prefix_is_shared_and_the_oldest_goes(namespace: Namespace) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], env=namespace.environment({}), capture_output=True, text=True,
                          timeout=WATCHDOG_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    checks = done.stdout.splitlines()
    assert len(checks) == 9
    assert all(line.startswith("ok: ") for line in checks), done.stdout
    assert namespace.names() == set(), "nothing is left in /dev/shm"
