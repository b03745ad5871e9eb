"""The calls that wait, for asyncio: the event loop never blocks, a few threads do."""
from __future__ import annotations

from collections.abc import AsyncIterator

from shmkv.checks import check_bool
from shmkv.cluster import Cluster
from shmkv.heads import HeadSlice
from shmkv.kv_cache import KvCache
from shmkv.link import Links
from shmkv.link_watch import LinkWatch
from shmkv.pull_arguments import PullRequest
from shmkv.pull_failure import PullKey, SourceKey
from shmkv.push import Pushes
from shmkv.stream_calls import LayerPull, StreamCalls
from shmkv.turns import Steps, Turns
from shmkv.types import LLMRole


async def _take_turns(turns: Turns, steps: Steps) -> int:
    from shmkv.event_loop import take_turns  # with asyncio, which others need not have

    return await take_turns(turns, steps)


class AsyncLayerPull:
    """`LayerPull` for ``async for`` and ``async with``; made by `pull_layers_async`."""

    def __init__(self, layers: LayerPull, turns: Turns) -> None:
        self._layers = layers
        self._turns = turns

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        if self._layers.is_over:
            raise StopAsyncIteration
        await _take_turns(self._turns, self._layers)
        return self._layers.take()

    async def aclose(self) -> None:
        """No more layers; twice is no error."""
        self._layers.close()

    async def __aenter__(self) -> AsyncLayerPull:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._layers.close()


class AsyncCalls(StreamCalls):
    """Each takes the arguments of its namesake, which are checked by the call itself, and raises the same.

    Waits sleep in threads of the manager, made on first need and gone at finalize, SHMKV_ASYNC_THREADS (4) at the most. When
    there are more waits than that, one thread sleeps for all of them, and each goes to a thread when there is something for it.
    Cancelled, a call ends at once, or if a thread is inside as soon as that has looked, after a share of a copy at the latest:
    the link's lock is free then and the key not consumed, bytes of the destination may have changed. A cancellation that comes
    after the last byte finds the pull done.
    """

    def __init__(self, cluster: Cluster, links: Links, watch: LinkWatch, pushes: Pushes) -> None:
        super().__init__(cluster, links, watch, pushes)
        self._turns = Turns(cluster.settings.async_threads, self._waits)

    async def wait_for_key_async(self, key: SourceKey, timeout_ms: int | None = None) -> None:
        """Return when the key (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey) is bound and all tensors behind it are published, of
        a linked cluster or of the own one, without blocking the event loop. `timeout_ms`: 1 to 2**32 - 1, None = sync_kv_timeout.

        Raises:
            TypeError, LLMParamError: an argument.
            LLMException: LLM_WAIT_PROCESS_TIMEOUT at the end of `timeout_ms`; at once, as `wait_for_key`, when it will not come.
        """
        await _take_turns(self._turns, self._key_wait(key, timeout_ms))

    async def pull_cache_async(self, cache_key: PullKey, kv_cache: KvCache, batch_index: int = 0, size: int = -1, *,
                               src_layer_range: range | None = None, dst_layer_range: range | None = None,
                               src_cache_offset: int | None = None, dst_cache_offset: int | None = None,
                               tensor_num_per_layer: int = 2, heads: HeadSlice | None = None, strict_format: bool = False,
                               wait: bool = False, timeout_ms: int | None = None) -> None:
        """Copy the row that `cache_key` names into row `batch_index` of `kv_cache` (role DECODER), without blocking the event loop.

        The arguments mean what they mean for `pull_cache` (sizes and offsets are bytes), but `timeout_ms` (1 to 2**32 - 1, None =
        sync_kv_timeout) is the deadline with and without `wait`. Cancelled before its last byte, it leaves the key, and bytes of
        the destination may have changed.

        Raises:
            TypeError, LLMParamError: an argument, another role, or source and destination that do not fit each other.
            LLMException: as `pull_cache`.
        """
        self._check_role("pull_cache_async", LLMRole.DECODER)
        check_bool("wait", wait)
        request = PullRequest(cache_key, kv_cache, batch_index, size, src_layer_range=src_layer_range,
                              dst_layer_range=dst_layer_range, src_cache_offset=src_cache_offset,
                              dst_cache_offset=dst_cache_offset, tensor_num_per_layer=tensor_num_per_layer, heads=heads,
                              strict_format=strict_format)
        await _take_turns(self._turns, self._row_wait(request, timeout_ms, waits=wait))

    def pull_layers_async(self, cache_key: PullKey, kv_cache: KvCache, batch_index: int = 0, *,
                          src_layer_range: range | None = None, dst_layer_range: range | None = None,
                          tensor_num_per_layer: int = 2, timeout_ms: int | None = None) -> AsyncLayerPull:
        """Pull a row layer by layer (role DECODER), each as soon as the other side has marked it, without blocking the event loop:
        ``async for layer in manager.pull_layers_async(key, cache): ...`` gets the index of each layer of `kv_cache` when its bytes
        are in row `batch_index`. Not awaited itself. One deadline for all, from this call on: `timeout_ms` (1 to 2**32 - 1), None =
        sync_kv_timeout.

        Raises:
            TypeError, LLMParamError: an argument, or another role.
            LLMException: by this call or by the iteration, as `pull_layers`.
        """
        layers = self.pull_layers(cache_key, kv_cache, batch_index, src_layer_range=src_layer_range,
                                  dst_layer_range=dst_layer_range, tensor_num_per_layer=tensor_num_per_layer,
                                  timeout_ms=timeout_ms)
        return AsyncLayerPull(layers, self._turns)

    def _end_waits(self) -> None:
        super()._end_waits()
        if not self._cluster.is_forked:
            self._turns.close(self._cluster.settings.sync_kv_timeout_ms / 1000)
