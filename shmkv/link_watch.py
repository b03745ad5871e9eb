"""Peers that are lost, noticed without a request: one thread a cluster, which exists only after somebody asked for it.

A dead process makes its pidfd readable; by then the kernel has dropped its life byte, so the look that follows sees it. What has no
descriptor (a finalize, an unlink, a peer of another pid namespace, a kernel without pidfd) is seen by a look every LOOK_MS, 25 a
second. Looks read; nothing in shared memory is changed here, and nobody is declared dead by this thread.
"""
from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from shmkv import _life, _link, _link_record, _members
from shmkv._link_handle import LinkHandle
from shmkv._mutex import Mutex
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, link_busy
from shmkv.link import Links

LOOK_MS = 40
MOST_PIDFDS = 64            # of a process's descriptors; peers beyond these are seen by the looks alone
MOST_LOST = 4096            # lost links that wait for somebody to ask; older ones go

# Why a link was lost.
DIED, FINALIZED, UNLINKED, BROKEN = "died", "finalized", "unlinked", "broken"

LostLink = tuple[int, str]
OnLinkLost = Callable[[int, str], object]

log = logging.getLogger("shmkv")


class LinkWatch:
    """Who wants to know of lost links, and what they have not been told yet. Calls are safe from any thread."""

    def __init__(self, cluster: Cluster, links: Links) -> None:
        self._cluster = cluster
        self._links = links
        self._mutex = Mutex(busy=link_busy)
        self._callback: OnLinkLost | None = None
        self._lost: deque[LostLink] = deque(maxlen=MOST_LOST)
        self._lost_fd = -1
        self._monitor: _Monitor | None = None

    def set_callback(self, callback: OnLinkLost | None) -> None:
        """Call this one, and no other, for each lost link. None: no callback."""
        with self._mutex:
            self._callback = callback
            stopped = self._start_or_stop()
        self._stop(stopped)

    def descriptor(self) -> int:
        """An eventfd that is readable while `lost` has something to tell; the same one each time."""
        with self._mutex:
            if self._lost_fd < 0:
                self._lost_fd = make_eventfd()
            self._start_or_stop()
            return self._lost_fd

    def lost(self) -> list[LostLink]:
        """What was lost since the last call."""
        with self._mutex:
            found = [self._lost.popleft() for _ in range(len(self._lost))]
            if self._lost_fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._lost_fd)
            return found

    def close(self) -> None:
        """No thread and no descriptor afterwards. A callback that runs is waited for, not for ever: its thread ends after it."""
        with self._mutex:
            self._callback = None
            monitor, self._monitor = self._monitor, None
            fd, self._lost_fd = self._lost_fd, -1
            if fd >= 0:
                os.close(fd)
        self._stop(monitor)

    def abandon(self) -> None:
        """In a forked child, which has no such thread: close its copies of the descriptors. Takes no lock: the parent's thread may
        have held it."""
        if self._monitor is not None:
            self._monitor.close_descriptors()
        if self._lost_fd >= 0:
            os.close(self._lost_fd)
        self._monitor, self._lost_fd = None, -1

    def _start_or_stop(self) -> _Monitor | None:
        """A monitor if anybody wants one; the one that has to stop if nobody does any more."""
        monitor = self._monitor
        if self._callback is None and self._lost_fd < 0:
            self._monitor = None
            return monitor
        if monitor is None:
            started = _Monitor(self._cluster, self._links, self._tell)
            started.start()
            self._monitor = started
        return None

    def _stop(self, monitor: _Monitor | None) -> None:
        if monitor is not None:
            monitor.stop(self._cluster.settings.sync_kv_timeout_ms / 1000)

    def _tell(self, cluster_id: int, reason: str) -> None:
        """On the monitor's thread."""
        log.info("the link with cluster %d is lost: it %s", cluster_id, reason)
        with self._mutex:
            callback = self._callback
            if self._lost_fd >= 0:
                self._lost.append((cluster_id, reason))
                os.eventfd_write(self._lost_fd, 1)
        if callback is None:
            return
        try:
            callback(cluster_id, reason)
        except Exception:
            log.exception("the callback of on_link_lost failed for cluster %d", cluster_id)


@dataclass(eq=False)
class _Peer:
    """The other side of one link: cluster, member slot, and the pidfd of its process (-1: none)."""

    cluster_id: int
    slot: int
    incarnation: int
    fd: int = -1
    told: bool = False


class _Monitor:
    """The thread. What it watches is its own; it compares that with the links that there are at each look."""

    def __init__(self, cluster: Cluster, links: Links, tell: OnLinkLost) -> None:
        self._namespace = cluster.namespace
        self._region = cluster.directory.region
        self._links = links
        self._tell = tell
        self._made: dict[LinkHandle, _Peer] = {}        # handle -> peer of a link that this cluster made
        self._incoming: dict[tuple[int, int], _Peer] = {}       # (slot, serial) -> peer that linked to this cluster
        self._by_fd: dict[int, _Peer] = {}
        self._stopping = False
        self._wake_fd = make_eventfd()
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="shmkv-link-watch", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self.close_descriptors()
            raise LLMException(f"cannot watch links: {error}") from error

    def stop(self, timeout_s: float) -> None:
        """The thread closes what it has opened when it ends. Called by its own callback, it ends after that."""
        self._stopping = True
        if self._thread is threading.current_thread():
            return
        with suppress(OSError):             # it has ended by itself
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._look()
                if not self._stopping:
                    self._wait()
        except Exception:
            log.exception("links are not watched any more")
        finally:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """At the end, or in a forked child."""
        for fd in [*self._by_fd, self._wake_fd]:
            if fd >= 0:
                os.close(fd)
        self._by_fd.clear()
        self._wake_fd = -1

    def _wait(self) -> None:
        """Until a process dies, until somebody stops us, or until the next look is due."""
        for fd, _ in self._poll.poll(LOOK_MS):
            if fd in self._by_fd:
                self._close_pidfd(self._by_fd[fd])      # it stays readable; the look that follows says what it means

    # -- looking ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for peer, reason in [*self._look_at_made(), *self._look_at_incoming()]:
            if self._stopping:
                return
            self._close_pidfd(peer)
            if reason and not peer.told:
                peer.told = True
                self._tell(peer.cluster_id, reason)

    def _look_at_made(self) -> Iterator[tuple[_Peer, str]]:
        """Lost ones with the reason; ones that this process unlinked itself without."""
        handles = self._links.made()
        for gone in self._made.keys() - set(handles):
            yield self._made.pop(gone), ""
        for handle in handles:
            if handle not in self._made:
                self._made[handle] = self._watch(handle.cluster_id, handle.peer_slot, handle.peer_incarnation)
            reason = self._why_lost(handle, self._made[handle])
            if reason:
                yield self._made[handle], reason

    def _why_lost(self, handle: LinkHandle, peer: _Peer) -> str:
        status = handle.look()
        if status == 0 or handle.is_closing:    # closing is set before this process removes a link
            return ""
        if status == _link.ENDED:
            return UNLINKED
        if not _members.directory_is_open(handle.directory):
            return FINALIZED
        return BROKEN if self._lives(peer) else DIED

    def _look_at_incoming(self) -> Iterator[tuple[_Peer, str]]:
        """The same for the links that others made to this cluster. Whoever is dead before it was ever seen alive is no loss."""
        found = {(slot, serial): (cluster_id, member_slot, incarnation)
                 for slot, serial, cluster_id, member_slot, incarnation in _link_record.living(self._region)}
        for slot, serial in self._incoming.keys() - found.keys():
            peer = self._incoming.pop((slot, serial))
            removed_here = self._links.accepted.removed_here.get(slot) == serial
            yield peer, "" if removed_here else self._why_ended(slot, serial, peer)
        for key, (cluster_id, member_slot, incarnation) in found.items():
            if key not in self._incoming:
                peer = self._watch(cluster_id, member_slot, incarnation)
                peer.told = not self._lives(peer)
                self._incoming[key] = peer
            if not self._lives(self._incoming[key]):
                yield self._incoming[key], DIED

    def _why_ended(self, slot: int, serial: int, peer: _Peer) -> str:
        record = _link_record.read(self._region, slot)
        if record["serial"] == serial and record["state"] == _link_record.REMOVED:
            return UNLINKED
        return BROKEN if self._lives(peer) else DIED

    def _lives(self, peer: _Peer) -> bool:
        record = _members.read(self._namespace.table, peer.slot)
        return record is not None and record[0] == peer.incarnation and _life.held_by_other(self._namespace.life_fd, peer.slot)

    # -- pidfds -----------------------------------------------------------------------------------------------------

    def _watch(self, cluster_id: int, slot: int, incarnation: int) -> _Peer:
        peer = _Peer(cluster_id, slot, incarnation)
        if len(self._by_fd) < MOST_PIDFDS:
            peer.fd = open_pidfd(self._namespace.life_fd, slot)
        if peer.fd >= 0:
            self._by_fd[peer.fd] = peer
            self._poll.register(peer.fd, select.POLLIN)
        return peer

    def _close_pidfd(self, peer: _Peer) -> None:
        fd, peer.fd = peer.fd, -1
        if fd >= 0:
            self._poll.unregister(fd)
            del self._by_fd[fd]
            os.close(fd)


def open_pidfd(life_fd: int, slot: int) -> int:
    """A pidfd of the process that holds a slot's life byte, -1 if there is none to be had. The pid is the one that the kernel
    names for the lock, in our own pid namespace; a look after the open shows that it was not used again in between."""
    pid = _life.holder_pid(life_fd, slot)
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return -1
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    if _life.holder_pid(life_fd, slot) == pid:
        return fd
    os.close(fd)
    return -1


def make_eventfd() -> int:
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise LLMException(f"cannot watch links: no eventfd: {error}") from error
