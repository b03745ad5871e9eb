"""Brings blocks of others into the engine's own, layer by layer, on a thread of its own.

Each pull has a deadline inside the library and each load one here, so that a load always ends: by then its blocks hold what they
should, or it has failed. Nothing is written into blocks of a load that has ended. The time of a load that a step waits for begins
with `Loader.begin`; that of one beside the batch with its turn, for those before it in the queue are no reason to give it up.
"""
from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shmkv.errors import LLMException
from shmkv.integrations.vllm.block_keys import cache_key, key_words
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.endpoint import Endpoint, Piece
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.plans import Load
from shmkv.kv_cache import KvCache

Find = Callable[[tuple[int, int]], "int | None"]

log = logging.getLogger("shmkv")


@dataclass
class _Pulls:
    """What is left of one load: the pieces of each group and cluster, or why it failed."""

    load: Load
    pieces: dict[tuple[int, int], list[Piece]]
    failure: str = ""


class LoadJob:
    """Several loads that go on together, layer by layer; the layers of a group after those of the group before it."""

    def __init__(self, loads: Sequence[Load], deadline_s: float | None) -> None:
        self.loads = tuple(loads)
        self.deadline_s = deadline_s            # None: its time begins with its turn
        self.failed: list[Load] = []
        self._done = 0
        self._is_over = False
        self._moved = threading.Condition()

    def layer_done(self) -> None:
        with self._moved:
            self._done += 1
            self._moved.notify_all()

    def over(self) -> None:
        with self._moved:
            self._is_over = True
            self._moved.notify_all()

    @property
    def is_over(self) -> bool:
        """Has it ended, well or not?"""
        return self._is_over

    def wait(self, layer: int | None = None) -> None:
        """Until a layer is there, or, without one, until all of it is over."""
        with self._moved:
            self._moved.wait_for(lambda: self._is_over or (layer is not None and self._done > layer))


class Loader:
    """A queue of jobs and the thread that does them, made at the first one. `groups`, `into`: the layers of each KV cache group,
    and the same as a cache; `find(words)`: the cluster that has a block now."""

    def __init__(self, endpoint: Endpoint, groups: Sequence[Layers], into: Sequence[KvCache], shard: int, find: Find,
                 counters: Counters) -> None:
        self._endpoint = endpoint
        self._groups = groups
        self._into = into
        self._shard = shard
        self._find = find
        self._counters = counters
        self._jobs: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, loads: Sequence[Load]) -> LoadJob:
        """Start loading; what is returned tells how far it is."""
        job = LoadJob(loads, None if all(load.is_async for load in loads) else self._deadline_s())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmkv-vllm-load", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def _deadline_s(self) -> float:
        """Of a load whose time begins now."""
        return time.monotonic() + self._endpoint.settings.timeout_ms / 1000

    def close(self) -> None:
        """Finish the load under way; those behind it fail, since together they may take long. Twice is no error."""
        if self._thread is not None:
            self._closing.set()
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                self._do(job)
            except Exception:
                # Whatever it was, the engine has to hear of it and compute these blocks itself.
                log.exception("loading blocks")
                job.failed = list(job.loads)
            finally:
                job.over()

    def _do(self, job: LoadJob) -> None:
        begun_ns = time.perf_counter_ns()
        deadline_s = self._deadline_s() if job.deadline_s is None else job.deadline_s
        pulls = [self._pulls(load) for load in job.loads]
        for group, layers in enumerate(self._groups):
            for layer in range(len(layers.names)):
                for each in pulls:
                    if not each.failure:
                        self._pull(each, group, layer, deadline_s)
                job.layer_done()
        for each in pulls:
            self._account(each, job)
        self._counters.add(load_ns=time.perf_counter_ns() - begun_ns)

    def _account(self, pulls: _Pulls, job: LoadJob) -> None:
        blocks = pulls.load.blocks
        if pulls.failure:
            job.failed.append(pulls.load)
            self._counters.add(failed_blocks=len(blocks))
            log.warning("blocks of request %s were not loaded and have to be computed: %s", pulls.load.request_id, pulls.failure)
        else:
            self._counters.add(loaded_blocks=len(blocks),
                               loaded_bytes=sum(self._groups[place.group].row_nbytes for place in blocks))

    def _pulls(self, load: Load) -> _Pulls:
        """Where the blocks are. The last one first, so that the beginning of a prompt counts as the most recently used."""
        pulls = _Pulls(load, {})
        if self._closing.is_set():
            pulls.failure = "the engine ends"
            return pulls
        for place in reversed(load.blocks):
            words = key_words(place.block_hash, self._shard, place.group)
            cluster_id = self._find(words)
            if cluster_id is None:
                pulls.failure = f"block {place.block_hash.hex()} is not there any more"
                return pulls
            pulls.pieces.setdefault((place.group, cluster_id), []).append(Piece(cache_key(cluster_id, words), place.block_id))
        return pulls

    def _pull(self, pulls: _Pulls, group: int, layer: int, deadline_s: float) -> None:
        try:
            for pieces in (pieces for (its_group, _), pieces in pulls.pieces.items() if its_group == group):
                if time.monotonic() >= deadline_s:
                    pulls.failure = f"the load took longer than {self._endpoint.settings.timeout_ms} ms, to layer {layer}"
                    return
                self._endpoint.pull(pieces, self._into[group], layer)
        except LLMException as error:
            pulls.failure = f"layer {layer}: {error}"
