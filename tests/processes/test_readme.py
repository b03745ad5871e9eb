"""The README's two programs, as they stand there."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(120)
README = Path(__file__).resolve().parents[2] / "README.md"
WATCHDOG_S = 60


def programs() -> list[str]:
    """The code blocks that a reader saves to a file."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [block for block in blocks if "LLMDataDist(" in block]


def test_two_programs_hand_over_a_request(namespace: Namespace, tmp_path: Path) -> None:
    prompt, decode = programs()[:2]
    assert len((prompt + decode).splitlines()) <= 40
    for name, text in (("prompt.py", prompt), ("decode.py", decode)):
        (tmp_path / name).write_text(text)
    environment = namespace.environment({})
    with subprocess.Popen([sys.executable, "-u", tmp_path / "prompt.py"], env=environment, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        assert "published" in publisher.stdout.read(len("published"))
        said = subprocess.run([sys.executable, tmp_path / "decode.py"], env=environment, capture_output=True, text=True,
                              timeout=WATCHDOG_S, check=False)
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout.splitlines()[-1] == "[63. 63. 63. 63.]"
        _, errors = publisher.communicate("\n", timeout=WATCHDOG_S)
    assert (publisher.returncode, errors) == (0, "")
    assert namespace.names() == set()
