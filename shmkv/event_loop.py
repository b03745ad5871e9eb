"""Waits that take turns, for the event loop that awaits them.

The one module that needs asyncio. It is imported by the first call that is awaited: who never awaits does not wait for that import.
"""
from __future__ import annotations

import asyncio
import logging

from shmkv.turns import Job, Steps, Turns

log = logging.getLogger("shmkv")


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
