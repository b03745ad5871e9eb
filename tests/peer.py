"""Another process of a test: starts agent.py apart, sends commands, waits for answers with a deadline."""
from __future__ import annotations

import base64
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import SUCCESS, Bytes
from rounds import LONGER

WATCHDOG_S = 60.0 * LONGER                # more rounds, longer commands
SHM = Path("/dev/shm")
AGENT = Path(__file__).with_name("agent.py")
U64MAX = 2**64 - 1
SWEEPER_ID = 999_999


def req(cluster_id: int, req_id: int, model_id: int = 0) -> list[Any]:
    """CacheKey by request."""
    return ["key", cluster_id, req_id, model_id, U64MAX]


def prefix(cluster_id: int, prefix_id: int, model_id: int = 0) -> list[Any]:
    """CacheKey by prefix."""
    return ["key", cluster_id, U64MAX, model_id, prefix_id]


def padding(cluster_id: int = 1) -> list[Any]:
    """CacheKey that names nothing."""
    return ["key", cluster_id, U64MAX, 0, U64MAX]


def by_id(cluster_id: int, cache_id: int, row: int = 0) -> list[Any]:
    """CacheKeyByIdAndIndex."""
    return ["id", cluster_id, cache_id, row]


def blocks(cluster_id: int, model_id: int = 0) -> list[Any]:
    """BlocksCacheKey."""
    return ["blocks", cluster_id, model_id]


def heads(head_dim_index: int, src_heads: int | None = None, src: range | None = None,
          dst: range | None = None) -> dict[str, list[Any]]:
    """HeadSlice."""
    return {"heads": [head_dim_index, src_heads, src, dst]}


@dataclass(frozen=True)
class Answer:
    """What a command came to, and how many milliseconds it took inside the other process."""

    ms: float
    value: Any = None
    kinds: tuple[str, ...] = ()
    status: str | None = None
    text: str = ""
    trace: str = ""

    @property
    def outcome(self) -> str:
        """LLM_SUCCESS, else the status of the LLMException, else the name of the exception's class."""
        if not self.kinds:
            return SUCCESS
        return self.status or self.kinds[0]


def _answer(said: dict[str, Any]) -> Answer:
    error = said.get("error", {})
    return Answer(said["ms"], said.get("value"), tuple(error.get("kinds", ())), error.get("status"),
                  error.get("text", ""), error.get("trace", ""))


def array(read: dict[str, Any]) -> Bytes:
    """The answer of the command ``read`` as (num_tensors, outer, rows, inner) bytes."""
    return np.frombuffer(base64.b64decode(read["bytes"]), np.uint8).reshape(read["shape"]).copy()


def _encode(value: Any) -> Any:
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    raise TypeError(f"{value!r} cannot be sent to a peer")


class Peer:
    """A process that runs agent.py. Whatever goes wrong with it fails the test and shows its stderr."""

    def __init__(self, namespace: Namespace, env: dict[str, str]) -> None:
        self._namespace = namespace
        self._stderr = namespace.workdir / f"stderr-{len(namespace.peers)}"
        self._unread = b""
        self._closed = False
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [namespace.python, "-X", "faulthandler", str(AGENT)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stderr, env=namespace.environment(env))

    @property
    def pid(self) -> int:
        return self._process.pid

    # commands

    def send(self, command: str, **arguments: Any) -> None:
        """Give a command without waiting: receive() has its answer."""
        assert self._process.stdin is not None
        line = json.dumps([command, arguments], default=_encode) + "\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def receive(self) -> Answer:
        """The next answer; after WATCHDOG_S without one the process is killed and the test fails."""
        deadline = time.monotonic() + WATCHDOG_S
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._abort(f"no answer within {WATCHDOG_S} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                self._process.wait(WATCHDOG_S)
                self._abort("the process ended")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return _answer(json.loads(line))

    def answers_within(self, seconds: float) -> bool:
        """Is there an answer, or a part of one, so soon?"""
        assert self._process.stdout is not None
        return bool(self._unread or select.select([self._process.stdout], [], [], seconds)[0])

    def attempt(self, command: str, **arguments: Any) -> Answer:
        """Send and receive: an error is an answer too."""
        self.send(command, **arguments)
        return self.receive()

    def outcome(self, command: str, **arguments: Any) -> str:
        """Answer.outcome of one command."""
        return self.attempt(command, **arguments).outcome

    def call(self, command: str, **arguments: Any) -> Any:
        """The value of a command that has to work."""
        answer = self.attempt(command, **arguments)
        assert answer.outcome == SUCCESS, f"{command} {arguments} in the other process:\n{answer.trace}"
        return answer.value

    def read(self, name: str) -> Bytes:
        """All bytes of a cache of that process."""
        return array(self.call("read", name=name))

    def read_tensors(self, name: str) -> list[Bytes]:
        """All bytes of a cache of that process, a tensor each."""
        return [array(tensor) for tensor in self.call("read_tensors", name=name)]

    def batch(self, commands: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
        """Many commands for one round trip."""
        return [_answer(said) for said in self.call("batch", commands=commands)]

    def parallel(self, batches: list[list[tuple[str, dict[str, Any]]]]) -> list[list[Answer]]:
        """Each batch on its own thread of that process."""
        return [[_answer(said) for said in batch] for batch in self.call("parallel", batches=batches)]

    # the process

    def kill(self) -> None:
        """SIGKILL: what it leaves is for the next init in the namespace to remove."""
        self._process.kill()
        self._reap()
        self._namespace.somebody_died = True

    def stop(self) -> None:
        """SIGSTOP: alive, but does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait_stopped_or_dead(self) -> bool:
        """True once the process stands still (a crash point that stops), False once it died by SIGKILL."""
        deadline = time.monotonic() + WATCHDOG_S
        while time.monotonic() < deadline:
            found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if found is None:
                time.sleep(0.001)           # waitid has no deadline of its own
                continue
            if found.si_code == os.CLD_STOPPED:
                return True
            self._reap()
            self._namespace.somebody_died = True
            assert self._process.returncode == -signal.SIGKILL, self._stderr.read_text()
            return False
        return bool(self._abort("neither stopped nor died"))

    @property
    def is_alive(self) -> bool:
        """Not reaped yet: running or stopped."""
        return not self._closed

    def close(self) -> None:
        """Let the program end by itself; it must exit with 0 and without a word on stderr."""
        if self._closed:
            return
        assert self._process.stdin is not None
        self.cont()
        self._process.stdin.close()
        try:
            code = self._process.wait(WATCHDOG_S)
        except subprocess.TimeoutExpired:
            self._abort("does not end")
        self._reap()
        complaint = self._stderr.read_text()
        if code != 0 or complaint:
            self._namespace.somebody_died = True
            pytest.fail(f"peer ended with {code} and said: {complaint or 'nothing'}")

    def _abort(self, reason: str) -> None:
        """Ask faulthandler for the stacks of all threads, then kill."""
        if self._process.poll() is None:
            self.cont()
            self._process.send_signal(signal.SIGABRT)
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
        code = self._process.wait()
        self.kill()
        pytest.fail(f"peer {self.pid}: {reason} (exit code {code})\n{self._stderr.read_text()}")

    def _reap(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._closed = True


StartPeer = Callable[..., Peer]


@dataclass
class Namespace:
    """A name prefix in /dev/shm that belongs to one test, and the processes that it started, all by one `python`."""

    workdir: Path
    name: str = field(default_factory=lambda: f"t{os.getpid():x}-{secrets.token_hex(4)}")
    peers: list[Peer] = field(default_factory=list)
    somebody_died: bool = False
    python: str = sys.executable

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "SHMKV_NAMESPACE": self.name, **more}

    def start(self, env: dict[str, str] | None = None) -> Peer:
        """A process that has imported the library and done nothing yet."""
        peer = Peer(self, env or {})
        self.peers.append(peer)
        return peer

    def start_cluster(self, role: str, cluster_id: int, env: dict[str, str] | None = None,
                      raw: dict[str, Any] | None = None, **options: Any) -> Peer:
        """A process with an initialised LLMDataDist; deadlines are long unless the test says otherwise."""
        peer = self.start(env)
        patient = {"sync_kv_timeout": 20000, **options}
        peer.call("init", role=role, cluster_id=cluster_id, options=patient, raw=raw or {})
        return peer

    def names(self) -> set[str]:
        """All names of the namespace in /dev/shm."""
        return {name for name in os.listdir(SHM) if name.startswith(self.name)}

    def segments(self) -> set[str]:
        """The cache segments among them."""
        return {name for name in self.names() if name.startswith(f"{self.name}.c.")}

    def close(self) -> list[str]:
        """End every process, sweep after killed ones, and answer what is left in /dev/shm all the same."""
        complaints = [text for text in map(_close_and_tell, self.peers) if text]
        if self.somebody_died:
            sweeper = self.start_cluster("PROMPT", SWEEPER_ID)
            complaints += filter(None, [_close_and_tell(sweeper)])
        for name in sorted(self.names()):
            complaints.append(f"left behind in {SHM}: {name}")
            (SHM / name).unlink(missing_ok=True)
        return complaints


def _close_and_tell(peer: Peer) -> str:
    """Every peer has to be closed, so the first one that fails must not hide the others."""
    try:
        peer.close()
    except (pytest.fail.Exception, AssertionError, OSError) as failure:
        return str(failure)
    return ""
