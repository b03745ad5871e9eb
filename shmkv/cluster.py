"""One initialised cluster: its place in the namespace, its directory, its caches, its links."""
from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from shmkv import _copy, _life, _link, _link_record, segment
from shmkv._directory import Directory
from shmkv._layout import DIRECTORY_SIZE
from shmkv._mapping import Region, close_all
from shmkv._mutex import Mutex
from shmkv.caches import OwnCaches
from shmkv.checks import shown
from shmkv.config import Settings
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode, link_busy
from shmkv.membership import JOIN_TIMEOUT_MS, Member, Namespace, segment_prefix
from shmkv.segment import SegmentPool
from shmkv.types import LLMRole

BLOCK_NBYTES = 512              # the unit of st_blocks, whatever the file system's

log = logging.getLogger("shmkv")


def choose_kernel(settings: Settings) -> None:
    """Copy loop, threshold and threads as the environment says; `Settings` has checked the two numbers. LLMParamError, with the
    names that there are, for anything but "auto" and a loop that this CPU has."""
    accepted = ("auto", *_copy.supported_kernels())
    if settings.kernel not in accepted:
        raise LLMParamError(f"SHMKV_KERNEL must be one of {', '.join(accepted)}, got {shown(settings.kernel)}")
    _copy.configure(settings.kernel, settings.nt_threshold, settings.copy_threads)


class Closable(Protocol):
    """What has to be closed before this cluster leaves."""

    def close(self) -> None: ...


class Cluster:
    """Between `join` and `close` a member of the namespace. Owned by one LLMDataDist; unusable in a forked child."""

    namespace: Namespace
    member: Member
    directory: Directory
    caches: OwnCaches

    def __init__(self, settings: Settings, role: LLMRole, cluster_id: int) -> None:
        choose_kernel(settings)
        self.settings = settings
        self.role = role
        self.cluster_id = cluster_id
        self.views: weakref.WeakSet[Closable] = weakref.WeakSet()      # what looks into other clusters' memory
        self.lock = Mutex(self._check_entry, link_busy)     # the owner's lock, of everything that changes caches and keys
        self.link_records: set[tuple[Region, int]] = set()      # (directory, slot) that this cluster claimed; kept by link.py
        self.when_looking: list[Callable[[], None]] = []    # what calls do that look after caches, now and then
        self._epoch = _life.epoch()
        self._opened: list[int] = []        # the directory's descriptor
        self.is_closed = False              # new calls are refused
        self._is_shut = False               # and those that wait for the owner's lock as well
        self._has_left = True               # nothing to give back yet

    def join(self) -> None:
        """Take a place in the namespace and make a directory. When it raises, `close` takes back what was done."""
        self._has_left = False
        try:
            self.namespace, self.member = Namespace.join(self.settings.namespace, self.cluster_id, int(self.role))
            _link_record.set_own(self.member.incarnation)
            self._make_directory()
        except (OSError, MemoryError) as error:
            raise self._no_files(error) from error

    def _make_directory(self) -> None:
        name = f"{self.settings.namespace}.{self.member.directory}"
        region = Region.map(segment.create(name, DIRECTORY_SIZE, 0, self._opened), DIRECTORY_SIZE, populate=False)
        self.directory = Directory(region, self._reserve, incarnation=self.member.incarnation, cluster_id=self.cluster_id,
                                   role=int(self.role))
        pool = SegmentPool(segment_prefix(self.settings.namespace, self.member.incarnation), self.settings.recycle_bytes,
                           self.directory.note_unlinked, self.settings.pools_nbytes)
        self.caches = OwnCaches(self.settings, self.namespace, self.member, self.directory, pool,
                                lambda: list(self.link_records), self._look)

    def _look(self) -> None:
        for look in self.when_looking:
            look()

    def _reserve(self, offset: int, nbytes: int) -> None:
        segment.reserve(self._opened[0], offset, nbytes)

    def control_nbytes(self) -> int:
        """Memory that the directory has by now: it is as large as it can become, and gets pages as it fills."""
        return os.fstat(self._opened[0]).st_blocks * BLOCK_NBYTES

    def _no_files(self, error: OSError | MemoryError) -> LLMException:
        """What to say when the control structures cannot be made."""
        short = isinstance(error, MemoryError) or error.errno in (errno.ENOSPC, errno.ENOMEM)
        free = f" ({segment.known_free_nbytes()} bytes free)" if os.path.isdir(segment.SHM_DIR) else ""
        return LLMException(f"cannot make the control structures in {segment.SHM_DIR}{free}: {error}",
                            status_code=self.settings.out_of_memory_status if short else LLMStatusCode.LLM_FAILED)

    def no_memory(self, what: str, error: MemoryError) -> LLMException:
        """The exception (not raised) when this process itself has no memory left."""
        return LLMException(f"no memory for {what}: {error}", status_code=self.settings.out_of_memory_status)

    def _check_entry(self) -> None:
        """Whoever got the owner's lock may have waited for a finalize."""
        if _link.inside_call():
            raise link_busy("called from a signal handler that interrupted a pull")
        if self._is_shut or self.is_forked:
            self.check_usable()

    def check_usable(self) -> None:
        """LLM_ENGINE_FINALIZED after close, LLM_FAILED in a forked child."""
        if not self.is_closed and _life.epoch() == self._epoch:
            return
        if self.is_closed:
            raise LLMException("the cluster was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
        if self.is_forked:
            raise LLMException(f"cluster {self.cluster_id} belongs to the parent process: a forked child has to init its own")

    @property
    def is_forked(self) -> bool:
        """Is this a child of the process that made the cluster?"""
        return _life.epoch() != self._epoch

    def refuse_new_calls(self) -> None:
        """From now on calls answer LLM_ENGINE_FINALIZED, while what others read stays as it is."""
        with self.lock:
            self.is_closed = True

    def keep_view(self, view: Closable) -> None:
        """Close it before leaving. LLM_ENGINE_FINALIZED, and it is closed, if that is over by now."""
        self.views.add(view)
        try:
            self.check_usable()
        except LLMException:
            view.close()
            raise

    def close_views(self) -> None:
        """Give back what was lent: leases that outlive their cluster would stand in records that others use by then."""
        for view in list(self.views):
            view.close()

    def shut(self) -> None:
        """Nobody gets in any more, not even who waits for the owner's lock by now."""
        if not self._is_shut:
            with self.lock:
                self.is_closed = self._is_shut = True

    def set_role(self, role: LLMRole) -> None:
        """Change the role that linkers ask for; caches and keys stay."""
        self.role = role
        self.directory.set_role(int(role))
        self.namespace.set_role(self.member, int(role))

    def close(self) -> None:
        """Free everything and leave. Interrupted, it can be called again and goes on. In a forked child nothing is touched.

        LLMException when something could not be given back: others find this cluster dead then, and the next join removes it.
        """
        try:
            self._close()
        except OSError as error:
            raise LLMException(f"cluster {self.cluster_id} left namespace {self.settings.namespace!r}, but not everything could be "
                               f"given back: {error}") from error

    def _close(self) -> None:
        if self._has_left:
            self.is_closed = True
            return
        if self.is_forked:
            self.is_closed = self._has_left = True
            return
        self.shut()
        try:
            self.close_views()
            if hasattr(self, "caches"):
                self.directory.close()
                self.caches.close(self.settings.sync_kv_timeout_ms)
        finally:
            try:
                close_all(self._opened)
            finally:
                self._leave()
                self._has_left = True

    def _leave(self) -> None:
        _link_record.set_own(0)
        if not hasattr(self, "member"):
            Namespace.abandon(self.settings.namespace, JOIN_TIMEOUT_MS)
            return
        try:
            with self.namespace.cold_even_unnamed(JOIN_TIMEOUT_MS):
                self.namespace.leave(self.member)
        finally:
            self.namespace.give_up_life(self.member)
