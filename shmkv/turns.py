"""A few threads for many waits.

As long as there are threads enough, each wait has one and sleeps in it until there is something to do. When there are more waits,
one thread sleeps for all of them at once, and each goes to a thread when there is something for it: so nobody wakes up for
nothing, and no wait has to wait for the end of another, whatever they wait for. That sleep is a turn like any other, which a
thread takes when nothing stands before it. A bell ends it: there is a new wait, or one less. A copy is not divided, nor is the
wait for a link's lock.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from shmkv import _wait
from shmkv._mutex import Mutex
from shmkv._wait_any import Bell
from shmkv.errors import LLMException, link_busy
from shmkv.waiting import NEVER_NS, Waiting, Waits

log = logging.getLogger("shmkv")

Outcome = Callable[[int, "BaseException | None"], object]


class Steps(Protocol):
    """What takes turns: `waiting.Waiting`, or a pull of layers. `step` answers `_wait.NOT_YET` at the end of its turn."""

    @property
    def waiting(self) -> Waiting: ...
    def step(self, turn_ns: int) -> int: ...
    def ask_for_turn(self) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Job:
    """One wait, and who is told how it ended: `outcome(status, exception or None)`, on one of the threads."""

    def __init__(self, steps: Steps, outcome: Outcome) -> None:
        self.steps = steps
        self.sleeps_alone = False           # in a thread of its own
        self._outcome = outcome
        self._status = 0
        self._error: BaseException | None = None

    @property
    def deadline_ns(self) -> int:
        return self.steps.waiting.deadline_ns

    @property
    def is_late(self) -> bool:
        """Is its deadline over?"""
        return time.monotonic_ns() >= self.deadline_ns

    @property
    def has_news(self) -> bool:
        """Of one that is slept for: is there something for it to do?"""
        return self.steps.waiting.wait.has_news or self.is_late

    def take_turn(self, turn_ns: int) -> bool:
        """Is it over? `tell` is for later then."""
        try:
            self._status = self.steps.step(turn_ns)
        except BaseException as error:
            self._error = error
            self.steps.waiting.wait.count_out()     # one that was ended while it was armed has not run again
            return True
        return self._status != _wait.NOT_YET

    def tell(self) -> None:
        """How it ended."""
        error, self._error = self._error, None
        self._outcome(self._status, error)

    def fail(self, error: BaseException) -> None:
        """End one that no thread is inside of."""
        self.drop()
        self._outcome(0, error)

    def drop(self) -> None:
        """Give back what one holds that no thread is inside of."""
        self.steps.waiting.wait.count_out()
        self.steps.close()


class Turns:
    """At most `most` threads, each made when there is no other for a job; calls are safe from any thread.

    Nothing here is locked but the making of threads: the steps of a dict and of a queue are whole by themselves. Who takes a job
    out of `_queued` or `_armed` has it.
    """

    def __init__(self, most: int, waits: Waits) -> None:
        self._most = most                           # fewer where the system has no more threads
        self._waits = waits
        self._mutex = Mutex(busy=link_busy)
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._jobs: dict[Job, bool] = {}            # all that are not over
        self._queued: dict[Job, bool] = {}          # those that stand in the queue
        self._armed: dict[Job, bool] = {}           # those that are slept for together
        self._sleep_is_on = threading.Lock()        # taken while that sleep stands in the queue, or a thread is in it
        self._bell = Bell()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def start(self, job: Job) -> None:
        """Let a job take turns until it is over. LLMException if there is no thread for it."""
        self._jobs[job] = True                      # before the looks at who sleeps alone: see `_take_turn`
        try:
            if len(self._jobs) > len(self._threads):
                self._make_thread()
        except BaseException:
            self._jobs.pop(job, None)
            raise
        self._put(job)
        if len(self._jobs) > self._most:
            for other in list(self._jobs):
                if other.sleeps_alone:
                    other.steps.ask_for_turn()
        self._bell.wake()
        if self._is_closed:                         # since this wait was made, which was cancelled then: nobody else looks at it
            self._take_turn(job)

    def withdraw(self, job: Job) -> bool:
        """Take a job back that no thread is inside of; False if one is, which is told to end then."""
        if self._queued.pop(job, False) or self._armed.pop(job, False):
            self._jobs.pop(job, None)
            job.drop()
            self._bell.wake()
            return True
        job.steps.cancel()
        return False

    def close(self, timeout_s: float) -> None:
        """No thread afterwards. All waits were cancelled already, so each job is over with its next turn."""
        with self._mutex:
            self._is_closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        self._bell.wake()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        while True:
            try:
                turn = self._queue.get_nowait()
            except Empty:
                return
            if turn is not None:
                turn()

    def _put(self, job: Job) -> None:
        self._queued[job] = True
        self._queue.put(lambda: self._take_turn(job))

    def _make_thread(self) -> None:
        with self._mutex:
            if self._is_closed or len(self._threads) >= self._most:
                return
            thread = threading.Thread(target=self._run, name="shmkv-turns", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise LLMException(f"no thread for asynchronous calls: {error}") from error
                log.warning("asynchronous calls go on with %d threads: %s", len(self._threads), error)
                self._most = len(self._threads)
                return
            self._threads.append(thread)

    # -- on the threads ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (turn := self._queue.get()) is not None:
            turn()

    def _take_turn(self, job: Job) -> None:
        if not self._queued.pop(job, False):
            return                                  # it was withdrawn
        job.sleeps_alone = True                     # before the look at how many there are: `start` counts its job, then looks here
        if len(self._jobs) > self._most and not job.is_late and not self._is_closed:
            job.sleeps_alone = False
        is_over = job.take_turn(NEVER_NS if job.sleeps_alone else _wait.ARM_NS)
        was_alone, job.sleeps_alone = job.sleeps_alone, False
        if is_over:
            self._jobs.pop(job, None)               # first: who is told may start the next one
            job.tell()
        elif was_alone:
            self._put(job)                          # it was asked to, or its time is over
        else:
            self._armed[job] = True
            self._bell.wake()
            self._let_sleep()

    def _let_sleep(self) -> None:
        """A thread that has nothing else to do sleeps for those that are armed."""
        if self._armed and self._sleep_is_on.acquire(blocking=False):
            self._queue.put(self._sleep)

    def _sleep(self) -> None:
        """Sleep for all that are armed, until one of them has something to do; those that have go into the queue."""
        self._bell.see()
        jobs = list(self._armed)                    # after `see`: who comes later rings
        try:
            for job in self._slept_for(jobs):
                if self._armed.pop(job, False):
                    self._put(job)
        except BaseException as error:              # no memory for the sleep
            for job in jobs:
                if self._armed.pop(job, False):
                    self._jobs.pop(job, None)
                    job.fail(error)
        self._sleep_is_on.release()
        self._let_sleep()

    def _slept_for(self, jobs: list[Job]) -> list[Job]:
        """Sleep for these: which have to take a turn? All, without a sleep, when there are threads enough."""
        if not jobs or self._is_closed or len(self._jobs) <= self._most:
            return jobs
        if self._queued:                            # it came before `see`, so its ring is over, and may have no other thread
            return []
        deadline_ns = min(job.deadline_ns for job in jobs)
        _, do_tell = self._waits.sleep([job.steps.waiting for job in jobs], deadline_ns, self._bell)
        return [job for job in jobs if not do_tell or job.has_news]
