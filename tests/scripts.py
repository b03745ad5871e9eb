"""Python programs of a few lines that a unit test runs in a process of their own."""
from __future__ import annotations

import select
import subprocess
import sys
import time
from types import TracebackType

DEADLINE_S = 30.0


def run(code: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    """Run a program to its end: what it printed. It must exit with 0 and say nothing on stderr."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True,
                          timeout=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


class Script:
    """A running program: lines in, lines out. Killed at the end of the `with` if it has not ended."""

    def __init__(self, code: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=env, bufsize=0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def hear(self) -> str:
        """The next line that it printed."""
        assert self.process.stdout is not None
        deadline, line = time.monotonic() + DEADLINE_S, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the program says nothing"
            byte = self.process.stdout.read(1)
            assert byte, f"the program ended with {self.process.wait()}"
            line += byte
        return line.decode().rstrip("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
