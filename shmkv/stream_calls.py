"""Calls that wait: for keys, for layers, for both at once; and the mark that the prompt's side sets after each layer."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shmkv.cache_arguments import check_rows
from shmkv.checks import check_positive, check_type, check_uint32
from shmkv.errors import LLMParamError
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.kv_cache import KvCache, check_kv_cache
from shmkv.manager_base import ManagerBase
from shmkv.pull_arguments import PullRequest, check_usable_key
from shmkv.pull_failure import PullKey, SourceKey
from shmkv.transfer import PullArguments
from shmkv.types import LLMRole
from shmkv.waiting import NEVER_NS, Waiting
from shmkv.waiting_rows import WaitingRows


class LayerPull:
    """A pull that goes on layer by layer; made by `pull_layers`.

    Iterating gives the index of each layer of the destination, in order, when its bytes are there. Leaving the loop early keeps
    what is there and drops the rest: `close`, or the end of a ``with`` block, gives the lease back at once, else it goes with the
    object.
    """

    def __init__(self, waiting: Waiting, first_layer: int) -> None:
        self._waiting = waiting
        self._next = first_layer
        self.is_over = False                # no more layers come

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.is_over:
            raise StopIteration
        self.step(NEVER_NS)
        return self.take()

    @property
    def waiting(self) -> Waiting:
        """What is slept for between two steps."""
        return self._waiting

    def step(self, turn_ns: int) -> int:
        """One turn of the wait for the next layer: `_wait.NOT_YET`, or something else when it is there."""
        try:
            status = self._waiting.step(turn_ns)
        except Exception:
            self.is_over = True
            raise
        self.is_over = status == 0
        return status

    def take(self) -> int:
        """The layer that has just come."""
        self._next += 1
        return self._next - 1

    def ask_for_turn(self) -> None:
        """The thread is wanted for another wait."""
        self._waiting.ask_for_turn()

    def cancel(self) -> None:
        """As `close`, from another thread than the one that waits."""
        self.close()

    def close(self) -> None:
        """No more layers; twice is no error."""
        self.is_over = True
        self._waiting.close()

    def __enter__(self) -> LayerPull:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LayerPublisher:
    """Marks layers of a row, or of several, as complete; made by `layer_publisher`. Calls are safe from any thread.

    Readers get layers in order: one that is marked before an earlier one becomes readable with that one. Twice is no error.
    """

    def __init__(self, manager: StreamCalls, cache: KvCache, rows: list[int], per_layer: int, layers: int) -> None:
        self._manager = manager
        self._cache = cache
        self._rows = rows
        self._per_layer = per_layer
        self._layers = layers
        self._marked: set[int] = set()
        self._published = 0

    @property
    def layers(self) -> int:
        """How many layers readers can get."""
        return self._published

    def __call__(self, layer_index: int) -> None:
        """The bytes of layer `layer_index` are complete in all rows of this publisher."""
        check_uint32("layer_index", layer_index)
        if layer_index >= self._layers:
            raise LLMParamError(f"argument 'layer_index' must be below {self._layers}, got {layer_index}")
        self._manager._publish_layer(self, layer_index)

    def _mark(self, layer_index: int) -> int:
        """How many layers are complete from the first one on. Under the owner's lock."""
        self._marked.add(layer_index)
        count = self._published
        while count in self._marked:
            count += 1
        return count


class StreamCalls(ManagerBase):
    """The part of a manager that waits. The calls of llm_datadist answer a missing key at once, and still do."""

    def wait_for_key(self, key: SourceKey, timeout_ms: int | None = None) -> None:
        """Return when the key (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey) is bound and all tensors behind it are published, of
        a linked cluster or of the own one. Nothing is pinned: it may go right after. `timeout_ms`: 1 to 2**32 - 1, None =
        sync_kv_timeout.

        Raises:
            LLMException: LLM_WAIT_PROCESS_TIMEOUT at the end of `timeout_ms`. At once, when it will not come:
                LLM_KV_CACHE_NOT_EXIST if it was consumed or removed since the call began, LLM_NOT_YET_LINK,
                LLM_WAIT_PROCESS_TIMEOUT if the peer died or finalized, LLM_ENGINE_FINALIZED.
        """
        self._key_wait(key, timeout_ms).step()

    def _key_wait(self, key: SourceKey, timeout_ms: int | None) -> Waiting:
        self._cluster.check_usable()
        check_type("key", key, CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)
        if isinstance(key, CacheKey):
            check_usable_key(key, "key")
        return self._waits.for_key(key, self._wait_ms(timeout_ms))

    def pull_layers(self, cache_key: PullKey, kv_cache: KvCache, batch_index: int = 0, *, src_layer_range: range | None = None,
                    dst_layer_range: range | None = None, tensor_num_per_layer: int = 2,
                    timeout_ms: int | None = None) -> LayerPull:
        """Pull a row layer by layer (role DECODER), each as soon as `publish` or a `layer_publisher` of the other side has marked
        it: ``for layer in manager.pull_layers(key, cache): ...`` gets the index of each layer of `kv_cache` when its bytes are in
        row `batch_index`. The key need not be bound yet. Each layer counts as a partial pull of its own: after all of them a
        request key is consumed, after some of them those are covered.

        One deadline for all, from this call on: `timeout_ms` (1 to 2**32 - 1), None = sync_kv_timeout.

        Raises:
            LLMParamError: an argument.
            LLMException: by this call or by the iteration what `pull_cache` raises; LLM_KV_CACHE_NOT_EXIST also when the row was
                unbound or its key ended meanwhile; LLM_LINK_BUSY when all leases of the link are taken (SHMKV_MAX_LEASES).
        """
        self._check_role("pull_layers", LLMRole.DECODER)
        request = PullRequest(cache_key, kv_cache, batch_index, src_layer_range=src_layer_range, dst_layer_range=dst_layer_range,
                              tensor_num_per_layer=tensor_num_per_layer)
        waiting = self._row_wait(request, timeout_ms, piece=tensor_num_per_layer)
        return LayerPull(waiting, 0 if dst_layer_range is None else dst_layer_range.start)

    def _pull_waiting(self, request: PullRequest, timeout_ms: int | None) -> None:
        """`pull_cache` with ``wait=True``."""
        waiting = self._row_wait(request, timeout_ms)
        try:
            waiting.step()
        finally:
            waiting.close()

    def _pull_many_waiting(self, pulls: Sequence[PullArguments], timeout_ms: int | None) -> None:
        """`pull_many` with ``wait=True``."""
        WaitingRows(self._waits, self._wait_ms(timeout_ms)).run(pulls)

    def _row_wait(self, request: PullRequest, timeout_ms: int | None, piece: int = 0, waits: bool = True) -> Waiting:
        own = self._usable(request.kv_cache)
        return self._waits.for_row(request.cache_key, own.local, own.desc, request.select, request.consumes,
                                   self._wait_ms(timeout_ms), piece, waits)

    def _wait_ms(self, timeout_ms: int | None) -> int:
        if timeout_ms is None:
            return self._cluster.settings.sync_kv_timeout_ms
        return check_positive("timeout_ms", check_uint32("timeout_ms", timeout_ms))

    def layer_publisher(self, cache: KvCache, rows: Iterable[int] | None = None,
                        tensor_num_per_layer: int = 2) -> LayerPublisher:
        """What an engine calls after each layer of a prefill: ``done = manager.layer_publisher(cache, rows=[3])``, then
        ``done(layer)`` when the bytes of that layer are complete, from any thread and in any order. For a cache allocated, or rows
        bound, with ``publish=False``; `rows`: all by default. One publisher is for one filling of its rows.

        Raises:
            LLMParamError: rows, or `tensor_num_per_layer` above the cache's number of tensors.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache, here and at each call.
        """
        self._cluster.check_usable()
        check_kv_cache("cache", cache)
        per_layer = check_positive("tensor_num_per_layer", check_uint32("tensor_num_per_layer", tensor_num_per_layer))
        with self._cluster.lock:
            desc = self._own(cache).desc
        if per_layer > desc.num_tensors:
            raise LLMParamError(f"argument 'tensor_num_per_layer' must not be above the {desc.num_tensors} tensors of the cache, "
                                f"got {per_layer}")
        wanted = list(range(desc.batch_size)) if rows is None else check_rows(rows, desc.batch_size)
        return LayerPublisher(self, cache, wanted, per_layer, desc.num_tensors // per_layer)

    def _publish_layer(self, publisher: LayerPublisher, layer_index: int) -> None:
        with self._cluster.lock:
            own = self._own(publisher._cache)
            layers = publisher._mark(layer_index)
            if layers != publisher._published:
                # The tensors that are left over come with the last layer.
                is_last = layers == publisher._layers
                tensors = own.desc.num_tensors if is_last else layers * publisher._per_layer
                self._cluster.caches.publish(own, publisher._rows, tensors)
                publisher._published = layers       # last: what was interrupted is done by the next call
