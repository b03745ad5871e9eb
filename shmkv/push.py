"""Pushes that run on threads of their own: one thread for each, and none while nothing is pushed.

A task goes through the layers; what it has come to stands in its results, one for each destination: a status, or None for one that
another one's failure left unfinished.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shmkv import _life, _push
from shmkv._blocks import FROM_ROW, BlockLists
from shmkv._mutex import Mutex
from shmkv._push import Addresses
from shmkv.caches import Usable
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMStatusCode, link_busy
from shmkv.key_push import TargetKey, key_push_sentence, push_to_key
from shmkv.link import Links
from shmkv.own_push import push_own
from shmkv.push_failure import push_code, push_sentence
from shmkv.transfer_config import LayerSynchronizer

TENSORS_A_LAYER = 2
OK = LLMStatusCode.LLM_SUCCESS

Result = LLMStatusCode | None

log = logging.getLogger("shmkv")


@dataclass(frozen=True)
class Destination:
    """One config of a transfer, as it was when the call was made."""

    cluster_id: int
    addresses: Addresses
    layers: range
    row: int


@dataclass(frozen=True)
class KeyDestination:
    """One config of a transfer that names a cache; `first`: the layer there for the first of `layers`."""

    key: TargetKey
    layers: range
    first: int
    row: int

    @property
    def cluster_id(self) -> int:
        """To whom it goes."""
        return self.key.cluster_id


AnyDestination = Destination | KeyDestination


@dataclass(frozen=True)
class BlockMove:
    """Which blocks of the source, or chunks of a row of it, go to which places from an address on; `nbytes`: bytes of a block
    there, 0 = as in the source."""

    lists: BlockLists
    rows: int                       # how many blocks of the destination the numbers reach
    nbytes: int

    @property
    def cut_nbytes(self) -> int:
        """Bytes of a chunk where a row is cut, else 0."""
        return self.nbytes if self.lists.mode == FROM_ROW else 0


class PushTask:
    """One transfer of a source that was counted in: it leaves it when it has ended, and then calls `ended(self)`."""

    def __init__(self, cluster: Cluster, links: Links, source: Usable, synchronizer: LayerSynchronizer,
                 destinations: Sequence[AnyDestination], blocks: BlockMove | None, ended: Callable[[PushTask], object]) -> None:
        self._cluster = cluster
        self._links = links
        self._source = source
        self._held = [source]               # whoever takes it out leaves it
        self._synchronizer = synchronizer
        self._destinations = destinations
        self._blocks = blocks
        self._ended = ended
        self._results: list[Result] = [None] * len(destinations)
        self._epoch = _life.epoch()
        # Reentrant, so that a signal handler that interrupts a wait may ask as well.
        self._changed = threading.Condition(threading.RLock())
        self._is_done = False
        self._thread = threading.Thread(target=self._run, name="shmkv-push", daemon=True)

    # -- those who wait ---------------------------------------------------------------------------------------------

    @property
    def timeout_status(self) -> LLMStatusCode:
        """What a wait that was too short is told."""
        return self._cluster.settings.timeout_status

    def results(self, timeout_ms: int | None) -> list[Result] | None:
        """The results once the task has ended; None if it has not within `timeout_ms` (None: for ever). In a forked child, which
        has no such thread, what was not done by then has failed."""
        if not self._is_done:
            if _life.epoch() != self._epoch:
                return [LLMStatusCode.LLM_FAILED] * len(self._results)
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_done, None if timeout_ms is None else timeout_ms / 1000):
                    return None
        return list(self._results)

    @property
    def number(self) -> int:
        """How many destinations there are."""
        return len(self._results)

    # -- the life of a task -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """LLMException if the system gives no thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LLMException(f"cannot push: {error}") from error

    def call_off(self) -> None:
        """After a start that failed or was interrupted: leave the source, unless the thread has begun. One that begins later finds
        nothing to do."""
        with suppress(IndexError):
            self._held.pop().local.leave()
            self._ended(self)

    @property
    def is_here(self) -> bool:
        """Is the calling thread the one of this task?"""
        return self._thread is threading.current_thread()

    def give_up(self) -> None:
        """finalize does not wait any longer: what is unfinished stays so."""
        self._end(LLMStatusCode.LLM_ENGINE_FINALIZED, range(self.number))

    def _end(self, status: Result, places: Sequence[int] = ()) -> None:
        """The results stand, with `status` for those at `places` that were not finished; nothing that comes later counts."""
        with self._changed:
            if not self._is_done:
                for place in places:
                    if self._results[place] is None:
                        self._results[place] = status
                self._is_done = True
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            source = self._held.pop()
        except IndexError:
            return
        try:
            self._go_through_layers()
            self._end(None)
        except BaseException:
            log.exception("a transfer of %r ended early", self._source.desc)
            self._end(LLMStatusCode.LLM_FAILED, range(self.number))
        finally:
            source.local.leave()
            self._ended(self)

    def _go_through_layers(self) -> None:
        for layer in range(self._source.desc.num_tensors // TENSORS_A_LAYER):
            due = [place for place, each in enumerate(self._destinations) if layer in each.layers]
            if due and not (self._wait_for(layer, due) and self._push_layer(layer, due)):
                return

    def _wait_for(self, layer: int, due: Sequence[int]) -> bool:
        """Is the layer computed? If not, or nobody can say, those that it was for have failed."""
        try:
            if self._synchronizer.synchronize_layer(layer, None):
                return not self._is_done
            log.warning("layer %d is not transferred: its synchronizer said that it failed", layer)
            failure = LLMStatusCode.LLM_PARAM_INVALID
        except BaseException:
            log.exception("layer %d is not transferred: its synchronizer raised", layer)
            failure = LLMStatusCode.LLM_FAILED
        self._end(failure, due)
        return False

    def _push_layer(self, layer: int, due: Sequence[int]) -> bool:
        for place in due:
            status = self._push_to(self._destinations[place], layer)
            if status != OK:
                self._end(status, [place])
            elif layer == self._destinations[place].layers.stop - 1:
                self._note(place, status)
            if self._is_done:
                return False
        return True

    def _note(self, place: int, status: LLMStatusCode) -> None:
        with self._changed:
            if not self._is_done:
                self._results[place] = status

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _push_to(self, destination: AnyDestination, layer: int) -> LLMStatusCode:
        """Push the tensors of a layer; a failure is told to the log."""
        try:
            code, sentence = self._try_push(destination, layer)
        except (LLMException, OSError, MemoryError) as error:
            code, sentence = getattr(error, "status_code", LLMStatusCode.LLM_FAILED), str(error)
            if isinstance(error, MemoryError):
                code = self._cluster.settings.out_of_memory_status
        if code != OK:
            log.warning("layer %d is not transferred to cluster %d: %s (%s)", layer, destination.cluster_id, sentence, code.name)
        return code

    def _try_push(self, destination: AnyDestination, layer: int) -> tuple[LLMStatusCode, str]:
        if isinstance(destination, KeyDestination):
            return self._push_to_key(destination, layer)
        is_first = layer == destination.layers.start
        begin = TENSORS_A_LAYER * (layer - destination.layers.start)
        end = destination.addresses.count if is_first else begin + TENSORS_A_LAYER
        rows = self._source.layout.row_nbytes[TENSORS_A_LAYER * layer:TENSORS_A_LAYER * layer + end - begin]
        unequal = self._unequal(rows)
        if unequal:
            return LLMStatusCode.LLM_PARAM_INVALID, unequal
        # Others must not have taken this process for dead: they would use the memory that is written to.
        self._cluster.namespace.check_own_life(self._cluster.member)
        if destination.cluster_id == self._cluster.cluster_id:
            cut_nbytes = 0 if self._blocks is None else self._blocks.cut_nbytes
            windows = [(address, cut_nbytes or nbytes)
                       for address, nbytes in zip(destination.addresses.part(begin, end), rows, strict=True)]
            status, address = self._push_here(destination, layer, windows)
        else:
            status, address = self._push_over_link(destination, layer, begin, is_first)
        if status == 0:
            return OK, ""
        return push_code(status, self._cluster), push_sentence(status, self._cluster, self._links, destination.cluster_id,
                                                                address)

    def _unequal(self, rows: Sequence[int]) -> str:
        """What is wrong with the bytes of a block that the caller gave."""
        if self._blocks is None or self._blocks.cut_nbytes:
            return ""
        unequal = [nbytes for nbytes in rows if self._blocks.nbytes not in (0, nbytes)]
        return f"dst_block_memory_size is not the {unequal[0]} bytes of a block of the source" if unequal else ""

    def _push_to_key(self, destination: KeyDestination, layer: int) -> tuple[LLMStatusCode, str]:
        first = TENSORS_A_LAYER * layer
        unequal = self._unequal(self._source.layout.row_nbytes[first:first + TENSORS_A_LAYER])
        if unequal:
            return LLMStatusCode.LLM_PARAM_INVALID, unequal
        dst_first = TENSORS_A_LAYER * (destination.first + layer - destination.layers.start)
        lists, cut_nbytes = (None, 0) if self._blocks is None else (self._blocks.lists, self._blocks.cut_nbytes)
        select = (cut_nbytes or -1, 0, 0, destination.row, 0, first, TENSORS_A_LAYER, dst_first, TENSORS_A_LAYER, 0)
        status = push_to_key(self._cluster, self._links, destination.key, self._source, select, lists,
                             whole_tensors=TENSORS_A_LAYER * len(destination.layers))
        if status == 0:
            return OK, ""
        return push_code(status, self._cluster), key_push_sentence(status, self._cluster, self._links, destination.key)

    def _push_over_link(self, destination: Destination, layer: int, begin: int, is_first: bool) -> tuple[int, int]:
        """0 or a number of the core, and the address that it is about."""
        link = self._links.to_push(destination.cluster_id)
        if isinstance(link, int):
            return link, 0
        lists, cut_nbytes = (None, 0) if self._blocks is None else (self._blocks.lists, self._blocks.cut_nbytes)
        status = _push.push(link, self._source.local, destination.addresses, begin, begin + TENSORS_A_LAYER,
                            TENSORS_A_LAYER * layer, destination.row, lists, self._cluster.settings.sync_kv_timeout_ms,
                            check_all=is_first, block_nbytes=cut_nbytes)
        bad = destination.addresses.bad
        return status, destination.addresses.part(bad, bad + 1)[0]

    def _push_here(self, destination: Destination, layer: int, windows: list[tuple[int, int]]) -> tuple[int, int]:
        """The same to the own cluster. All `windows`, (address, bytes of a row), are checked; the first ones are this layer's."""
        lists, rows = (None, 1) if self._blocks is None else (self._blocks.lists, self._blocks.rows)
        return push_own(self._cluster, self._source, windows, TENSORS_A_LAYER, first_tensor=TENSORS_A_LAYER * layer,
                        row=destination.row, lists=lists, dst_rows=rows)


class Pushes:
    """The transfers of one cluster that run now."""

    def __init__(self, cluster: Cluster, links: Links) -> None:
        self._cluster = cluster
        self._links = links
        self._mutex = Mutex(busy=link_busy)
        self._running: set[PushTask] = set()
        self._is_closed = False

    def start(self, source: Usable, synchronizer: LayerSynchronizer, destinations: Sequence[AnyDestination],
              blocks: BlockMove | None) -> PushTask:
        """Begin a transfer. LLM_KV_CACHE_NOT_EXIST if the source was deallocated."""
        task = PushTask(self._cluster, self._links, source, synchronizer, destinations, blocks, self._running.discard)
        with self._cluster.lock:
            self._cluster.caches.get(source)
            source.local.count_in()
        try:
            with self._mutex:
                if self._is_closed:
                    raise LLMException("the cluster was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
                self._running.add(task)
                task.start()
        except BaseException:
            task.call_off()
            raise
        return task

    def close(self, timeout_ms: int) -> None:
        """finalize: no new transfers; those that run are waited for so long, and their results then say LLM_ENGINE_FINALIZED for
        what was not finished. Called from a synchronizer, its own transfer is not waited for."""
        deadline = time.monotonic() + timeout_ms / 1000
        with self._mutex:
            self._is_closed = True
        for task in list(self._running):
            if not task.is_here:
                task.results(max(0, int((deadline - time.monotonic()) * 1000)))
            task.give_up()
