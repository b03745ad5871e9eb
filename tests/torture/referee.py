"""Kills and stops at random times, starts again, looks for whoever hangs or ended by itself, and says what it saw."""
from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from torture.arguments import Plan
from torture.board import Board, Field
from torture.clock import Clock
from torture.locks import HELD_BY_ACCEPTOR, HELD_BY_INITIATOR, Directories, incarnation
from torture.processes import Life, Starter, set_cores
from torture.worker import Call

STACKS_S = 2.0
HANG_S = 20.0                           # in one call, or without being ready
LOOK_S = 0.2
HUNT_S = 0.03
SHM = Path("/dev/shm")


@dataclass
class Seen:
    """What the referee counts itself."""

    kills: int = 0
    of_prompts: int = 0
    holding: int = 0                    # the victim held a link's lock: its word still says so after its death
    held_by_peer: int = 0               # a prompt died while a decoder held one of its links
    pushing: int = 0                    # of prompts that held a link's lock themselves, to push
    pushed_to: int = 0                  # of decoders whose link a prompt held
    at_once: int = 0                    # kills of several processes at the same time
    stops: int = 0
    started_apart: int = 0
    forked: int = 0
    hangs: int = 0
    peak_nbytes: int = 0
    seconds: float = 0.0
    one_core_s: float = 0.0
    faults: list[str] = field(default_factory=list)


class Referee:
    """Of one run."""

    def __init__(self, plan: Plan, board: Board, workdir: Path) -> None:
        self.plan = plan
        self.board = board
        self.faults = workdir / "faults"
        self.faults_read = 0
        self.seen = Seen()
        self.random = random.Random(plan.seed)
        self.starter = Starter(plan, board, workdir)
        self.directories = Directories(plan.namespace, board, plan.prompts)
        self.living: dict[int, Life] = {}
        self.dying: dict[int, tuple[Life, bool]] = {}       # and whether a decoder held one of its links when it was killed
        self.waiting: list[tuple[int, int]] = []            # (when to start, which worker)
        self.stopped: list[tuple[int, int, int]] = []       # (when to go on, worker, pid)
        self.all_cores = os.sched_getaffinity(0)
        self.cores = self.all_cores
        self.hunting_until = 0          # kill whoever holds a link, until then

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self) -> Seen:
        """Until the plan is carried out or something is wrong."""
        began = time.monotonic()
        now = time.monotonic_ns()
        self.next_kill = self.next_stop = self.next_look = now
        self.next_phase = now + int(self.plan.phase_s * 1e9)
        for number in range(self.plan.workers):
            self.start(number, apart=True)
        while not self.seen.faults and not self.is_enough(began):
            self.tick()
            time.sleep(self.nap())
        self.go_on(max((when for when, _, _ in self.stopped), default=0))
        self.seen.seconds = time.monotonic() - began
        self.use_cores(self.all_cores)
        return self.seen

    def is_enough(self, began: float) -> bool:
        return (time.monotonic() - began >= self.plan.minutes * 60 and self.seen.kills >= self.plan.kills
                and self.board.total(Field.PULLS) >= self.plan.pulls)

    def nap(self) -> float:
        """Until the next thing is due, at most a millisecond."""
        if self.hunting_until:
            return 0.0
        due = min(self.next_kill, self.next_stop, *(when for when, *_ in self.stopped[:1]))
        return min(1e-3, max(5e-5, (due - time.monotonic_ns()) / 1e9))

    def tick(self) -> None:
        now = time.monotonic_ns()
        self.go_on(now)
        self.bury(now)
        while self.waiting and self.waiting[0][0] <= now:
            self.start(heapq.heappop(self.waiting)[1], apart=self.random.random() < self.plan.apart)
        if now >= self.next_stop:
            self.next_stop = now + int(self.random.expovariate(self.plan.stops_per_s) * 1e9)
            self.stop()
        if now >= self.next_kill:
            self.next_kill = now + int(self.random.expovariate(self.plan.kills_per_s) * 1e9)
            self.kill()
        if now < self.hunting_until:
            self.hunt()
        else:
            self.hunting_until = 0
        if now >= self.next_phase:
            self.next_phase = now + int(self.plan.phase_s * 1e9)
            self.use_cores({min(self.all_cores)} if self.cores == self.all_cores else self.all_cores)
        if now >= self.next_look:
            self.next_look = now + int(LOOK_S * 1e9)
            self.look()

    def start(self, number: int, *, apart: bool) -> None:
        row = self.board.fields[number]
        row[Field.CALL_NS] = row[Field.STOPPED_NS] = 0
        row[Field.LIFE] = max(row[Field.LIFE], row[Field.KILLED]) + 1
        life = self.living[number] = self.starter.start(number, apart=apart)
        life.set_cores(self.cores)
        self.seen.started_apart += apart
        self.seen.forked += not apart

    def use_cores(self, cores: set[int]) -> None:
        """All processes of the run but the referee."""
        if self.cores != self.all_cores:
            self.seen.one_core_s += self.plan.phase_s
        self.cores = cores
        for pid in (self.starter.pid, *(life.pid for life in self.living.values())):
            set_cores(pid, cores)

    # -- stop and kill ----------------------------------------------------------------------------------------------

    @staticmethod
    def send(pid: int, number: signal.Signals) -> None:
        """To a process that nobody has waited for yet, or that is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def go_on(self, now: int) -> None:
        while self.stopped and self.stopped[0][0] <= now:
            _, number, pid = heapq.heappop(self.stopped)
            life = self.living.get(number)
            if life is not None and life.pid == pid:
                self.board.fields[number, Field.STOPPED_NS] += time.monotonic_ns()
                life.signal(signal.SIGCONT)

    def random_worker(self) -> int:
        """Decoders more often: they do what can go wrong, and a prompt has to fill its caches before it is worth a pull."""
        if self.random.random() < 0.15:
            return self.random.randrange(self.plan.prompts)
        return self.plan.prompts + self.random.randrange(self.plan.decoders)

    def stop(self) -> None:
        """Decoders more often than prompts: what a reader believes grows old while it stands still."""
        number = self.random_worker()
        life = self.living.get(number)
        if life is None or any(number == other for _, other, _ in self.stopped):
            return
        self.board.fields[number, Field.STOPPED_NS] -= time.monotonic_ns()
        life.signal(signal.SIGSTOP)
        self.seen.stops += 1
        long = self.random.random() < 0.02
        duration = self.random.uniform(10e6, 30e6) if long else self.random.uniform(0.3e6, 6e6)
        heapq.heappush(self.stopped, (time.monotonic_ns() + int(duration), number, life.pid))

    def kill(self) -> None:
        """One process, one that holds a lock, or several at once."""
        numbers = list(self.living)
        if not numbers:
            return
        chance = self.random.random()
        if chance < self.plan.hunt:
            self.hunting_until = time.monotonic_ns() + int(HUNT_S * 1e9)
        elif chance < self.plan.hunt + 0.01:
            several = self.random.sample(numbers, self.random.randint(2, len(numbers))) if len(numbers) > 1 else numbers
            self.seen.at_once += 1
            for number in several:
                self.kill_one(number)
        elif (number := self.random_worker()) in self.living:
            self.kill_one(number)

    def hunt(self) -> None:
        """Kill a decoder that holds a link now, or one in five times a prompt; if none does, the next look may find one."""
        holders = self.directories.holders(HELD_BY_ACCEPTOR if self.random.random() < 0.2 else HELD_BY_INITIATOR)
        for number in list(self.living):
            if incarnation(self.board, number) in holders:
                self.hunting_until = 0
                self.kill_one(number)
                return

    def kill_one(self, number: int) -> None:
        life = self.living.pop(number)
        row = self.board.fields[number]
        is_prompt = number < self.plan.prompts
        if is_prompt:
            self.note_stalls(number)
        # Its own restart may be under way: either of two lives is the one that dies.
        row[Field.KILLED_NS] = time.monotonic_ns()
        row[Field.KILLED] = row[Field.LIFE] + 1
        held = is_prompt and self.directories.is_held_in(number)[1]
        self.seen.pushed_to += not is_prompt and self.directories.is_held_for(incarnation(self.board, number))
        life.signal(signal.SIGKILL)
        self.seen.kills += 1
        self.seen.of_prompts += is_prompt
        self.dying[number] = life, held

    def note_stalls(self, prompt: int) -> None:
        """How long each decoder had not been able to run when a prompt dies: what comes on top belongs to its recovery."""
        for number, life in self.living.items():
            if number >= self.plan.prompts:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError), Clock(self.board, number, life.pid) as clock:
                    self.board.stalled[prompt, number - self.plan.prompts] = clock.now().stalled_ns

    def bury(self, now: int) -> None:
        """Look at the locks of those who are dead, and let them be started again."""
        for number, (life, held) in list(self.dying.items()):
            if not life.is_dead():
                if now - int(self.board.fields[number, Field.KILLED_NS]) > HANG_S * 1e9:
                    self.fault(f"worker {number}, process {life.pid}, does not die")
                continue
            if number < self.plan.prompts:
                self.seen.held_by_peer += held
                held_itself = self.directories.is_held_in(number)[0]
                self.seen.holding += held_itself
                self.seen.pushing += held_itself and int(self.board.fields[number, Field.CALL]) != Call.UNLINK
            else:
                self.seen.holding += self.directories.is_held_by_decoder(incarnation(self.board, number))
            if life.reap() != signal.SIGKILL:
                self.read_faults()          # it had found one when it was killed
            del self.dying[number]
            pause = 0.0 if self.random.random() < 0.7 else self.random.uniform(0, 20e6)
            heapq.heappush(self.waiting, (now + int(pause), number))

    # -- what is wrong ------------------------------------------------------------------------------------------------

    def fault(self, text: str) -> None:
        self.seen.faults.append(text)

    def read_faults(self) -> None:
        """Those that workers have written down since the last look."""
        if self.faults.exists():
            lines = self.faults.read_text().splitlines()
            self.seen.faults += [shown(json.loads(line)) for line in lines[self.faults_read:]]
            self.faults_read = len(lines)

    def look(self) -> None:
        """At faults that workers wrote down, at those that ended by themselves, at those that hang."""
        self.read_faults()
        for number, life in list(self.living.items()):
            if life.is_dead():
                del self.living[number]
                status = life.reap()
                self.read_faults()
                if not self.seen.faults:
                    self.fault(f"worker {number}, process {life.pid}, ended by itself with status {status:#x}")
            else:
                self.look_for_hang(life)
        files = [SHM / name for name in os.listdir(SHM) if name.startswith(f"{self.plan.namespace}.")]
        nbytes = 0
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                nbytes += path.stat().st_blocks * 512
        self.seen.peak_nbytes = max(self.seen.peak_nbytes, nbytes)

    def look_for_hang(self, life: Life) -> None:
        now = time.monotonic_ns()
        row = self.board.fields[life.number]
        call_ns, is_ready = int(row[Field.CALL_NS]), row[Field.READY] == row[Field.LIFE]
        since = call_ns if call_ns else 0 if is_ready else life.began_ns
        if since and now - since > HANG_S * 1e9:
            self.seen.hangs += 1
            self.send(life.pid, signal.SIGCONT)
            life.signal(signal.SIGUSR1)
            stacks = self.stacks()
            call = Call(int(row[Field.CALL])).name
            self.fault(f"worker {life.number} hangs in {call} for {(now - since) / 1e9:.1f} s:\n{stacks}")


    def stacks(self) -> str:
        """What faulthandler wrote, once it did, at the end of what the workers complained of."""
        until = time.monotonic() + STACKS_S
        while "most recent call first" not in (text := self.starter.complaints.read_text()[-4000:]) and time.monotonic() < until:
            time.sleep(0.01)
        return text


def shown(found: dict[str, str]) -> str:
    return f"{found['worker']}, life {found['life']}, process {found['pid']}: {found['fault']}\n{found['trace']}"
