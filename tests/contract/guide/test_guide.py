"""docs/llm_datadist.md says what answers otherwise than in llm_datadist. Each of its rows is tried in a file beside this one, by a
test that has the row's number in its name."""
from __future__ import annotations

import subprocess
import sys

import pytest
from guide_rows import ROWS, TRIED

pytestmark = pytest.mark.timeout(120)


def test_each_row_has_its_test() -> None:
    assert TRIED == ROWS
    assert len(ROWS) > 60


def test_the_command_of_the_page_says_what_it_does() -> None:
    done = subprocess.run([sys.executable, "-m", "shmkv", "run", "--help"], capture_output=True, text=True, timeout=60)
    assert "--stub-npu" in done.stdout
