"""examples/streaming.py runs, and shows what it is for: the decoder works on layers while the prefill goes on."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(120)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "streaming.py"


def run(namespace: Namespace, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, env=namespace.environment({}),
                          timeout=100)


def test_layers_are_decoded_while_the_prefill_goes_on(namespace: Namespace) -> None:
    done = run(namespace, "--layers", "32", "--ms-a-layer", "10")
    assert (done.returncode, done.stderr) == (0, "")
    marks, decodes, through = (
        {int(layer): float(at) for at, layer in re.findall(rf"^ *(-?[\d.]+) ms +{what} (\d+)$", done.stdout, re.MULTILINE)}
        for what in ("prefill marks", "decoder decodes layer", "decoder is through layer"))
    assert sorted(marks) == sorted(decodes) == sorted(through) == list(range(32))
    assert all(through[layer] >= decodes[layer] + 3 for layer in decodes), "work of 3 ms"
    assert all(decodes[layer] >= marks[layer] for layer in decodes), "never before it was marked"
    assert list(decodes.values()) == sorted(decodes.values()), "in order"
    assert through[0] < marks[31], "the first one long before the last one was marked"
    assert re.search(r"^decode is through [\d.]+ ms after the last layer was marked, \d+ ms after .*; "
                     rf"through {sum(at < marks[31] for at in through.values())} of 32 layers before", done.stdout, re.MULTILINE)


def test_a_decode_after_the_prefill_is_seen_by_the_example(namespace: Namespace) -> None:
    """Work on the first of two layers that outlasts the prefill of the second: nothing was won, and the example says so."""
    done = run(namespace, "--layers", "2", "--ms-a-layer", "1", "--ms-to-decode", "2000")
    assert done.returncode == 1
    assert "has not worked on layer 0 before the last layer was marked" in done.stderr
