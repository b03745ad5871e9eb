"""Processes whose death somebody waits for: one thread that sleeps on their pidfds, made on first need.

It has no deadline and looks at nothing: a process that dies makes its pidfd readable, and whoever waits is told to look. By then
the kernel has dropped its life byte. Where there is no pidfd (another pid namespace, too many peers, an old kernel) `watch` says
so, and the waiter has to wake up by itself now and then.
"""
from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from shmkv._mutex import Mutex
from shmkv.errors import LLMException, link_busy
from shmkv.link_watch import MOST_PIDFDS, make_eventfd, open_pidfd
from shmkv.membership import Namespace

Peer = tuple[int, int]      # member slot, incarnation

log = logging.getLogger("shmkv")


class PeerWatch:
    """`on_death()` is called on the watch's thread after a process has died. Calls are safe from any thread."""

    def __init__(self, namespace: Namespace, on_death: Callable[[], object]) -> None:
        self._namespace = namespace
        self._on_death = on_death
        self._mutex = Mutex(busy=link_busy)
        self._fds: dict[Peer, int] = {}
        self._wake_fd = -1
        self._thread: threading.Thread | None = None
        self._stopping = False

    def watch(self, slot: int, incarnation: int) -> bool:
        """Will `on_death` be called when the process of this member dies? Once asked, it stays so until `forget`."""
        peer = (slot, incarnation)
        if peer in self._fds:
            return True
        with self._mutex:
            if self._stopping or len(self._fds) >= MOST_PIDFDS or not self._start():
                return False
            fd = open_pidfd(self._namespace.life_fd, slot)
            if fd < 0:
                return False
            self._fds[peer] = fd
            os.eventfd_write(self._wake_fd, 1)
            return True

    def forget(self, slot: int, incarnation: int) -> None:
        """Nobody waits for this one any more."""
        with self._mutex:
            fd = self._fds.pop((slot, incarnation), -1)
            if fd >= 0:
                os.close(fd)
                os.eventfd_write(self._wake_fd, 1)

    def close(self, timeout_s: float) -> None:
        """No thread and no descriptor afterwards."""
        with self._mutex:
            self._stopping = True
            thread = self._thread
            if thread is not None:
                with suppress(OSError):         # it has ended by itself
                    os.eventfd_write(self._wake_fd, 1)
        if thread is not None:
            thread.join(timeout_s)

    def abandon(self) -> None:
        """In a forked child, which has no such thread: close its copies of the descriptors."""
        self._stopping = True
        self._close_all()

    def _start(self) -> bool:
        if self._thread is not None:
            return self._wake_fd >= 0
        try:
            self._wake_fd = make_eventfd()
            thread = threading.Thread(target=self._run, name="shmkv-peer-watch", daemon=True)
            thread.start()
        except (LLMException, RuntimeError) as error:
            log.warning("peers are not watched while they are waited for: %s", error)
            self._close_all()
            return False
        self._thread = thread
        return True

    def _close_all(self) -> None:
        for fd in [*self._fds.values(), self._wake_fd]:
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
        self._wake_fd = -1

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._wait():
                    self._on_death()
        except Exception:
            log.exception("peers are not watched any more")
        finally:
            with self._mutex:
                self._stopping = True
                self._close_all()
            self._on_death()        # whoever relied on it looks now, and by itself from then on

    def _wait(self) -> bool:
        """Sleep until a process dies, or the set of them changes: did one die?"""
        poll = select.poll()
        with self._mutex:
            fds = {fd: peer for peer, fd in self._fds.items()}
            wake_fd = self._wake_fd
        for fd in (wake_fd, *fds):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        with self._mutex:
            if wake_fd in ready:
                os.eventfd_read(wake_fd)
            died = [peer for fd, peer in fds.items() if fd in ready and self._fds.get(peer) == fd]
            for peer in died:
                os.close(self._fds.pop(peer))
        return bool(died)
