"""Communications: sets of clusters that are linked to each other under a number, in cache-manager mode.

Nothing runs in the background. A link to a member is made when it is first wanted and the member is there: by `link`, by whoever
asks for the state, and by the first pull from it or push to it.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from shmkv._mutex import Mutex
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode, link_busy
from shmkv.link import Links
from shmkv.types import RegisterMemStatus

UNLINK_TIMEOUT_MS = 3000


@dataclass(frozen=True)
class Comm:
    """One communication; `others` are the members but this cluster."""

    name: str
    others: frozenset[int]


class Comms:
    """Those of one cluster, by number. Calls are safe from any thread."""

    def __init__(self, cluster: Cluster, links: Links) -> None:
        self._cluster = cluster
        self._links = links
        self._ids = itertools.count(1)
        self._comms: dict[int, Comm] = {}
        self._made: set[int] = set()        # clusters to which a communication made the link
        self._mutex = Mutex(busy=link_busy)
        links.find_missing = self.bring_up

    def link(self, name: str, members: Iterable[int]) -> int:
        """A number for a new communication; members that are there already are linked to."""
        comm = Comm(name, frozenset(members) - {self._cluster.cluster_id})
        with self._mutex:
            number = next(self._ids)
            self._comms[number] = comm
        for cluster_id in comm.others:
            self.bring_up(cluster_id)
        return number

    def unlink(self, number: int) -> None:
        """Remove a communication; the link to a member goes with the last one that has it. LLMParamError for an unknown number,
        LLM_LINK_BUSY if a link is in use for longer than 3 s."""
        with self._mutex:
            comm = self._comms.pop(number, None)
            if comm is None:
                raise _unknown(number)
            alone = [cluster_id for cluster_id in comm.others if not self._has(cluster_id) and cluster_id in self._made]
            self._made.difference_update(alone)
        busy = [cluster_id for cluster_id in alone
                if self._links.unlink_one(cluster_id, UNLINK_TIMEOUT_MS) == LLMStatusCode.LLM_LINK_BUSY]
        if busy:
            with self._mutex:       # so that the call can be made again
                self._comms[number] = comm
                self._made.update(busy)
            raise LLMException(f"links to clusters {busy} are in use: communication {number} is not removed",
                               status_code=LLMStatusCode.LLM_LINK_BUSY)

    def status(self, number: int) -> RegisterMemStatus:
        """OK when all members are linked to, FAILED when one is gone. LLMParamError for an unknown number."""
        comm = self._comms.get(number)
        if comm is None:
            raise _unknown(number)
        states = {self._state(cluster_id) for cluster_id in comm.others}
        for status in (RegisterMemStatus.FAILED, RegisterMemStatus.PREPARING):
            if status in states:
                return status
        return RegisterMemStatus.OK

    def _state(self, cluster_id: int) -> RegisterMemStatus:
        if not self.bring_up(cluster_id):
            return RegisterMemStatus.PREPARING
        return RegisterMemStatus.OK if self._links.peer_lives(cluster_id) else RegisterMemStatus.FAILED

    def _has(self, cluster_id: int) -> bool:
        return any(cluster_id in comm.others for comm in list(self._comms.values()))

    def bring_up(self, cluster_id: int) -> bool:
        """Link to a member of some communication if it is there now; False for other clusters, and if it is not."""
        if not self._has(cluster_id):
            return False
        if self._links.is_linked(cluster_id):
            return True                 # by another thread, or by link_clusters
        if not self._links.link_if_there(cluster_id):
            return False
        with self._mutex:
            self._made.add(cluster_id)
        return True


def _unknown(number: int) -> LLMParamError:
    return LLMParamError(f"argument 'comm_id' must be one that link returned and unlink did not take, got {number}")
