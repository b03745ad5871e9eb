"""The run of a demo: starts the processes, hands out requests, collects answers, and leaves nothing behind.

Back-pressure: a request is filled only into a free slot, and a slot is free again when its request was pulled. A pull is timed, so
the prompt fills while decoders check what they got and not while they copy.
"""
from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shmkv import segment
from shmkv.cli.demo_plan import FIRST_DECODER_ID, PROMPT_ID, Plan, block_name
from shmkv.cli.gc import clean
from shmkv.errors import LLMException

WATCHDOG_S = 60.0
END_S = 10.0
READ_NBYTES = 1 << 16


@dataclass
class Figures:
    """What was measured: one number of ns a request and way, and what was wrong in which request."""

    pull_ns: list[int] = field(default_factory=list)
    numpy_ns: list[int] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)
    segments: int = 0
    kernel: str = ""


class Child:
    """One process of the demo. In a session of its own, so that a Ctrl-C at the terminal reaches only who started it."""

    def __init__(self, role: str, cluster_id: int, plan: Plan, namespace: str, *, module: str = "demo_process",
                 env: dict[str, str] | None = None) -> None:
        self.name = f"{role} {cluster_id}"
        self._complaints = os.memfd_create("complaints")
        self._unread = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"shmkv.cli.{module}", role, str(cluster_id), plan.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, start_new_session=True,
            env={**os.environ, "SHMKV_NAMESPACE": namespace, **(env or {})})

    def send(self, **command: Any) -> None:
        """Give a command; one that has ended shows when its answer is waited for."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._raise_ended()

    def receive(self) -> list[dict[str, Any]]:
        """The answers that are there; LLMException if the process has ended or reports an error."""
        assert self.process.stdout is not None
        piece = os.read(self.process.stdout.fileno(), READ_NBYTES)
        if not piece:
            self._raise_ended()
        *lines, self._unread = (self._unread + piece).split(b"\n")
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if answer["event"] == "error":
                raise LLMException(f"the process {self.name}: {answer['text']}")
        return answers

    def _raise_ended(self) -> None:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise LLMException(f"the process {self.name} (pid {self.process.pid}) closed its pipes") from error
        raise LLMException(f"the process {self.name} (pid {self.process.pid}) {_how_it_ended(code)}{self._last_words()}")

    def _last_words(self) -> str:
        lines = os.pread(self._complaints, READ_NBYTES, 0).decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def finish(self) -> None:
        """Let it end by itself. LLMException if it does not, or not well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise LLMException(f"the process {self.name} (pid {self.process.pid}) does not end") from error
        if code != 0:
            self._raise_ended()

    def kill(self) -> None:
        """End it now, if it still runs, and let go of its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        os.close(self._complaints)


def own_namespace() -> str:
    """A namespace that no other demo has."""
    return f"shmkv-demo-{os.getpid()}-{secrets.token_hex(2)}"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})"


class Run:
    """The processes of one demo and who does what."""

    def __init__(self, plan: Plan, on_progress: Callable[[int], None]) -> None:
        self.plan = plan
        self.figures = Figures()
        self.namespace = own_namespace()
        self._on_progress = on_progress
        self._children: list[Child] = []
        self._filling = False
        self._copying = 0
        self._checked = 0
        self._next = 0
        self._idle: deque[Child] = deque()
        self._filled: deque[tuple[int, int]] = deque()
        self._free_slots = list(range(plan.slots))
        self._slot_of: dict[int, int] = {}

    def execute(self) -> Figures:
        """Start, run to the end, stop. Whatever happens, no process and no name in /dev/shm is left."""
        try:
            self._start()
            with selectors.DefaultSelector() as selector:
                for child in self._children:
                    selector.register(child.process.stdout or -1, selectors.EVENT_READ, child)
                while self._checked < self.plan.requests:
                    self._turn(selector)
            for child in reversed(self._children):
                child.finish()
        finally:
            self._clean()
        return self.figures

    def _start(self) -> None:
        self._children.append(Child("prompt", PROMPT_ID, self.plan, self.namespace))
        for number in range(self.plan.decoders):
            self._children.append(Child("decoder", FIRST_DECODER_ID + number, self.plan, self.namespace))
        self._filling = True                # until the prompt says that it is ready

    def _clean(self) -> None:
        for child in self._children:
            child.kill()
        if segment.names(f"{self.namespace}."):
            clean(self.namespace)
        for slot in range(self.plan.slots):
            if segment.names(block_name(self.namespace, slot)):
                segment.unlink(block_name(self.namespace, slot))

    def _turn(self, selector: selectors.BaseSelector) -> None:
        """Wait for answers, take them in, hand out what can be handed out."""
        ready = selector.select(WATCHDOG_S)
        if not ready:
            raise LLMException(f"no process of the demo has said anything for {WATCHDOG_S:.0f} s")
        for key, _ in ready:
            for answer in key.data.receive():
                self._take(key.data, answer)
        self._hand_out()

    def _take(self, child: Child, answer: dict[str, Any]) -> None:
        event = answer["event"]
        if event == "filled":
            self._filled.append((answer["request"], answer["slot"]))
            self.figures.segments = answer["segments"]
        if child is self._children[0]:
            self._filling = False
        elif event == "copied":
            self._copying -= 1
            self._free_slots.append(self._slot_of.pop(answer["request"]))
            self.figures.pull_ns.append(answer["pull_ns"])
            self.figures.numpy_ns.append(answer["numpy_ns"])
        else:
            self._idle.append(child)
            if event == "checked":
                self._count(answer["request"], answer["wrong"])
            else:
                self.figures.kernel = answer["kernel"]

    def _count(self, request: int, wrong: str) -> None:
        self._checked += 1
        self._on_progress(self._checked)
        if wrong:
            self.figures.wrong[request] = wrong

    def _hand_out(self) -> None:
        """Pulls go before fills, and neither runs beside the other."""
        while not self._filling and self._idle and self._filled:
            request, slot = self._filled.popleft()
            self._slot_of[request] = slot
            self._copying += 1
            self._idle.popleft().send(request=request, slot=slot)
        if not self._filling and not self._copying and self._free_slots and self._next < self.plan.requests:
            self._filling = True
            self._children[0].send(request=self._next, slot=self._free_slots.pop())
            self._next += 1
