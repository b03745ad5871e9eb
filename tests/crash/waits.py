"""Scenarios in which somebody waits: the one that dies, or the one that is waited for."""
from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from memory import wait_until
from peer import Peer, req
from waiters import memory_waiters, waiters

from crash.house import NOT_EXIST, PATIENCE_MS, TENSORS, TIMED_OUT
from crash.scenarios import NO_RECYCLING, Pull, Scenario


def _stands(peer: Peer) -> bool:
    """Does its main thread sleep, stand still, or is it dead?"""
    return Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0] in "STZ"


class PullAndWait(Pull):
    """A decoder pulls a row of which one layer is published; the other one comes when it waits, or stands still on the way."""

    def prepare(self) -> None:
        Scenario.prepare(self)
        self.number = self.house.publish(1, "new")
        self.house.peers[1].call("publish", name="new", layers=1)

    def begin(self) -> None:
        self.peer.send("pull", key=req(1, self.number), name="buffer", wait=True)

    def act(self) -> None:
        prompt = self.house.peers[1]
        self.begin()
        wait_until(lambda: _stands(self.peer) and (waiters(self.house.namespace) > 0 or self._is_at_point()), "it stands")
        prompt.call("publish", name="new")

    def _is_at_point(self) -> bool:
        return Path(f"/proc/{self.peer.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"


class PullLayers(PullAndWait):
    """The same, layer by layer: each is marked as pulled when it is there."""

    def begin(self) -> None:
        self.peer.send("execute", code=f"for layer in agent.dist.kv_cache_manager.pull_layers(shmkv.CacheKey(1, {self.number}), "
                                       f"agent.caches['buffer']):\n    pass")


class PullForWaitingOwner(Pull):
    """A decoder pulls a row whose owner waits for the memory that this gives free."""

    env: ClassVar[dict[str, str]] = NO_RECYCLING

    def prepare(self) -> None:
        super().prepare()
        self.house.peers[1].call("execute", code=f"""
import errno, threading
from shmkv import segment
real, caches, number = segment.create_and_map, agent.dist._cluster.caches, agent.caches["new"].cache_id
agent.deallocate("new")
def short(*arguments, **how):
    if threading.current_thread() is agent.thread and any(cache.cache_id == number for cache in caches):
        raise OSError(errno.ENOSPC, "short")
    return real(*arguments, **how)
segment.create_and_map = short
agent.thread = threading.Thread(target=agent.allocate, args=("more",), daemon=True,
                                kwargs={{"wait_ms": {PATIENCE_MS}, "num_tensors": 4, "shape": (2, 64)}})
agent.thread.start()
""")
        wait_until(lambda: memory_waiters(self.house.namespace) == 1, "the owner waits")

    def is_done(self) -> None:
        if self.house.peers[1].is_alive:
            self.assert_memory_is_free()

    def assert_memory_is_free(self) -> None:
        """The owner has got what it waited for, and long before its deadline."""
        code = f"agent.thread.join({PATIENCE_MS / 2000})\nresult = 'more' in agent.caches"
        assert self.house.peers[1].call("execute", code=code) is True
        self.house.peers[1].call("deallocate", name="more")


class _UnderWaiter(Scenario):
    """A newcomer waits for a row of the actor."""

    actor = 1
    other = 5
    both_act = True
    outcomes: ClassVar[set[str]] = {"LLM_SUCCESS", TIMED_OUT}

    def prepare(self) -> None:
        super().prepare()
        self.house.start([5])
        self.waiter = self.house.peers[5]
        assert self.waiter.call("link", ids=[1])[0] == "LLM_SUCCESS"
        self.waiter.call("allocate", name="buffer", num_tensors=TENSORS, shape=(2, 64))
        self.peer.call("allocate", name="new", num_tensors=TENSORS, shape=(2, 64), keys=(req(1, 1000),), publish=False)
        self.waiter.send("pull", key=req(1, 1000), name="buffer", wait=True)
        wait_until(lambda: waiters(self.house.namespace) == 1, "it waits")

    def after_answer(self) -> None:
        """It hears of what happened, long before its deadline."""
        answer = self.waiter.receive()
        assert answer.outcome in self.outcomes, answer.trace
        assert answer.ms < PATIENCE_MS / 2


class PublishToWaiter(_UnderWaiter):
    def act(self) -> None:
        self.peer.send("publish", name="new")


class RemoveUnderWaiter(_UnderWaiter):
    outcomes: ClassVar[set[str]] = {NOT_EXIST, TIMED_OUT}

    def act(self) -> None:
        self.peer.send("remove_key", key=req(1, 1000))


class FinalizeUnderWaiter(_UnderWaiter):
    outcomes: ClassVar[set[str]] = {TIMED_OUT}

    def act(self) -> None:
        self.peer.send("finalize")

    def is_done(self) -> None:
        self.peer.close()

    def assert_not_taken_for_dead(self) -> None:
        """It says itself that it leaves."""


WAITS: dict[str, type[Scenario]] = {
    "pull and wait": PullAndWait, "pull layers": PullLayers, "pull for a waiting owner": PullForWaitingOwner,
    "publish to a waiter": PublishToWaiter, "remove under a waiter": RemoveUnderWaiter,
    "finalize under a waiter": FinalizeUnderWaiter,
}
