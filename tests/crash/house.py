"""Four clusters in processes of their own: two prompts (1, 4), two decoders (2, 3), each decoder linked to both prompts.

One of them is the actor: it comes to a crash point in the middle of some call. The house knows who lives, and what must hold for
all others whoever dies: `judge` looks at it, `restart` brings the dead back under their old cluster ids.
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cache_bytes  # noqa: F401 - the agents need it beside them
import numpy as np
import reference
from peer import Answer, Namespace, Peer, by_id, req

PATIENCE_MS = 20_000
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
PROMPTS, DECODERS = (1, 4), (2, 3)
ROLES = {1: "PROMPT", 4: "PROMPT", 9: "PROMPT", 2: "DECODER", 3: "DECODER", 5: "DECODER"}
SHAPE = (2, 64)
TENSORS = 4
WORK_GENERATION = 4711
# Cluster 3: row 0 of cluster 4's cache, again and again, until it is told to end.
WORK = """
import threading
import reference
cache, agent.done, agent.wrong, agent.enough = agent.caches["work"], 0, [], threading.Event()
wanted = [tensor.tobytes() for tensor in reference.pattern(reference.geometry({tensors}, {shape}, 2), {generation})[:, :, 0]]
def work():
    while not agent.enough.wait(0.001):
        try:
            agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(4, {cache_id}), cache)
            right = [tensor.numpy()[0].tobytes() for tensor in cache.tensors] == wanted
            agent.wrong += [] if right else ["wrong bytes"]
        except Exception as error:
            agent.wrong.append(repr(error))
        agent.done += 1
agent.worker = threading.Thread(target=work, daemon=True)
agent.worker.start()
"""
END_WORK = """
before = agent.done
while agent.worker.is_alive() and agent.done == before:
    agent.enough.wait(0.001)
agent.enough.set()
agent.worker.join(20)
result = [agent.worker.is_alive(), agent.wrong[:5]]
"""


class House:
    """`peers` by cluster id; a link is a (decoder, prompt) pair of ids that was made and not removed."""

    def __init__(self, namespace: Namespace, env: dict[str, str]) -> None:
        self.namespace = namespace
        self.env = env
        self.peers: dict[int, Peer] = {}
        self.links: set[tuple[int, int]] = set()
        self._next_req = 1
        self._works = False

    # -- setting up -------------------------------------------------------------------------------------------------

    def start(self, cluster_ids: Iterable[int], **more: Any) -> None:
        """Processes that joined; all interpreters start side by side."""
        ids = list(cluster_ids)
        for cluster_id in ids:
            self.peers[cluster_id] = self.namespace.start(self.env)
        for cluster_id in ids:
            self.peers[cluster_id].call("init", role=ROLES[cluster_id], cluster_id=cluster_id,
                                        options={"sync_kv_timeout": PATIENCE_MS}, raw=more.get("raw", {}))

    def link(self, decoder: int, prompts: Iterable[int]) -> None:
        """Make links that have to work."""
        wanted = list(prompts)
        assert self.peers[decoder].call("link", ids=wanted) == ["LLM_SUCCESS", ["LLM_SUCCESS"] * len(wanted)]
        self.links |= {(decoder, prompt) for prompt in wanted}

    def furnish(self) -> None:
        """The four clusters with their four links."""
        self.start((*PROMPTS, *DECODERS))
        for decoder in DECODERS:
            self.link(decoder, PROMPTS)

    # -- two that have no part in it ----------------------------------------------------------------------------------

    def begin_work(self) -> None:
        """Cluster 3 pulls from cluster 4 until the end, whatever the others do, if both are there."""
        if len(self.living((3, 4))) == 2:
            self.peers[4].call("allocate", name="work", num_tensors=TENSORS, shape=SHAPE)
            self.peers[4].call("fill", name="work", generation=WORK_GENERATION)
            cache_id = self.peers[4].call("execute", code="result = agent.caches['work'].cache_id")
            self.peers[3].call("allocate", name="work", num_tensors=TENSORS, shape=SHAPE)
            self.peers[3].call("execute", code=WORK.format(tensors=TENSORS, shape=list(SHAPE), generation=WORK_GENERATION,
                                                           cache_id=cache_id))
            self._works = True

    def end_work(self) -> None:
        """It was not disturbed, and goes on until now."""
        if self._works and self.peers[3].is_alive:
            assert self.peers[3].call("execute", code=END_WORK) == [False, []]

    # -- caches, keys, pulls ----------------------------------------------------------------------------------------

    def publish(self, prompt: int, name: str = "", rows: int = 2) -> int:
        """A cache whose row 0 has a new key and the pattern of that key: its req_id."""
        number, self._next_req = self._next_req, self._next_req + 1
        name = name or f"cache {number}"
        peer = self.peers[prompt]
        peer.call("allocate", name=name, num_tensors=TENSORS, shape=(rows, *SHAPE[1:]), keys=(req(prompt, number),), publish=False)
        peer.call("fill", name=name, generation=number)
        peer.call("publish", name=name)
        return number

    def destination(self, decoder: int) -> None:
        """The decoder's own buffer, made once."""
        self.peers[decoder].call("allocate", name="buffer", num_tensors=TENSORS, shape=SHAPE)

    def pull(self, decoder: int, prompt: int, number: int) -> Answer:
        """One pull of a key; the bytes are looked at by whoever asks."""
        return self.peers[decoder].attempt("pull", key=req(prompt, number), name="buffer")

    def assert_right(self, decoder: int, number: int) -> None:
        """The decoder's buffer holds the pattern of the key in row 0."""
        found = self.peers[decoder].read("buffer")
        wanted = reference.pattern(reference.geometry(TENSORS, list(SHAPE), 2), number)
        assert np.array_equal(found[:, :, 0], wanted[:, :, 0])

    def living(self, cluster_ids: Iterable[int]) -> list[int]:
        return [each for each in cluster_ids if each in self.peers and self.peers[each].is_alive]

    # -- what must hold ---------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Every link between two living clusters works; a link to a dead one says so long before its deadline."""
        for decoder, prompt in sorted(self.links):
            if not self.peers[decoder].is_alive:
                continue
            if self.peers[prompt].is_alive:
                number = self.publish(prompt)
                assert self.pull(decoder, prompt, number).outcome == reference.SUCCESS, (decoder, prompt)
                self.assert_right(decoder, number)
            else:
                self.assert_says_gone(decoder, prompt, 1)

    def assert_says_gone(self, decoder: int, prompt: int, number: int) -> None:
        answer = self.pull(decoder, prompt, number)
        assert answer.outcome == TIMED_OUT, answer.trace
        assert answer.ms < PATIENCE_MS / 2

    def restart(self) -> None:
        """The dead come back under their ids. Their old links never show the new cluster's data; new links work at once."""
        dead = [each for each in self.peers if not self.peers[each].is_alive]
        self.start(dead)
        if dead and 5 not in dead and self.living([5]):
            self.peers[5].call("unlink", ids=dead)          # the newcomer keeps nothing of the dead
            self.links -= {(5, prompt) for prompt in dead}
        for decoder in self.living(DECODERS):
            if decoder in dead:
                self.destination(decoder)
            for prompt in self.living(PROMPTS):
                self._link_again(decoder, prompt, dead)
        self.judge()

    def _link_again(self, decoder: int, prompt: int, dead: list[int]) -> None:
        """A link between two that live now, whoever of them has just been started again."""
        if decoder in dead:
            self.links.discard((decoder, prompt))
        elif prompt in dead and (decoder, prompt) in self.links:
            self._leave_old_link(decoder, prompt)
        if (decoder, prompt) not in self.links:
            self.peers[decoder].call("unlink", ids=[prompt])        # one that the call may have removed, or not
            self.link(decoder, [prompt])

    def _leave_old_link(self, decoder: int, prompt: int) -> None:
        """A cache id and a key that the restarted cluster has as well are not to be had over the link to the dead one."""
        number = self.publish(prompt)
        self.assert_says_gone(decoder, prompt, number)
        answer = self.peers[decoder].attempt("pull", key=by_id(prompt, 1), name="buffer")
        assert answer.outcome == TIMED_OUT, answer.trace
        assert self.peers[decoder].call("unlink", ids=[prompt]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
        self.links.discard((decoder, prompt))

    # -- what nobody may keep ---------------------------------------------------------------------------------------

    def assert_nothing_kept(self) -> None:
        """No living process maps a file of a dead one, and none holds a descriptor besides the life file, its directory and
        those that it started with."""
        for cluster_id, peer in self.peers.items():
            if peer.is_alive:
                gone = [line for line in Path(f"/proc/{peer.pid}/maps").read_text().splitlines()
                        if self.namespace.name in line and line.endswith("(deleted)")]
                assert gone == [], f"cluster {cluster_id}"
                assert sorted(self._shm_files(peer)) == ["directory", "life"], f"cluster {cluster_id}"

    def assert_no_leftovers(self) -> None:
        """Every file of the namespace belongs to a cluster that is there: the dead ones' are gone since the restart."""
        names = self.namespace.names()
        incarnations = {name.split(".")[2] for name in names if name.startswith(f"{self.namespace.name}.d.")}
        assert len(incarnations) == sum(peer.is_alive for peer in self.namespace.peers)
        assert {name.split(".")[2] for name in self.namespace.segments()} <= incarnations

    def _shm_files(self, peer: Peer) -> list[str]:
        kinds = {".life": "life", ".d.": "directory"}
        found = []
        for entry in Path(f"/proc/{peer.pid}/fd").iterdir():
            target = os.readlink(entry)
            if self.namespace.name in target and target.startswith("/dev/shm"):
                found.append(next((kind for part, kind in kinds.items() if part in target), target))
        return found
