"""Scenarios in which a row is lent: views and forks, made, held and given back."""
from __future__ import annotations

from typing import ClassVar

from peer import req

from crash.scenarios import LOOK_FOR_THE_DEAD, Pull, Scenario

MANAGER = "agent.dist.kv_cache_manager"
VIEW = "agent.view = " + MANAGER + ".view_cache(shmkv.CacheKey(1, {number}))"
FORK = "agent.fork = " + MANAGER + ".fork_cache(shmkv.CacheKey(1, {number}))"
CLOSE = "agent.view.close()\ndel agent.view"
DROP = f"{MANAGER}.deallocate_cache(agent.fork)\ndel agent.fork"
# The pattern of the key in every tensor, by whatever was made of it.
ARE_RIGHT = """
import reference
sent = reference.pattern(reference.geometry(4, [2, 64], 2), {number})[:, 0, 0]
result = [tensor.numpy().tobytes() == wanted.tobytes() for name in ("view", "fork") if hasattr(agent, name)
          for tensor, wanted in zip(getattr(agent, name).tensors, sent, strict=True)]
"""
# Whatever is open is closed, as a program would that goes on.
END = """
view, fork = agent.__dict__.pop("view", None), agent.__dict__.pop("fork", None)
if view is not None:
    view.close()
if fork is not None:
    agent.dist.kv_cache_manager.deallocate_cache(fork)
del view, fork
"""


class View(Pull):
    """A decoder opens a view of a row; the request key is used up by that."""

    code: ClassVar[str] = VIEW

    def act(self) -> None:
        self.peer.send("execute", code=self.code.format(number=self.number))

    def is_done(self) -> None:
        """What was opened shows the right bytes, whoever is dead by now; then it is given back."""
        assert all(self.peer.call("execute", code=ARE_RIGHT.format(number=self.number)))
        self.peer.call("execute", code=END)


class Fork(View):
    """A decoder forks a row."""

    code = FORK


class CloseView(View):
    """A decoder closes a view."""

    code = CLOSE
    opening: ClassVar[str] = VIEW

    def prepare(self) -> None:
        super().prepare()
        self.peer.call("execute", code=self.opening.format(number=self.number))


class DropFork(CloseView):
    """A decoder deallocates a fork, of which it has no view."""

    code = DROP
    opening = FORK


class PullBesideLent(Pull):
    """A decoder pulls while it holds a view and a fork of another cache."""

    def prepare(self) -> None:
        super().prepare()
        self.lent = self.house.publish(1, "lent")
        self.peer.call("execute", code=VIEW.format(number=self.lent)[:-1] + ", consume=False)")
        self.peer.call("execute", code=FORK.format(number=self.lent))
        self.prompt_is_asked()
        assert self.house.namespace.segments() == self.before, "the owner wants it no more, and has to wait"

    def prompt_is_asked(self) -> None:
        self.before = self.house.namespace.segments()
        self.house.peers[1].call("deallocate", name="lent")
        self.house.peers[1].call("remove_key", key=req(1, self.lent))

    def assert_memory_is_free(self) -> None:
        """Of what the dead one pulled, and of what it had been lent."""
        self.house.peers[1].call("execute", code=LOOK_FOR_THE_DEAD)
        assert len(self.before - self.house.namespace.segments()) == 1
        super().assert_memory_is_free()

    def is_done(self) -> None:
        is_there = self.house.peers[1].is_alive
        before = len(self.house.namespace.segments())
        found = self.peer.call("execute", code=ARE_RIGHT.format(number=self.lent))
        assert (len(found), all(found)) == (8, True)
        self.peer.call("execute", code=END)
        if is_there:
            self.house.peers[1].call("collect")
            assert len(self.house.namespace.segments()) == before - 1


LEND_SCENARIOS: dict[str, type[Scenario]] = {
    "view": View, "close a view": CloseView, "fork": Fork, "drop a fork": DropFork, "pull beside a view and a fork": PullBesideLent}
