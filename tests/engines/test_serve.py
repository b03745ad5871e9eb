"""The example of examples/vllm: servers, proxy and client, by the one command that its documentation names."""
from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from models import make

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
SERVE = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "serve.sh"
SHM = Path("/dev/shm")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def test_two_servers_and_a_proxy_share_blocks(tmp_path: Path) -> None:
    names = ("PREFILL_PORT", "DECODE_PORT", "PROXY_PORT")
    namespace = f"serve-{secrets.token_hex(4)}"
    environment = {**os.environ, "SHMKV_NAMESPACE": namespace, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                   **{name: str(port) for name, port in zip(names, free_ports(3), strict=True)}}
    model = make("smollm2", tmp_path)
    done = subprocess.run([str(SERVE), str(model)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"the decode engine took (\d+) tokens \((\d+) blocks\)", done.stdout)
    assert said is not None
    assert int(said[1]) >= 3 * 128              # each of three questions has the story before it
    assert [path.name for path in SHM.glob(f"{namespace}*")] == []
