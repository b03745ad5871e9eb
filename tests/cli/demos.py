"""A demo run to its end, and what one has left in /dev/shm."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WATCHDOG_S = 60
SHM = Path("/dev/shm")


def left_behind(pid: int) -> list[str]:
    """Names in /dev/shm that the demo of this process made."""
    return [name for name in os.listdir(SHM) if name.startswith(f"shmkv-demo-{pid}-")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A demo to its end, after which none of its names is left."""
    process = subprocess.Popen([sys.executable, "-m", "shmkv", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    try:
        out, complaints = process.communicate(timeout=WATCHDOG_S)
    finally:
        process.kill()
    assert left_behind(process.pid) == []
    return subprocess.CompletedProcess(process.args, process.returncode, out, complaints)
