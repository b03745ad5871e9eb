"""Programs of bench/ that are ended from outside take along what they started. Stand-ins are in the place of engine and server."""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import memory
import scripts

BENCH = Path(__file__).resolve().parents[2] / "bench"
PATIENCE_S = 30.0

# Stops, as one whose turn it is not, when it is asked for the second time.
ENGINE = """
import os, signal, sys
print('{"value": "ready"}', flush=True)
for asked, _ in enumerate(sys.stdin):
    if asked:
        os.kill(os.getpid(), signal.SIGSTOP)
    print('{"value": null}', flush=True)
"""
RUN = """
import sys
from pathlib import Path
sys.path.insert(1, sys.argv[1])
import run
run.engines.PROGRAM, run.models.make, run.figures.ENGINE = Path(sys.argv[2]), lambda *_: None, ()
sys.argv[1:] = ["example"]
run.main()
"""
SERVER = """
import signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(60)
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))) as listening:
    while True:
        listening.accept()
"""
WITH_SERVER = """
import contextlib, socket, sys, time
sys.path.insert(1, sys.argv[1])
import lmcache_server
lmcache_server.END_S = 0.2
with contextlib.ExitStack() as stack:
    port, server = lmcache_server.start(1, 1, stack)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection((lmcache_server.HOST, port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
print(server.returncode)
"""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose children are killed at the end of the `with`, should it have left any."""
    process = subprocess.Popen([sys.executable, "-c", *map(str, words)], start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def test_a_run_that_is_terminated_leaves_no_engine_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    with running(RUN, BENCH / "ttft", tmp_path / "engine.py") as process:
        folder = Path(f"/dev/shm/ttft-example-{process.pid}")
        try:
            memory.wait_until(lambda: any(state_of(pid) == "T" for pid in children_of(process.pid)), "an engine that is stopped")
            engines = children_of(process.pid)
            assert len(engines) == 2
            assert folder.is_dir()
            process.terminate()
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
            assert not folder.exists()
            assert not any(Path(f"/proc/{pid}").exists() for pid in engines)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_server_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    (tmp_path / "lmcache/cli").mkdir(parents=True)
    (tmp_path / "lmcache/cli/main.py").write_text(SERVER)
    assert scripts.run(WITH_SERVER, BENCH / "peers", env={**os.environ, "PYTHONPATH": str(tmp_path)}) == "-9\n"
