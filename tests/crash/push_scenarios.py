"""Pushes of the matrix."""
from __future__ import annotations

from typing import ClassVar

from crash.scenarios import NO_RECYCLING, Scenario

PUSH_AND_WAIT = """
agent.push("source", [[2, {addresses}, None, 1]])
status = agent.tasks["task"][0].synchronize()
if status:
    raise shmkv.LLMException("the push was not done", status_code=status)
"""


class Push(Scenario):
    """A prompt pushes two layers to a decoder."""

    actor = 1
    other = 2
    both_act = True
    env: ClassVar[dict[str, str]] = NO_RECYCLING

    def prepare(self) -> None:
        super().prepare()
        self.peer.call("listen")            # a push that fails is told to the log
        self.peer.call("allocate", name="source", num_tensors=4, shape=(2, 64))
        self.peer.call("noise", name="source", seed=5)
        self.house.peers[2].call("allocate", name="pushed", num_tensors=4, shape=(2, 64))
        self.addresses = self.house.peers[2].call("addresses", name="pushed")

    def act(self) -> None:
        self.peer.send("execute", code=PUSH_AND_WAIT.format(addresses=self.addresses))

    def after_death(self) -> None:
        """The decoder gets the destination's memory back, whatever the dead one's hazard says."""
        before = self.house.namespace.segments()
        self.house.peers[2].call("deallocate", name="pushed")
        assert len(before - self.house.namespace.segments()) == 1

    def is_done(self) -> None:
        if self.house.peers[2].is_alive:
            pushed, source = self.house.peers[2].read("pushed"), self.peer.read("source")
            assert (pushed[:, :, 0] == source[:, :, 1]).all()


PUSH_SCENARIOS: dict[str, type[Scenario]] = {"push": Push}
