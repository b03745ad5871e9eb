"""The command line as a person runs it: a program of its own, with a watchdog."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

WATCHDOG_S = 60
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli() -> RunCli:
    """cli(*arguments, env={...}): the finished process with its exit status, stdout and stderr."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "shmkv", *arguments], capture_output=True, text=True, timeout=WATCHDOG_S,
                              env={**os.environ, **(env or {})})

    return run
