"""An engine of a test: starts engine_process.py apart, sends commands, waits for answers with a deadline."""
from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("engine_process.py")
DEADLINE_S = 240.0
END_S = 60.0
HANGS = 124                 # instead of a status, as timeout(1) has it
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class Engine:
    """A process with one engine. It starts when the object is made; `wait_until_ready` waits for it."""

    def __init__(self, workdir: Path, name: str, model: Path, namespace: str, connector: dict[str, Any] | None,
                 **options: Any) -> None:
        self._log = workdir / f"{name}.log"
        self._unread = b""
        self._is_killed = False
        wanted = {"model": str(model), "connector": connector, "max_model_len": 1024, **options}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-X", "faulthandler", str(PROGRAM), json.dumps(wanted)],
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                             env={**os.environ, **ENVIRONMENT, "SHMKV_NAMESPACE": namespace})

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> Engine:
        assert self._receive() == {"value": "ready"}
        return self

    def call(self, command: str, **arguments: Any) -> Any:
        """The value of a command that has to work."""
        answer = self.attempt(command, **arguments)
        assert "error" not in answer, f"{command}: {answer['error']}\n{self.log()[-4000:]}"
        return answer["value"]

    def attempt(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer, which may be that the process ended."""
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([command, arguments]) + "\n").encode())
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not piece:
                self._kill()
                return {"error": f"no answer, the process ended with {self._process.returncode}:\n{self.log()[-4000:]}"}
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def counted(self, name: str) -> int:
        """One of the connector's counts."""
        counts: dict[str, int] = self.call("counted")
        return counts.get(name, 0)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def will_be_killed(self) -> None:
        """Somebody else is about to send it SIGKILL, for the test: the only engine of which that is a good end."""
        self._is_killed = True

    def _kill(self) -> None:
        """SIGKILL, and no trace of a process afterwards."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(END_S)

    @property
    def is_killed(self) -> bool:
        """By the test, and not because it did not end."""
        return self._is_killed

    @property
    def good_status(self) -> int:
        """What `close` has to return."""
        return -signal.SIGKILL if self._is_killed else 0

    def close(self) -> int:
        """End as a program ends: its exit status, or HANGS if it does not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        hangs = False
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            hangs = True
            self._kill()
        self._process.stdout.close()
        return HANGS if hangs else self._process.returncode
