"""What the actor is doing when it comes to a crash point: one class a call of the API, with all that has to stand before it.

`prepare` furnishes the house and leaves nothing to do but the one call; `act` sends that call to the actor, which does not answer
when it dies or stops on the way.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from peer import Peer, req

from crash.house import DECODERS, House

NO_RECYCLING = {"SHMKV_RECYCLE_BYTES": "0"}
# An owner looks for dead readers at most every 20 ms, so that one call of it may come too early.
LOOK_FOR_THE_DEAD = "import time\nfor _ in range(10):\n    agent.collect()\n    time.sleep(0.01)"

def arming(point: str, stop: bool, after: str = "") -> str:
    """For the command `execute`."""
    return f"from shmkv import _crash\n_crash.arm({point!r}, {stop}, {after!r})"


class Scenario(ABC):
    """A call of cluster `actor`; `other` is the one at the other end of it."""

    actor = 1
    other = 2
    both_act: ClassVar[bool] = False        # is there a record or a row that both of them use in the call?
    env: ClassVar[dict[str, str]] = {}

    def __init__(self, house: House) -> None:
        self.house = house

    @property
    def peer(self) -> Peer:
        return self.house.peers[self.actor]

    def prepare(self) -> None:
        self.house.furnish()
        for decoder in DECODERS:
            self.house.destination(decoder)

    def arm(self, point: str, *, stop: bool) -> None:
        """The actor will die or stop at a point."""
        self.peer.call("execute", code=arming(point, stop))

    @abstractmethod
    def act(self) -> None:
        """Send the call."""

    def is_done(self) -> None:
        """What has to be looked at when the call went through in spite of all."""

    def forget_links(self) -> None:
        """Links that the call itself removes."""

    def after_death(self) -> None:
        """What those that live can do now that the actor has died."""

    def before_answer(self) -> None:
        """Let those go on that `prepare` has stopped, if the call needs them."""

    def after_answer(self) -> None:
        """Let them go on, if the call had to do without."""

    def is_running(self, link: tuple[int, int]) -> bool:
        """Are both ends of a link at work, as far as `prepare` is concerned?"""
        return True

    def assert_not_taken_for_dead(self) -> None:
        """The actor stands still; those that are linked to it see a living peer."""
        for decoder, prompt in self.house.links:
            if prompt == self.actor and self.is_running((decoder, prompt)):
                self.house.peers[decoder].call("check_link", cluster_id=prompt)


class Allocate(Scenario):
    def act(self) -> None:
        self.peer.send("allocate", name="new", num_tensors=4, shape=(2, 64), keys=(req(1, 1000),))


class AllocateManyRows(Scenario):
    """More keys than the first key index and the first tables have room for."""

    def act(self) -> None:
        self.peer.send("allocate", name="new", num_tensors=4, shape=(600, 8), keys=tuple(req(1, 1000 + row) for row in range(600)))


class GiveBackIndex(Scenario):
    """Collect after the key index grew out of a table that has pages of its own."""

    def prepare(self) -> None:
        super().prepare()
        for first, rows in ((1000, 600), (2000, 1600)):
            self.peer.call("allocate", name=f"new {first}", num_tensors=1, shape=(rows, 8),
                           keys=tuple(req(1, first + row) for row in range(rows)))

    def act(self) -> None:
        self.peer.send("collect")


class Reuse(Scenario):
    """Allocate again in the memory of a cache that was freed."""

    def prepare(self) -> None:
        super().prepare()
        self.peer.call("allocate", name="old", num_tensors=4, shape=(2, 64))
        self.peer.call("deallocate", name="old")

    def act(self) -> None:
        self.peer.send("allocate", name="new", num_tensors=4, shape=(2, 64), keys=(req(1, 1000),))


class Publish(Scenario):
    def prepare(self) -> None:
        super().prepare()
        self.peer.call("allocate", name="new", num_tensors=4, shape=(2, 64), keys=(req(1, 1000),), publish=False)

    def act(self) -> None:
        self.peer.send("publish", name="new")


class _WithKey(Scenario):
    def prepare(self) -> None:
        super().prepare()
        self.number = self.house.publish(1, "new")


class Bind(_WithKey):
    """A row that has a key gets another one."""

    def act(self) -> None:
        self.peer.send("bind", name="new", keys=[(0, req(1, 1001))])


class Unbind(_WithKey):
    def act(self) -> None:
        self.peer.send("unbind", name="new", rows=[0])


class RemoveKey(_WithKey):
    def act(self) -> None:
        self.peer.send("remove_key", key=req(1, self.number))


class Free(Scenario):
    """Deallocate a cache without keys; its memory goes back to the system."""

    env: ClassVar[dict[str, str]] = NO_RECYCLING

    def prepare(self) -> None:
        super().prepare()
        self.peer.call("allocate", name="new", num_tensors=4, shape=(2, 64))

    def act(self) -> None:
        self.peer.send("deallocate", name="new")


class FreeAndKeep(Free):
    """Deallocate a cache whose memory is kept for the next one."""

    env: ClassVar[dict[str, str]] = {}


class Settle(Scenario):
    """Collect after a decoder marked the last part of a key and died before it could use the key up."""

    def prepare(self) -> None:
        super().prepare()
        number = self.house.publish(1, "new")
        mortal = self.house.namespace.start({**self.house.env, "SHMKV_CRASH_AT": "consuming"})
        self.house.peers[5] = mortal
        mortal.call("init", role="DECODER", cluster_id=5, options={}, raw={})
        mortal.call("link", ids=[1])
        mortal.call("allocate", name="buffer", num_tensors=4, shape=(2, 64))
        halves = [[(0, 0), (0, 0)], [(1, 1), (1, 1)]]
        mortal.call("execute", code=pull_layers(number, *halves[0]))
        mortal.send("execute", code=pull_layers(number, *halves[1]))
        assert not mortal.wait_stopped_or_dead()

    def act(self) -> None:
        self.peer.send("execute", code=LOOK_FOR_THE_DEAD)


def pull_layers(number: int, *ranges: tuple[int, int]) -> str:
    (src, dst) = ranges
    return (f"agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKey(1, {number}, 0), agent.caches['buffer'], "
            f"src_layer_range=range({src[0]}, {src[1] + 1}), dst_layer_range=range({dst[0]}, {dst[1] + 1}))")


class Finalize(_WithKey):
    def act(self) -> None:
        self.peer.send("finalize")

    def is_done(self) -> None:
        self.peer.close()

    def assert_not_taken_for_dead(self) -> None:
        """It says itself that it leaves."""


class Init(Scenario):
    """A newcomer joins."""

    actor = 9
    other = 1

    def prepare(self) -> None:
        super().prepare()
        self.house.peers[9] = self.house.namespace.start(self.house.env)

    def act(self) -> None:
        self.peer.send("init", role="PROMPT", cluster_id=9, options={}, raw={})


class FirstInit(Init):
    """The first one of all joins."""

    def prepare(self) -> None:
        self.house.peers[9] = self.house.namespace.start(self.house.env)


class LastFinalize(FirstInit):
    """The last one of all leaves."""

    def prepare(self) -> None:
        self.house.start([9])

    def act(self) -> None:
        self.peer.send("finalize")

    def is_done(self) -> None:
        self.peer.close()


class Sweep(Init):
    """A newcomer joins after another process was killed, and removes what that one left."""

    def prepare(self) -> None:
        super().prepare()
        self.house.start([5])
        self.house.peers[5].call("allocate", name="left", num_tensors=4, shape=(2, 64))
        self.house.peers.pop(5).kill()


class Pull(Scenario):
    """A decoder pulls a whole row by a request key, which is used up by that."""

    actor = 2
    other = 1
    both_act = True
    env: ClassVar[dict[str, str]] = NO_RECYCLING

    def prepare(self) -> None:
        super().prepare()
        self.number = self.house.publish(1, "new")

    def act(self) -> None:
        self.peer.send("pull", key=req(1, self.number), name="buffer")

    def let_owner_look(self) -> None:
        """The owner notices that a reader died, and uses up what that one had pulled to the last part."""
        self.house.peers[1].call("execute", code=LOOK_FOR_THE_DEAD)

    def assert_memory_is_free(self) -> None:
        """The owner gets the cache's memory back, whatever the dead reader's hazard says."""
        before = self.house.namespace.segments()
        prompt = self.house.peers[1]
        prompt.call("deallocate", name="new")
        prompt.call("remove_key", key=req(1, self.number))
        assert len(before - self.house.namespace.segments()) == 1


class PullLastPart(Pull):
    """The same for the second half of the layers, after the first."""

    def prepare(self) -> None:
        super().prepare()
        self.peer.call("execute", code=pull_layers(self.number, (0, 0), (0, 0)))

    def act(self) -> None:
        self.peer.send("execute", code=pull_layers(self.number, (1, 1), (1, 1)))


class PullWaitedFor(Pull):
    """The same while the prompt wants to remove the link and sleeps until it has the lock; it stands still when it is given it."""

    def arm(self, point: str, *, stop: bool) -> None:
        self.peer.call("execute", code=arming(point, stop, after="copying"))
        super().act()
        assert self.peer.wait_stopped_or_dead()
        prompt = self.house.peers[1]
        prompt.call("execute", code=arming("word-waiting", True))
        prompt.send("unlink", ids=[2])
        assert prompt.wait_stopped_or_dead()

    def act(self) -> None:
        self.peer.cont()

    def before_answer(self) -> None:
        prompt = self.house.peers[1]
        prompt.cont()
        assert prompt.receive().value == ["LLM_SUCCESS", ["LLM_SUCCESS"]], "it has the lock, though nobody woke it"

    def forget_links(self) -> None:
        self.house.links.discard((2, 1))

    def is_running(self, link: tuple[int, int]) -> bool:
        return 1 not in link
