"""Scenarios in which blocks are pulled into memory of the caller."""
from __future__ import annotations

from typing import ClassVar

from crash.scenarios import LOOK_FOR_THE_DEAD, NO_RECYCLING, Pull, Scenario

MANAGER = "agent.dist.kv_cache_manager"
# Eight blocks of 64 bytes a tensor: a row of the house's caches makes two.
BLOCKS = f"""
desc = shmkv.CacheDesc(4, [8, 32], shmkv.DataType.DT_FLOAT16)
agent.caches["blocks"] = {MANAGER}.allocate_blocks_cache(desc, shmkv.BlocksCacheKey(1, 5))
agent.fill("blocks", 77)
"""
REGISTER = f"""
agent.memory = bytearray(4 * 8 * 64)
desc = shmkv.CacheDesc(4, [8, 32], shmkv.DataType.DT_FLOAT16)
agent.caches["blocks"] = {MANAGER}.register_blocks_cache(desc, agent.memory)
"""
PULL_ROW = MANAGER + ".pull_blocks(shmkv.CacheKey(1, {number}), agent.caches['blocks'], [], [5, 2])"
PULL_BLOCKS = f"{MANAGER}.pull_blocks(shmkv.BlocksCacheKey(1, 5), agent.caches['blocks'], [0, 3, 4], [6, 1, 2])"
ARE_RIGHT = """
import reference
sent = reference.pattern(reference.Geometry(4, 1, 8, 64), 77)[:, 0]
wanted = np.zeros((4, 8, 64), np.uint8)
wanted[:, [6, 1, 2]] = sent[:, [0, 3, 4]]
result = bytes(agent.memory) == wanted.tobytes()
"""


class PullRowIntoBlocks(Pull):
    """A decoder pulls a row into blocks of memory of its own; the request key is used up by that."""

    def prepare(self) -> None:
        super().prepare()
        self.peer.call("execute", code=REGISTER)

    def act(self) -> None:
        self.peer.send("execute", code=PULL_ROW.format(number=self.number))


class PullBlocks(Scenario):
    """A decoder pulls blocks of a blocks cache into blocks of memory of its own; a blocks key is never used up."""

    actor = 2
    other = 1
    both_act = True
    env: ClassVar[dict[str, str]] = NO_RECYCLING

    def prepare(self) -> None:
        super().prepare()
        self.house.peers[1].call("execute", code=BLOCKS)
        for decoder in (2, 3):
            self.house.peers[decoder].call("execute", code=REGISTER)

    def act(self) -> None:
        self.peer.send("execute", code=PULL_BLOCKS)

    def is_done(self) -> None:
        """If there was somebody to pull from all the time."""
        if self.house.peers[1].is_alive:
            assert self.peer.call("execute", code=ARE_RIGHT)

    def pull_by_another(self) -> None:
        """The third cluster gets them, whoever died; the owner has its memory back afterwards, whatever a dead hazard says."""
        self.house.peers[3].call("execute", code=PULL_BLOCKS)
        assert self.house.peers[3].call("execute", code=ARE_RIGHT)
        before = self.house.namespace.segments()
        self.house.peers[1].call("deallocate", name="blocks")
        self.house.peers[1].call("execute", code=LOOK_FOR_THE_DEAD)
        assert len(before - self.house.namespace.segments()) == 1


BLOCK_SCENARIOS: dict[str, type[Scenario]] = {"pull a row into blocks": PullRowIntoBlocks, "pull blocks": PullBlocks}
