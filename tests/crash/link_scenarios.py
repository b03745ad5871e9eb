"""The actor makes or removes a link: as in scenarios.py."""
from __future__ import annotations

from peer import req

from crash.scenarios import Scenario, arming

NO_HANDLE = """
import shmkv.link
def no_memory(*_):
    raise MemoryError("as the test wants")
made, shmkv.link.LinkHandle = shmkv.link.LinkHandle, no_memory
try:
    assert agent.link([1]) == ["LLM_LINK_FAILED", ["LLM_LINK_FAILED"]]
finally:
    shmkv.link.LinkHandle = made
"""


class Link(Scenario):
    """A new decoder links to a prompt."""

    actor = 5
    other = 1
    both_act = True

    def prepare(self) -> None:
        super().prepare()
        self.house.start([5])

    def act(self) -> None:
        self.peer.send("link", ids=[1])

    def is_done(self) -> None:
        """The new link works, if there is anybody at its other end."""
        if self.house.peers[1].is_alive:
            self.house.destination(5)
            self.house.links.add((5, 1))


class LinkWithoutMemory(Link):
    """The same, and there is no memory for what the decoder keeps of the link."""

    def act(self) -> None:
        self.peer.send("execute", code=NO_HANDLE)

    def is_done(self) -> None:
        """It was told so, and the record is free again: with memory the next link works."""
        if self.house.peers[1].is_alive:
            self.house.link(5, [1])
            super().is_done()


class LinkOverDead(Link):
    """The same, into the record of a decoder that was killed."""

    def prepare(self) -> None:
        super().prepare()
        self.house.peers[3].kill()


class LinkMore(Link):
    """The same when all records of the prompt's directory are in use."""

    def prepare(self) -> None:
        super().prepare()
        for cluster_id in (11, 12):
            peer = self.house.namespace.start_cluster("DECODER", cluster_id, env=self.house.env)
            assert peer.call("link", ids=[1])[0] == "LLM_SUCCESS"


class Unlink(Scenario):
    """A decoder removes its link in turn."""

    actor = 2
    other = 1
    both_act = True

    def act(self) -> None:
        self.peer.send("unlink", ids=[1])

    def forget_links(self) -> None:
        self.house.links.discard((2, 1))


class UnlinkByForce(Unlink):
    def act(self) -> None:
        self.peer.send("unlink", ids=[1], force=True)


class UnlinkIncoming(Unlink):
    """A prompt removes a link that a decoder made to it."""

    actor = 1
    other = 2

    def act(self) -> None:
        self.peer.send("unlink", ids=[2])


class UnlinkIncomingInUse(UnlinkIncoming):
    """The same while the decoder stands still in the middle of a pull and holds the link's lock."""

    def prepare(self) -> None:
        super().prepare()
        number = self.house.publish(1, "new")
        decoder = self.house.peers[2]
        decoder.call("execute", code=arming("copying", True))
        decoder.send("pull", key=req(1, number), name="buffer")
        assert decoder.wait_stopped_or_dead()

    def before_answer(self) -> None:
        decoder = self.house.peers[2]
        decoder.cont()
        assert decoder.receive().outcome in ("LLM_SUCCESS", "LLM_WAIT_PROCESS_TIMEOUT")

    def is_running(self, link: tuple[int, int]) -> bool:
        return 2 not in link

    def act(self) -> None:
        self.peer.send("unlink", ids=[2], timeout=self.timeout_ms)

    timeout_ms = 20_000


class UnlinkIncomingInVain(UnlinkIncomingInUse):
    """The same with a deadline that ends first."""

    timeout_ms = 50

    def before_answer(self) -> None:
        """The decoder stands still."""

    def after_answer(self) -> None:
        super().before_answer()
