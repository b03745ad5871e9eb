"""The links that others made to one cluster, as far as it acts on them itself: it pushes over them, or removes them.

Their records stand in its own directory. Until it acts, a link costs this side nothing; then it has one object here, so that all
threads queue in one place, and from the first push on a mapping of the peer's directory and of the segments that were pushed to.
"""
from __future__ import annotations

import time

from shmkv import _link, _link_record, _members, segment
from shmkv._acceptor import AcceptedLink
from shmkv._mapping import Region
from shmkv._mutex import Mutex
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMStatusCode, link_busy
from shmkv.membership import Member, segment_prefix
from shmkv.pauses import Pauses


class AcceptedLinks:
    """Those of one cluster. Calls are safe from any thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._mutex = Mutex(busy=link_busy)
        self._links: dict[int, AcceptedLink] = {}           # own record -> the last link in it that was acted on
        self._by_cluster: dict[int, AcceptedLink] = {}      # and the one over which a cluster was pushed to
        self._died: set[int] = set()                # clusters whose last link ended with them
        self.removed_here: dict[int, int] = {}      # own record -> serial of the last link that this side removed there
        cluster.when_looking.append(self.sweep)

    # -- pushing ----------------------------------------------------------------------------------------------------

    def to_push(self, cluster_id: int) -> AcceptedLink | int:
        """The link over which a cluster is pushed to, its directory mapped; _link.ENDED if there is none, _link.PEER_GONE if the
        last one ended by the cluster's death. LLMException or OSError if the directory cannot be used."""
        link = self._by_cluster.get(cluster_id)
        if link is None or link.state() != 0:
            link = self._look_for(cluster_id)
        if link is None:
            return int(_link.PEER_GONE if cluster_id in self._died else _link.ENDED)
        if link.directory is None and not self._attach(link):
            return int(_link.PEER_GONE)
        return link

    def _look_for(self, cluster_id: int) -> AcceptedLink | None:
        """A living link that this cluster made. One of its dead predecessor is broken off."""
        for slot, serial, maker, _, _ in _link_record.living(self._cluster.directory.region):
            if maker != cluster_id:
                continue
            link = self._link(slot, serial)
            status = link.look()
            if status == 0:
                self._died.discard(cluster_id)
                self._by_cluster[cluster_id] = link
                return link
            if status == _link.PEER_GONE:
                self._note_death(link)
        last = self._by_cluster.get(cluster_id)
        if last is not None and last.state() == _link.PEER_GONE:
            self._died.add(cluster_id)
        return None

    def _note_death(self, link: AcceptedLink) -> None:
        link.break_off()                    # so that nothing brings it back
        self._died.add(link.cluster_id)

    def _link(self, slot: int, serial: int) -> AcceptedLink:
        """The one object for this link."""
        with self._mutex:
            link = self._links.get(slot)
            if link is None or link.serial != serial:
                namespace = self._cluster.namespace
                link = AcceptedLink(self._cluster.directory.region, namespace.table, namespace.life_fd, slot, serial)
                self._links[slot] = link
            return link

    def _attach(self, link: AcceptedLink) -> bool:
        """Map the peer's directory; False if the peer is gone. Read-only: what this side writes of a link stands in its own."""
        namespace = self._cluster.namespace
        record = _members.read(namespace.table, link.peer_slot)
        if record is None or record[0] != link.peer_incarnation:
            return False
        member = Member(link.peer_slot, *record)
        try:
            directory = Region.attach(f"{segment.SHM_DIR}/{namespace.name}.{member.directory}")
        except FileNotFoundError:
            return False
        fault = _members.header_fault(directory, "directory", member.incarnation)
        if fault:
            raise LLMException(f"cluster {link.cluster_id}: {fault}")
        prefix = f"{segment.SHM_DIR}/{segment_prefix(namespace.name, member.incarnation)}".encode()
        with self._mutex:
            link.attach(directory, prefix, self._cluster.settings.copy == "pread")
        return True

    # -- the end ----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Let go of what is mapped of clusters whose links are over."""
        for slot, link in list(self._links.items()):
            status = link.look()
            if status == 0:
                continue
            if status == _link.PEER_GONE:
                self._note_death(link)
            with self._mutex:
                if link.let_go() and self._links.get(slot) is link:
                    del self._links[slot]
                    if self._by_cluster.get(link.cluster_id) is link:
                        del self._by_cluster[link.cluster_id]

    def unlink(self, cluster_id: int, deadline: float, force: bool) -> LLMStatusCode:
        """Remove the links that a cluster made, after their running pulls and pushes, or at once if `force`."""
        links = _link_record.find(self._cluster.directory.region, cluster_id)
        for slot, serial in links:
            left_ms = 0 if force else max(0, int((deadline - time.monotonic()) * 1000))
            self.removed_here[slot] = serial        # before: as with is_closing
            removed = False
            try:
                removed = self._link(slot, serial).end(left_ms, force)
            finally:
                if not removed:
                    del self.removed_here[slot]
                self._wake_readers()
            if not removed:
                return LLMStatusCode.LLM_LINK_BUSY
        self.sweep()
        return LLMStatusCode.LLM_SUCCESS if links else LLMStatusCode.LLM_NOT_YET_LINK

    def _wake_readers(self) -> None:
        """Those who wait for keys and rows of this cluster see whether it is their link that was removed."""
        with self._cluster.lock:
            self._cluster.directory.wake_all()

    def close(self, timeout_ms: int) -> None:
        """finalize: pushes that still run end at their next look, which is waited for; then nothing of others is mapped."""
        deadline = time.monotonic() + timeout_ms / 1000
        links = list(self._links.values())
        for link in links:
            if link.users:
                link.break_off()
        pauses = Pauses()
        while any(link.users for link in links) and time.monotonic() < deadline:
            pauses.sleep()
        for link in links:
            link.let_go()
        self._links.clear()
        self._by_cluster.clear()
        self._cluster.when_looking.clear()      # which refers to this object
