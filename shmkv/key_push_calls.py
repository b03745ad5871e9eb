"""The calls of a manager that write into caches of other clusters, where memory is remote-accessible."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv._blocks import BlockLists
from shmkv.cache import Cache
from shmkv.cache_task import CacheTask
from shmkv.errors import LLMParamError
from shmkv.key_push import TargetKey, key_push_failure, push_to_key
from shmkv.key_push_arguments import BlocksPush, RowPush
from shmkv.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from shmkv.manager_base import ManagerBase
from shmkv.pull_failure import Select
from shmkv.push_arguments import AnyConfig, CacheTransfer, KeyTransfer
from shmkv.transfer_config import LayerSynchronizer


class KeyPushCalls(ManagerBase):
    """Nobody at the other end takes notice of a push: that it is done is for the caller to tell."""

    def push_cache(self, dst_cache_key: CacheKeyByIdAndIndex, src_cache: Cache, src_batch_index: int = 0,
                   src_layer_range: range | None = None, dst_layer_range: range | None = None, size: int = -1,
                   tensor_num_per_layer: int = 2) -> None:
        """Copy row `src_batch_index` of `src_cache`, whole, to the row that `dst_cache_key` names, for every selected tensor. Rows
        of the destination may be longer. Layer ranges as for `pull_cache`.

        Raises:
            LLMParamError: not initialised with enable_remote_cache_accessible; an argument; a size other than -1; a destination
                that is not remote-accessible or does not fit.
            LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_LINK_BUSY, LLM_TIMEOUT. Only after the last of them may
                bytes of the destination have changed.
        """
        self._check_remote_accessible("push_cache")
        request = RowPush(dst_cache_key, src_cache, src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer)
        self._push(dst_cache_key, src_cache, request.select, None)

    def push_blocks(self, dst_cache_key: BlocksCacheKey, src_cache: Cache, src_blocks: Sequence[int] = (),
                    dst_blocks: Sequence[int] = (), src_layer_range: range | None = None, dst_layer_range: range | None = None,
                    tensor_num_per_layer: int = 2) -> None:
        """Copy block ``src_blocks[i]`` of `src_cache` to block ``dst_blocks[i]`` of the blocks cache that `dst_cache_key` names, in
        order, so that of equal destinations the last one stays. Raises as `push_cache` does."""
        self._check_remote_accessible("push_blocks")
        try:
            request = BlocksPush(dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range,
                                 tensor_num_per_layer)
        except MemoryError as error:
            raise self._cluster.no_memory("lists of blocks", error) from error
        self._push(dst_cache_key, src_cache, request.select, request.lists)

    def transfer_cache_async(self, src_cache: Cache, layer_synchronizer: LayerSynchronizer, transfer_configs: Sequence[AnyConfig],
                             src_block_indices: Sequence[int] | None = None, dst_block_indices: Sequence[int] | None = None,
                             dst_block_memory_size: int | None = None) -> CacheTask:
        """Push layers of `src_cache` (placement DEVICE) to the destination of each config, on a thread, and return at once; as
        `KvCacheManager.transfer_cache_async`, but for this:

        - Where memory is remote-accessible, the configs are TransferWithCacheKeyConfig: the source's layer ``src.start + i``
          becomes layer ``dst.start + i`` of the cache that the key names. Without block lists its row (block 0 under a
          BlocksCacheKey) is written, with them those of its blocks. Otherwise they are TransferConfig, with addresses.
        - With `dst_block_indices` and `dst_block_memory_size` alone, row `src_batch_index` is cut into chunks of that many bytes,
          and chunk i goes to block ``dst_block_indices[i]``.
        - A layer that took longer than `sync_kv_timeout`, and a peer that died, are LLM_TIMEOUT.

        Raises:
            TypeError, LLMParamError: an argument.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated source.
        """
        self._cluster.check_usable()
        kind = KeyTransfer if self._cluster.settings.remote_accessible else CacheTransfer
        try:
            request = kind(src_cache, layer_synchronizer, transfer_configs, src_block_indices, dst_block_indices,
                           dst_block_memory_size)
        except MemoryError as error:
            raise self._cluster.no_memory("addresses and lists of blocks", error) from error
        return CacheTask(self._pushes.start(self._usable(src_cache), layer_synchronizer, request.destinations, request.blocks))

    def _check_remote_accessible(self, what: str) -> None:
        self._cluster.check_usable()
        if not self._cluster.settings.remote_accessible:
            raise LLMParamError(f"{what} needs the option enable_remote_cache_accessible (llm.EnableRemoteCacheAccessible)")

    def _push(self, key: TargetKey, src_cache: Cache, select: Select, lists: BlockLists | None) -> None:
        with self._cluster.lock:
            source = self._usable(src_cache)
            source.local.count_in()
        try:
            status = push_to_key(self._cluster, self._links, key, source, select, lists)
        finally:
            source.local.leave()
        if status:
            raise key_push_failure(status, self._cluster, self._links, key)
