"""Programs of the bench that run apart: one JSON command a line on stdin, one JSON answer a line on stdout.

Both ends stand here. A program ends when its stdin does.
"""
from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DEADLINE_S = 120.0


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Carry out commands until stdin ends; an exception is an answer, with its traceback.

    What libraries print goes to stderr from now on: stdout is for answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": commands[name](**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Process:
    """A program of this folder, running. Use it as a context manager, so that it ends whatever happens."""

    def __init__(self, program: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.name = " ".join((program, *arguments))
        self._unread = b""
        self._process = subprocess.Popen([sys.executable, str(FOLDER / program), *arguments], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, env={**os.environ, **(env or {})})

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: str, **arguments: Any) -> None:
        """Give a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """The next answer. RuntimeError with the other side's traceback, or when none comes in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                raise RuntimeError(f"{self.name}: " + ("it ended" if ready else f"no answer in {DEADLINE_S} s"))
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def call(self, command: str, **arguments: Any) -> Any:
        """Send and receive."""
        self.send(command, **arguments)
        return self.receive()

    def close(self) -> None:
        """End of its stdin, then of the program; it is killed if it does not go."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
