"""Waits of this process: who waits, who ends a wait, and what a wait that failed is told.

A wait is an object with `run(turn_ns, watched)`, `wake`, `cancel` and `ask_for_turn` (`_wait`, `_await`, `_flow`, `own_wait.py`).
It sleeps without anything held but a count in shared memory, and a lease where it has begun to copy. It is woken by whoever changes
what it waits for; by the peer watch when a process dies; by this module when a link is removed or the cluster ends.
"""
from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from shmkv import _lease, _link, _link_record, _pull, _wait, _wait_any
from shmkv._await import KeyWait
from shmkv._flow import RowFlow
from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMStatusCode
from shmkv.link import Links
from shmkv.own_wait import OwnKeyWait, OwnRowFlow
from shmkv.pauses import Pauses
from shmkv.peer_watch import PeerWatch
from shmkv.pull_failure import PullKey, Select, SourceKey, code_of, failure, sentence_of
from shmkv.types import CacheDesc, DataType

NEVER_NS = 2**63 - 1
SOON_NS = 25_000_000            # a little more than the time between two looks of an owner for dead readers
NO_DESC = CacheDesc(1, [1], DataType.DT_INT8)
NO_SELECT: Select = (-1, 0, 0, 0, 0, 0, -1, 0, -1, 0)

T = TypeVar("T")


class Ends(Protocol):
    """What somebody else may do to a wait."""

    def wake(self) -> None: ...
    def cancel(self) -> None: ...
    def ask_for_turn(self) -> None: ...


class Runs(Ends, Protocol):
    """A wait for a row. `run` answers 0, MORE, NOT_YET or why it will not come; after a turn of ARM_NS that is not yet over, the
    caller sleeps for it (`waiting_rows.py`)."""

    def run(self, turn_ns: int, watched: bool) -> int: ...
    @property
    def has_news(self) -> bool: ...
    def count_out(self) -> None: ...


class Waits:
    """All waits of one cluster. Calls are safe from any thread."""

    def __init__(self, cluster: Cluster, links: Links) -> None:
        self._cluster = cluster
        self._links = links
        self._open: dict[int, tuple[weakref.ref[Any], LinkHandle | None]] = {}
        self._running: dict[int, int] = {}      # the waits that a thread is inside of, and which thread
        self._peers = PeerWatch(cluster.namespace, self._wake_all)
        links.tell_removed(self._link_removed)

    # -- making -----------------------------------------------------------------------------------------------------

    def for_key(self, key: SourceKey, timeout_ms: int) -> Waiting:
        """A wait until a key is bound and all of its tensors are published."""
        handle = self._links.handle(key.cluster_id)
        if handle is None and key.cluster_id != self._cluster.cluster_id:
            raise self._failure(_link.ENDED, key, "wait for", NO_DESC, NO_SELECT)
        wait: Runs = OwnKeyWait(self._cluster, key, timeout_ms) if handle is None else KeyWait(handle, key.packed, timeout_ms)
        return Waiting(self, wait, handle, key, timeout_ms, "wait for", NO_DESC, NO_SELECT)

    def for_row(self, key: PullKey, dst: LocalCache, desc: CacheDesc, select: Select, consumes: bool, timeout_ms: int,
                piece: int = 0, waits: bool = True) -> Waiting:
        """A pull that waits; arguments as for `transfer.pull` and `_flow.RowFlow`."""
        handle = self._links.handle(key.cluster_id)
        status = _pull.check(dst, select)
        if status == 0 and handle is None and key.cluster_id != self._cluster.cluster_id:
            status = _link.ENDED
        if status:
            raise self._failure(status, key, "pull of", desc, select)
        wait: Runs
        if handle is None:
            wait = OwnRowFlow(self._cluster, key, dst, select, consumes, timeout_ms, piece, waits)
        else:
            limit = self._cluster.settings.max_leases
            wait = RowFlow(handle, dst, key.packed, select, consumes, timeout_ms, limit, piece, waits)
        return Waiting(self, wait, handle, key, timeout_ms, "pull of", desc, select)

    # -- running ----------------------------------------------------------------------------------------------------

    def add(self, wait: Ends, handle: LinkHandle | None) -> None:
        """This one can be ended from now on, as long as it is there."""
        number = id(wait)
        self._open[number] = (weakref.ref(wait, lambda _: self._open.pop(number, None)), handle)
        self._cluster.check_usable()            # a finalize may have looked before

    def run(self, wait: Runs, handle: LinkHandle | None, turn_ns: int) -> int:
        """One turn. Nobody is watched for what is there already."""
        self._running[id(wait)] = threading.get_ident()
        try:
            status = wait.run(_wait.LOOK_NS, True)
            if status == _wait.NOT_YET and turn_ns != _wait.LOOK_NS:
                status = wait.run(turn_ns, self._is_watched(handle))
            return status
        finally:
            self._running.pop(id(wait), None)

    def _is_watched(self, handle: LinkHandle | None) -> bool:
        return handle is None or self._peers.watch(handle.peer_slot, handle.peer_incarnation)

    def sleep(self, armed: Sequence[Waiting], deadline_ns: int, bell: _wait_any.Bell | None = None) -> tuple[int, bool]:
        """Sleep for waits that are not yet over after a turn of ARM_NS: (0 or _link.TIMEOUT, does `has_news` tell which of them
        have to look again? Else all have to). `bell` ends the sleep, too."""
        running = dict.fromkeys((id(each.wait) for each in armed), threading.get_ident())
        self._running.update(running)
        try:
            is_watched = all(self._is_watched(each.handle) for each in armed)
            waits = cast(list[_wait.Ending], [each.wait for each in armed])
            bells = [] if bell is None else [bell]
            return _wait_any.sleep_any([*bells, *waits], deadline_ns, is_watched), is_watched
        except MemoryError as error:
            raise self._cluster.no_memory("a wait for several rows", error) from error
        finally:
            for number in running:
                self._running.pop(number, None)

    def for_memory(self, attempt: Callable[[], T], wait_ms: int) -> T:
        """What `attempt` returns, as soon as it does not raise that memory is short; what it raises at the end of `wait_ms`."""
        deadline = time.monotonic_ns() + wait_ms * 1_000_000
        wait = _wait.EventWait(self._cluster.directory.region)
        self.add(wait, None)
        status, is_counted = _wait.NOT_YET, False
        try:
            while True:
                wait.see()
                try:
                    return attempt()
                except LLMException as error:
                    if error.status_code != self._cluster.settings.out_of_memory_status or status == _link.TIMEOUT:
                        raise
                if not is_counted:
                    is_counted = True
                    wait.count_in_for_memory()
                    continue
                status = wait.sleep(deadline, self._next_look_ns(status), self._are_readers_watched())
                if status == _link.CANCELLED:
                    self._cluster.check_usable()
        finally:
            wait.count_out()

    def _next_look_ns(self, status: int) -> int:
        """When memory is looked for again without being told: what was just said may be seen a little later, and the end of a
        copy, or of a key's time, tells nobody."""
        with self._cluster.lock:
            freeing = self._cluster.caches.freeing
            is_soon = status == 0 or freeing.may_free_untold or _link_record.busy(self._cluster.directory.region)
            expiry_ns = freeing.next_expiry_ns
        soon_ns = time.monotonic_ns() + SOON_NS if is_soon else NEVER_NS
        return min(soon_ns, NEVER_NS if expiry_ns is None else expiry_ns)

    def _are_readers_watched(self) -> bool:
        """Will somebody tell when a reader dies that has memory of this cluster?"""
        readers = {(slot, incarnation) for _, _, _, slot, incarnation in _link_record.living(self._cluster.directory.region)}
        return all(self._peers.watch(*reader) for reader in readers)

    @property
    def are_pulling(self) -> bool:
        """Is a pull from another cluster begun and not over? One that the calling thread interrupted cannot go on before this
        thread does, and one from the own cluster waits for what this process publishes: neither counts."""
        me = threading.get_ident()
        return any(isinstance(wait, RowFlow) and wait.is_pulling and self._running.get(id(wait)) != me for wait, _ in self._all())

    def _are_inside(self) -> bool:
        """Is another thread inside a wait?"""
        me = threading.get_ident()
        return any(thread != me for thread in list(self._running.values()))

    # -- ending -----------------------------------------------------------------------------------------------------

    def _all(self) -> list[tuple[Ends, LinkHandle | None]]:
        found = [(reference(), handle) for reference, handle in list(self._open.values())]
        return [(wait, handle) for wait, handle in found if wait is not None]

    def _wake_all(self) -> None:
        for wait, _ in self._all():
            wait.wake()

    def _link_removed(self, handle: LinkHandle) -> None:
        """Its waits end, and what they hold of it goes."""
        for wait, its_handle in self._all():
            if its_handle is handle:
                _end(wait)
        self._peers.forget(handle.peer_slot, handle.peer_incarnation)

    def close(self) -> None:
        """End all waits, and wait until no thread is in one, for no longer than a pull may take."""
        timeout_s = self._cluster.settings.sync_kv_timeout_ms / 1000
        deadline = time.monotonic() + timeout_s
        for wait, _ in self._all():
            _end(wait)
        pauses = Pauses()
        while self._are_inside() and time.monotonic() < deadline:
            pauses.sleep()
        self._peers.close(timeout_s)

    def abandon(self) -> None:
        """In a forked child."""
        self._peers.abandon()

    # -- failing ----------------------------------------------------------------------------------------------------

    def failure(self, status: int, waiting: Waiting) -> LLMException:
        """The exception (not raised) for a wait that was answered `status`."""
        if status == _link.CANCELLED:
            self._cluster.check_usable()
            status = (0 if waiting.handle is None else waiting.handle.look()) or _link.BUSY
        if status == _link.TIMEOUT:
            text = f"not done within {waiting.timeout_ms} ms: {waiting.missing}"
            return failure(f"{waiting.what} {waiting.key!r}", code_of(status, self._cluster), text)
        return self._failure(status, waiting.key, waiting.what, waiting.desc, waiting.select)

    def _failure(self, status: int, key: SourceKey, what: str, desc: CacheDesc, select: Select) -> LLMException:
        what = f"{what} {key!r}"
        if status == _lease.NONE_FREE:
            text = f"all {self._cluster.settings.max_leases} leases of the link are taken by views, forks and waiting pulls; the " \
                   f"limit is SHMKV_MAX_LEASES"
            return failure(what, LLMStatusCode.LLM_LINK_BUSY, text)
        if status in (_link.ENDED, _link.BUSY):
            self._cluster.check_usable()        # by our own finalize?
        return failure(what, code_of(status, self._cluster), sentence_of(status, self._cluster, self._links, key, desc, select))


class Waiting:
    """One wait with all that has to be said about it. `step` is called until it returns 0."""

    def __init__(self, waits: Waits, wait: Runs, handle: LinkHandle | None, key: SourceKey, timeout_ms: int, what: str,
                 desc: CacheDesc, select: Select) -> None:
        self.wait = wait
        self.handle = handle
        self.key = key
        self.timeout_ms = timeout_ms
        self.deadline_ns = time.monotonic_ns() + timeout_ms * 1_000_000     # not before that of `wait`, which was made before
        self.what = what
        self.desc = desc
        self.select = select
        self._waits = waits
        waits.add(wait, handle)

    @property
    def waiting(self) -> Waiting:
        """What is slept for between two steps."""
        return self

    def step(self, turn_ns: int = NEVER_NS) -> int:
        """0: done. `_flow.MORE`: a piece is there. `_wait.NOT_YET`: the turn is over. Raises the exception of the contract."""
        status = self._waits.run(self.wait, self.handle, turn_ns)
        if status < 0 and status != _wait.NOT_YET:
            raise self._waits.failure(status, self)
        return status

    @property
    def missing(self) -> str:
        """What had not come at the end."""
        peer = f"cluster {self.key.cluster_id}"
        done, count = getattr(self.wait, "done", (0, 0))
        if count:
            return f"{peer} has published {done} of {count} selected tensors"
        if getattr(self.wait, "is_found", False):
            return f"{peer} has bound it, but not published all of its tensors"
        return f"{peer} has no such key or row"

    def ask_for_turn(self) -> None:
        """The thread that is inside is wanted for another wait."""
        self.wait.ask_for_turn()

    def cancel(self) -> None:
        """A thread that is inside ends at its next look."""
        self.wait.cancel()

    def close(self) -> None:
        """Give back what is held; a thread that is inside ends at its next look."""
        _end(self.wait)


def _end(wait: Ends) -> None:
    close = getattr(wait, "close", wait.cancel)
    close()
