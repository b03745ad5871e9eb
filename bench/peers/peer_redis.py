"""Redis over a unix socket: a value for each tensor, one MGET a pull. Needs: redis, and the program redis-server"""
from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beside import Race
from cluster import ByteArray
from workloads import MEDIUM, SMALL, Workload

START_S = 10.0


def start_server(stack: contextlib.ExitStack) -> Path:
    """A server without persistence; the path of its socket."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("the program redis-server is not installed")
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "redis"
    server = subprocess.Popen([program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"],
                              stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline or server.poll() is not None:
            raise RuntimeError("redis-server does not start")
        time.sleep(0.01)
    return path


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    redis: Any = pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    client = redis.Redis(unix_socket_path=str(start_server(stack)))
    stack.callback(client.close)
    keys = [str(number) for number in range(len(src))]
    client.mset({key: row.tobytes() for key, row in zip(keys, src, strict=True)})

    def fetch() -> None:
        for row, value in zip(dst, client.mget(keys), strict=True):
            row[:] = np.frombuffer(value, np.uint8)

    return fetch


@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_redis(workload: Workload, race: Race) -> None:
    race.run_against("redis", workload, prepare)
