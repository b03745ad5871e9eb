"""The library that makes calls fail, compiled once, and runs of program.py under it."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from block_lives import peer_blocks
from lives import Reports, RunPositions, peer_commands
from peer import Namespace, Peer, StartPeer
from private_lives import peer_memory
from rounds import ROUNDS

HERE = Path(__file__).parent
RUN_DEADLINE_S = 300


@pytest.fixture(scope="session")
def failing_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fail_nth.so."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("fail-nth") / "fail_nth.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(HERE / "fail_nth.c"), "-ldl"], check=True)
    return made


@pytest.fixture
def healthy(prompt: StartPeer) -> Peer:
    """A process that nothing fails in, cluster 1, with the caches that are pulled."""
    peer = prompt(1)
    for command, arguments in peer_commands():
        peer.call(command, **arguments)
    peer.call("execute", code=peer_blocks())
    peer.call("execute", code=peer_memory())
    return peer


@pytest.fixture
def run_positions(namespace: Namespace, failing_library: Path, healthy: Peer) -> RunPositions:
    """run_positions(scenario): the reports of program.py, first that of the run in which nothing fails."""
    step = max(1, round(1 / ROUNDS))
    environment = namespace.environment({"LD_PRELOAD": str(failing_library), "SHMKV_COPY_THREADS": "3",
                                         "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE),
                                                                        str(HERE.parent), str(HERE.parent.parent)])})

    def run(scenario: str) -> Reports:
        ended = subprocess.run([sys.executable, str(HERE / "program.py"), scenario, str(step)],
                               env=environment, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        return [json.loads(line) for line in ended.stdout.splitlines()]

    return run
