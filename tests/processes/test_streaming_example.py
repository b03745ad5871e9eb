"""examples/streaming.py runs, and shows what it is for: layers arrive while the prefill goes on."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(120)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "streaming.py"


def test_layers_arrive_while_the_prefill_goes_on(namespace: Namespace) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE), "--layers", "32", "--ms-a-layer", "10"], capture_output=True, text=True,
                          env=namespace.environment({}), timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    marks, has = (
        {int(layer): float(at) for at, layer in re.findall(rf"^ *(-?[\d.]+) ms +{what} (\d+)$", done.stdout, re.MULTILINE)}
        for what in ("prefill marks", "decoder has"))
    assert sorted(marks) == sorted(has) == list(range(32))
    assert all(has[layer] >= marks[layer] for layer in has), "never before it was marked"
    assert list(has.values()) == sorted(has.values()), "in order"
    assert has[0] < marks[31], "the first one long before the last one was marked"
    assert re.search(r"^decode may start [\d.]+ ms after the last layer was marked, \d+ ms after", done.stdout, re.MULTILINE)
