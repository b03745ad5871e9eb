"""An event loop in another process, on a thread of its own, and the calls of asyncio that run there under names."""
from __future__ import annotations

from peer import Peer

# Runs an event loop on a thread of its own; `agent.call(coroutine)` runs a coroutine there, `agent.finish()` ends it.
LOOP = """
import asyncio, threading
manager = agent.dist.kv_cache_manager
agent.loop = asyncio.new_event_loop()
agent.loop_thread = threading.Thread(target=agent.loop.run_forever)
agent.loop_thread.start()
agent.call = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, agent.loop)
agent.tasks = {}
async def outcome(awaitable):
    try:
        return str(await awaitable)
    except asyncio.CancelledError:
        return "cancelled"
    except shmkv.LLMException as error:
        return error.status_code.name
async def start(name, awaitable):
    agent.tasks[name] = asyncio.ensure_future(outcome(awaitable))
agent.begin = lambda name, awaitable: agent.call(start(name, awaitable)).result(10)
agent.cancel = lambda name: agent.loop.call_soon_threadsafe(agent.tasks[name].cancel)
async def wait(name):
    return await asyncio.wait_for(asyncio.shield(agent.tasks[name]), 15)
agent.end = lambda name: agent.call(wait(name)).result(20)
async def layers(iterator):
    found = []
    async with iterator as each:
        async for layer in each:
            found.append(layer)
            agent.found = found
    return found
agent.layers = layers
def finish():
    agent.loop.call_soon_threadsafe(agent.loop.stop)
    agent.loop_thread.join(10)
    agent.loop.close()
agent.finish = finish
"""


def begin(d: Peer, name: str, call: str) -> None:
    d.call("execute", code=f"manager = agent.dist.kv_cache_manager\nagent.begin({name!r}, {call})")


def end(d: Peer, name: str) -> str:
    return str(d.call("execute", code=f"result = agent.end({name!r})"))


def finish(d: Peer) -> None:
    d.call("execute", code="agent.finish()")


def pulling(number: int, how: str = ", wait=True") -> str:
    return f"manager.pull_cache_async(shmkv.CacheKey(1, {number}, 0), agent.caches['kv']{how})"
