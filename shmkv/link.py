"""Links of one cluster to others: make, remove, look up. Results are returned, not raised.

A record is claimed in the peer's directory under the cold lock; from then on the two sides meet only in that record.
"""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from shmkv import _link, _link_record, _members, segment
from shmkv._layout import LINKS_LIMIT, VERSION
from shmkv._link import LinkEnd
from shmkv._link_handle import LinkHandle
from shmkv._mapping import Region
from shmkv._mutex import Mutex
from shmkv.accepted import AcceptedLinks
from shmkv.cluster import Cluster
from shmkv.cluster_info import LLMClusterInfo
from shmkv.errors import LLMException, LLMStatusCode, link_busy
from shmkv.membership import Member, segment_prefix
from shmkv.pauses import Pauses
from shmkv.types import LLMRole

MAX_CLUSTERS_A_CALL = 16
OK = LLMStatusCode.LLM_SUCCESS

log = logging.getLogger("shmkv")

LinkResults = tuple[LLMStatusCode, list[LLMStatusCode]]


class Links:
    """By the peer's cluster id. A link to the own cluster has no record: nobody else is involved."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._handles: dict[int, LinkHandle | None] = {}
        self._closing: list[LinkHandle] = []        # removed by force, a thread may still be inside
        self._linking = Mutex(busy=link_busy)       # one link call at a time
        self.accepted = AcceptedLinks(cluster)      # those that others made to this cluster
        self.last_failure: dict[int, str] = {}      # why the last try to link to a cluster failed, for messages
        self._on_removed: Callable[[LinkHandle], object] = _nobody
        self.find_missing: Callable[[int], bool] = _no_other    # makes a link that is due to a cluster, True if it did

    def __len__(self) -> int:
        return len(self._handles)

    def tell_removed(self, callback: Callable[[LinkHandle], object]) -> None:
        """Call this one, and no other, for each link that this side has removed, before its record is given back."""
        self._on_removed = callback

    def handle(self, cluster_id: int) -> LinkHandle | None:
        """The link to a cluster, or None; the own cluster has none even when it is linked."""
        return self._handles.get(cluster_id)

    def to_push(self, cluster_id: int) -> LinkEnd | int:
        """What a cluster is pushed to over: in cache-manager mode a link that this cluster made, else one that the other made; or a
        number of `_link` that says why there is none."""
        if not self._cluster.settings.cache_manager:
            return self.accepted.to_push(cluster_id)
        handle = self._handles.get(cluster_id)
        if handle is not None and handle.look() != _link.ENDED:
            return handle
        link = self.accepted.to_push(cluster_id)
        if isinstance(link, int) and self.find_missing(cluster_id):
            return self._handles.get(cluster_id) or link
        return link

    def made(self) -> list[LinkHandle]:
        """The links that this cluster made and did not remove."""
        return [handle for handle in list(self._handles.values()) if handle is not None]

    def refuse_new_pulls(self) -> None:
        """New calls on any link answer LINK_BUSY; those that run go on."""
        for handle in self.made():
            handle.mark_closing(True)

    def are_used(self) -> bool:
        """Does a call of this process run on any link?"""
        return any(handle.users for handle in self.made())

    def is_linked(self, cluster_id: int) -> bool:
        """Was a link made that neither side has removed? A link to a dead peer counts until it is unlinked."""
        handle = self._handles.get(cluster_id)
        return cluster_id in self._handles and (handle is None or handle.look() != _link.ENDED)

    def peer_lives(self, cluster_id: int) -> bool:
        """Is the cluster at the other end of a link there still, or the own one?"""
        handle = self._handles.get(cluster_id)
        return handle is None or handle.look() == 0

    def check(self, cluster_id: int) -> None:
        """Return if the link can be used; LLM_NOT_YET_LINK, LLM_LINK_BUSY, or the timeout status if the peer is gone. Waits for
        nothing and changes nothing."""
        handle = self._handles.get(cluster_id)
        if cluster_id not in self._handles:
            reason = self.last_failure.get(cluster_id)
            raise LLMException(f"not linked to cluster {cluster_id}" + (f": {reason}" if reason else ""),
                               status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        status = 0 if handle is None else handle.look()
        if status == _link.ENDED:
            raise LLMException(f"the link to cluster {cluster_id} was removed", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if status == _link.PEER_GONE:
            raise LLMException(f"cluster {cluster_id} died, finalized or was restarted: unlink and link again",
                               status_code=self._cluster.settings.timeout_status)
        if handle is not None and handle.is_closing:
            raise LLMException(f"the link to cluster {cluster_id} is being removed", status_code=LLMStatusCode.LLM_LINK_BUSY)

    def members(self) -> list[Member]:
        """Who is recorded in the namespace, for messages."""
        return self._cluster.namespace.members()

    def connected_clusters(self) -> int:
        """Links in either direction that are alive now."""
        made = sum(self.is_linked(cluster_id) for cluster_id in list(self._handles))
        return made + len(self._incoming())

    def _incoming(self) -> list[int]:
        region = self._cluster.directory.region
        namespace = self._cluster.namespace
        live = []
        for slot in range(_link_record.links_reserved(region)):
            is_live = _link_record.read(region, slot)["state"] == _link_record.LIVE
            if is_live and _link_record.initiator_lives(region, slot, namespace.life_fd, namespace.table):
                live.append(slot)
        return live

    # -- link -------------------------------------------------------------------------------------------------------

    def link(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int) -> LinkResults:
        """Link to each cluster; all of them are polled together until they appear or `timeout_ms` is over."""
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            with self._linking.within(timeout_ms / 1000):
                self.sweep_closing()
                results = self._link_all([int(info.remote_cluster_id or 0) for info in clusters], deadline)
        except TimeoutError:
            return LLMStatusCode.LLM_PROCESSING_LINK, []
        soft = (OK, LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_REPEAT_REQUEST)
        return self._overall(results, soft, LLMStatusCode.LLM_LINK_FAILED), results

    def _overall(self, results: Sequence[LLMStatusCode], soft: Collection[LLMStatusCode],
                 failure: LLMStatusCode) -> LLMStatusCode:
        """The status of a whole call: `failure` if any result is not among `soft`; in cache-manager mode the last such result."""
        failed = [result for result in results if result not in soft]
        if not failed:
            return OK
        return failed[-1] if self._cluster.settings.cache_manager else failure

    def link_if_there(self, cluster_id: int) -> bool:
        """Link to a cluster if it is there now, once no other call is linking: is it linked then? Its absence is told to nobody."""
        timeout_ms = self._cluster.settings.sync_kv_timeout_ms
        try:
            with self._linking.within(timeout_ms / 1000):
                self.sweep_closing()
                if self.is_linked(cluster_id):
                    return True
                self._forget_removed(cluster_id)
                return self._try(cluster_id, time.monotonic() + timeout_ms / 1000) == OK
        except TimeoutError:
            return False

    def _link_all(self, cluster_ids: list[int], deadline: float) -> list[LLMStatusCode]:
        results: dict[int, LLMStatusCode] = {}
        waiting: list[int] = []
        for place, cluster_id in enumerate(cluster_ids):
            if cluster_id in cluster_ids[:place]:
                results[place] = LLMStatusCode.LLM_REPEAT_REQUEST
            elif self.is_linked(cluster_id):
                results[place] = LLMStatusCode.LLM_ALREADY_LINK
            else:
                self._forget_removed(cluster_id)
                waiting.append(place)
        pauses = Pauses()
        while waiting:
            for place in list(waiting):
                status = self._try(cluster_ids[place], deadline)
                if status is not None:
                    results[place] = status
                    waiting.remove(place)
            if waiting and time.monotonic() >= deadline:
                break
            if waiting:
                pauses.sleep(deadline - time.monotonic())
        for place in waiting:
            try:
                results[place] = self._not_found(cluster_ids[place])
            except OSError as error:
                results[place] = self._failed(cluster_ids[place], f"cannot look for cluster {cluster_ids[place]}: {error}")
        return [results[place] for place in range(len(cluster_ids))]

    def _forget_removed(self, cluster_id: int) -> None:
        """Give back our side of a link that was removed, as soon as no thread is inside."""
        handle = self._handles.pop(cluster_id, None)
        if handle is not None:
            self._closing.append(handle)
            self._on_removed(handle)
            self.sweep_closing()

    def _not_found(self, cluster_id: int) -> LLMStatusCode:
        """Nobody with that id appeared in time; say so, and whether one lives under another layout."""
        others = self._cluster.namespace.versions_of(cluster_id)
        if others:
            return self._failed(cluster_id, f"cluster {cluster_id} lives under another layout version ({', '.join(others)}); "
                                            f"this process has {self._cluster.namespace.name}.members.v{VERSION}")
        recorded = [member for member in self.members() if member.cluster_id == cluster_id]
        living = [member for member in recorded if self._cluster.namespace.lives(member)]
        if recorded and not living:
            return self._failed(cluster_id, f"cluster {cluster_id} is dead: only its record is left")
        if living:
            self.note_failure(cluster_id, f"cluster {cluster_id} lives, but was not ready in time: {self._fault_of(living[0])}")
            return self._cluster.settings.timeout_status
        self.note_failure(cluster_id, f"cluster {cluster_id} did not appear in namespace {self._cluster.namespace.name!r}")
        return self._cluster.settings.timeout_status

    def _fault_of(self, member: Member) -> str:
        """What is wrong with a living member's directory."""
        try:
            directory = Region.attach(self._path(member))
        except OSError as error:
            return str(error)
        return _members.header_fault(directory, "directory", member.incarnation) or "it is being finalized"

    def _path(self, member: Member) -> str:
        return f"{segment.SHM_DIR}/{self._cluster.namespace.name}.{member.directory}"

    def note_failure(self, cluster_id: int | None, text: str) -> None:
        if cluster_id is not None:
            self.last_failure[cluster_id] = text
        log.warning("%s", text)

    def _failed(self, cluster_id: int, text: str) -> LLMStatusCode:
        self.note_failure(cluster_id, text)
        return LLMStatusCode.LLM_LINK_FAILED

    def _try(self, cluster_id: int, deadline: float) -> LLMStatusCode | None:
        """One look for the peer: its result, or None for "not yet"."""
        if cluster_id == self._cluster.cluster_id:
            self._handles[cluster_id] = None
            return OK
        self._cluster.namespace.check_named()
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            member = self._cluster.namespace.find(cluster_id)
            if member is None or not _has_directory(self._cluster.namespace.name, member):
                return None
            with self._cluster.namespace.cold(left_ms):
                self._cluster.namespace.check_own_life(self._cluster.member)
                return self._claim(member)
        except (LLMException, OSError, MemoryError) as error:
            return self._failed(cluster_id, f"cannot link to cluster {cluster_id}: {error}")

    def _claim(self, member: Member) -> LLMStatusCode | None:
        """Under the cold lock: check the peer once more, take a record in its directory."""
        namespace = self._cluster.namespace
        path = self._path(member)
        try:
            directory = Region.attach(path, writable=True)
        except (FileNotFoundError, BlockingIOError):
            return None                     # not made yet
        fault = _members.header_fault(directory, "directory", member.incarnation)
        if fault:
            if "version 0," in fault:
                return None
            return self._failed(member.cluster_id, f"cluster {member.cluster_id}: {fault}")
        if not namespace.lives(member) or not _members.directory_is_open(directory):
            return None
        role = _members.directory_role(directory)
        if not self._cluster.settings.cache_manager and role != LLMRole.PROMPT:
            return self._failed(member.cluster_id, f"cluster {member.cluster_id} has role {role}, LLMRole.PROMPT is needed")
        return self._open(directory, path, member)

    def _open(self, directory: Region, path: str, member: Member) -> LLMStatusCode:
        own = self._cluster.member
        sides = [(member.slot, member.incarnation, member.cluster_id), (own.slot, own.incarnation, own.cluster_id)]
        namespace = self._cluster.namespace
        claimed: list[int] = []             # from the moment on that it is ours
        try:
            slot = _link_record.claim(directory, namespace.life_fd, namespace.table, sides, claimed,
                                       self._cluster.link_records)
            if slot is None and _link_record.links_reserved(directory) < LINKS_LIMIT:
                _reserve_links(directory, path)
                slot = _link_record.claim(directory, namespace.life_fd, namespace.table, sides, claimed,
                                           self._cluster.link_records)
            if slot is None:
                self.note_failure(member.cluster_id, f"cluster {member.cluster_id} has {LINKS_LIMIT} living links already")
                return LLMStatusCode.LLM_PARAM_INVALID
            self._make_handle(directory, slot, member)
        except BaseException:
            for slot in claimed:
                _link_record.abandon(directory, slot)
                self._cluster.link_records.discard((directory, slot))
            raise
        self.last_failure.pop(member.cluster_id, None)
        return OK

    def _make_handle(self, directory: Region, slot: int, member: Member) -> None:
        namespace = self._cluster.namespace
        prefix = f"{segment.SHM_DIR}/{segment_prefix(namespace.name, member.incarnation)}".encode()
        handle = LinkHandle(directory, namespace.table, namespace.life_fd, slot, prefix,
                            self._cluster.settings.copy == "pread", self._cluster.settings.cache_manager)
        self._handles[member.cluster_id] = handle

    # -- unlink -----------------------------------------------------------------------------------------------------

    def unlink(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int, force: bool) -> LinkResults:
        """Remove links, from the side that made them or from the other one."""
        deadline = time.monotonic() + timeout_ms / 1000
        self.sweep_closing()
        results = [self._unlink(int(info.remote_cluster_id or 0), deadline, force) for info in clusters]
        return self._overall(results, (OK, LLMStatusCode.LLM_NOT_YET_LINK), LLMStatusCode.LLM_UNLINK_FAILED), results

    def unlink_one(self, cluster_id: int, timeout_ms: int) -> LLMStatusCode:
        """Remove the link to a cluster: LLM_LINK_BUSY if it is in use for that long."""
        self.sweep_closing()
        return self._unlink(cluster_id, time.monotonic() + timeout_ms / 1000, force=False)

    def _unlink(self, cluster_id: int, deadline: float, force: bool) -> LLMStatusCode:
        if cluster_id not in self._handles:
            return self.accepted.unlink(cluster_id, deadline, force)
        handle = self._handles[cluster_id]
        if handle is not None and handle.look() == _link.ENDED:
            self._forget_removed(cluster_id)
            return LLMStatusCode.LLM_NOT_YET_LINK       # the peer was first
        if handle is not None and not force and not self._remove_in_turn(handle, deadline):
            return LLMStatusCode.LLM_LINK_BUSY
        if handle is not None:
            handle.mark_closing(True)       # before the removal, so that nobody takes it for the peer's
            handle.force_remove()           # by force, or a broken link: nothing to wait for
        self._forget_removed(cluster_id)
        return OK

    @staticmethod
    def _remove_in_turn(handle: LinkHandle, deadline: float) -> bool:
        """Wait for running pulls, refuse new ones meanwhile; False if the lock was not free in time."""
        handle.mark_closing(True)
        try:
            status = handle.remove(max(0, int((deadline - time.monotonic()) * 1000)))
        except BaseException:
            handle.mark_closing(False)
            raise
        if status in (_link.TIMEOUT, _link.BUSY):
            handle.mark_closing(False)
        return status not in (_link.TIMEOUT, _link.BUSY)

    def sweep_closing(self) -> None:
        """Close our side of removed links once no thread is inside and nothing is lent; the record can be used again then."""
        if not self._closing:
            return                      # as nearly always: each close of a view asks
        for handle in list(self._closing):
            # While the peer's side names a cache of ours, the record stays among those that are looked at before memory is freed;
            # while ours names one of the peer's, nobody else may have the record.
            if handle.users == 0 and handle.leases == 0 and handle.peer_is_idle:
                handle.close_side()
                with suppress(ValueError):          # a finalize in a signal handler may have been here
                    self._closing.remove(handle)
                self._cluster.link_records.discard((handle.directory, handle.slot))

    def close(self) -> None:
        """finalize: remove all links without waiting for peers."""
        self.find_missing = _no_other
        self._cluster.close_views()     # a side that holds leases is not closed
        for cluster_id, handle in list(self._handles.items()):
            if handle is not None:
                handle.mark_closing(True)
                handle.force_remove()
            self._forget_removed(cluster_id)
        deadline = time.monotonic() + self._cluster.settings.sync_kv_timeout_ms / 1000
        while any(handle.users for handle in self._closing) and time.monotonic() < deadline:
            time.sleep(0.001)               # they end at their next look; until then others are told "not linked"
        self.sweep_closing()
        self.accepted.close(self._cluster.settings.sync_kv_timeout_ms)


def _nobody(_: LinkHandle) -> None:
    """Nobody wants to know of removed links."""


def _no_other(_: int) -> bool:
    """No link is due."""
    return False


def _has_directory(namespace: str, member: Member) -> bool:
    return bool(segment.names(f"{namespace}.{member.directory}"))


def _reserve_links(directory: Region, path: str) -> None:
    """More records in a peer's directory: pages inside its size, reserved by whoever needs them, under the cold lock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _link_record.reserve_more(directory, lambda offset, nbytes: segment.reserve(fd, offset, nbytes))
    finally:
        os.close(fd)
