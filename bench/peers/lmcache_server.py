"""LMCache's server with its pool in shared memory, for whoever races against it."""
from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

HOST = "127.0.0.1"
END_S = 30.0
QUIET = {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "ERROR"}
OPTIONS = ["--supported-transfer-mode", "engine_driven", "--shm-name", f"bench-{os.getpid()}", "--eviction-policy", "LRU",
           "--http-host", HOST, "--http-port", "0", "--disable-observability", "--disable-metrics"]


def free_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def start(tokens: int, gib: float, stack: contextlib.ExitStack) -> tuple[int, subprocess.Popen[bytes]]:
    """A server whose chunks have so many tokens and whose pool has so many GiB: its port and the process."""
    port = free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", HOST, "--port", str(port), "--chunk-size", str(tokens),
               "--l1-size-gb", str(gib), *OPTIONS]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **QUIET})
    stack.callback(end, server)
    return port, server


def end(server: subprocess.Popen[bytes]) -> None:
    """In order, or, if it does not listen, by SIGKILL."""
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
