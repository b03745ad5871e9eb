"""A few threads that take turns at many waits.

As long as there are threads enough, each wait has one and sleeps in it until there is something to do. When there are more waits, a
thread sleeps in one for TURN_NS at the most and then puts it behind the others: so none waits for the end of another, whatever they
wait for. Threads that sleep are woken when a wait comes that has none. A copy is not divided, nor is the wait for a link's lock.
"""
from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from shmkv import _wait
from shmkv._mutex import Mutex
from shmkv.errors import LLMException, link_busy

TURN_NS = 20_000_000
NEVER_NS = 2**63 - 1

log = logging.getLogger("shmkv")

Outcome = Callable[[int, "BaseException | None"], object]


class Steps(Protocol):
    """What takes turns: `waiting.Waiting`, or a pull of layers. `step` answers `_wait.NOT_YET` at the end of its turn."""

    def step(self, turn_ns: int) -> int: ...
    def ask_for_turn(self) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Job:
    """One wait, and who is told how it ended: `outcome(status, exception or None)`, on one of the threads."""

    def __init__(self, steps: Steps, outcome: Outcome) -> None:
        self.steps = steps
        self._outcome = outcome

    def take_turn(self, turn_ns: int) -> bool:
        """Is it over?"""
        try:
            status = self.steps.step(turn_ns)
        except BaseException as error:
            self._outcome(0, error)
            return True
        if status == _wait.NOT_YET:
            return False
        self._outcome(status, None)
        return True


class Turns:
    """At most `most` threads, each made when there is no other for a job; calls are safe from any thread.

    Nothing here is locked but the making of threads: the steps of a dict and of a queue are whole by themselves.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._mutex = Mutex(busy=link_busy)
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting: dict[Job, bool] = {}         # those that no thread has
        self._running: dict[Job, bool] = {}         # those that one has
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def start(self, job: Job) -> None:
        """Let a job take turns until it is over. LLMException if there is no thread for it."""
        self._put(job)
        if len(self._running) + len(self._waiting) <= len(self._threads):
            return                                  # one of them has nothing to do
        if len(self._threads) < self._most and self._make_thread():
            return
        for running in list(self._running):
            running.steps.ask_for_turn()

    def withdraw(self, job: Job) -> bool:
        """Take a job back that no thread has now; False if one has, which is told to end then."""
        if self._waiting.pop(job, False):
            job.steps.close()
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
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        while True:
            try:
                self._take_turn(self._queue.get_nowait())
            except Empty:
                return

    def _put(self, job: Job) -> None:
        self._waiting[job] = True
        self._queue.put(job)

    def _make_thread(self) -> bool:
        with self._mutex:
            if self._is_closed or len(self._threads) >= self._most:
                return False
            thread = threading.Thread(target=self._run, name="shmkv-turns", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    log.warning("asynchronous calls go on with %d threads: %s", len(self._threads), error)
                    return False
                raise LLMException(f"no thread for asynchronous calls: {error}") from error
            self._threads.append(thread)
            return True

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._take_turn(job)

    def _take_turn(self, job: Job | None) -> None:
        if job is None:
            return
        self._running[job] = True                   # before the look at the queue: `start` puts a job there before its look here
        try:
            if self._waiting.pop(job, False):       # else it was withdrawn
                turn_ns = NEVER_NS if self._queue.empty() else time.monotonic_ns() + TURN_NS
                if not job.take_turn(turn_ns):
                    self._put(job)
        finally:
            self._running.pop(job, None)


async def take_turns(turns: Turns, steps: Steps) -> int:
    """The status of `steps`, or what it raises, while the event loop goes on. Cancelled, it ends as soon as nothing of it runs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()

    def tell(status: int, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(status)
        else:
            done.set_exception(error)

    def outcome(status: int, error: BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(tell, status, error)
        except RuntimeError:
            log.debug("the event loop of an asynchronous call is closed")

    job = Job(steps, outcome)
    turns.start(job)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if not turns.withdraw(job):
            await _end_of(done)
        raise


async def _end_of(done: asyncio.Future[int]) -> None:
    """Wait for the end of something that was cancelled, however often the wait for that is cancelled."""
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue
    done.exception()            # looked at, so that nobody misses it
