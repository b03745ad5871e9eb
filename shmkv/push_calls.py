"""The calls of a manager that push: a prompt's layers go to its decoders while the next ones are computed."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv.cache_task import CacheTask
from shmkv.kv_cache import KvCache
from shmkv.manager_base import ManagerBase
from shmkv.push_arguments import TransferRequest
from shmkv.transfer_config import LayerSynchronizer, TransferConfig
from shmkv.types import LLMRole


class PushCalls(ManagerBase):
    """A push goes over a link that the other cluster made to this one, to addresses that its process knows."""

    def transfer_cache_async(self, src_cache: KvCache, layer_synchronizer: LayerSynchronizer,
                             transfer_configs: Sequence[TransferConfig], src_block_indices: Sequence[int] | None = None,
                             dst_block_indices: Sequence[int] | None = None,
                             dst_block_memory_size: int | None = None) -> CacheTask:
        """Push layers of `src_cache` to the addresses of each config (role PROMPT), on a thread of its own, and return at once.

        Layer by layer: ``layer_synchronizer.synchronize_layer(layer, None)``, which blocks until tensors ``2 * layer`` and
        ``2 * layer + 1`` are computed, then these two to the next two ``dst_addrs`` of every config whose range has the layer
        (None: all layers). Layers that no config has are passed over. The addresses are those in the `per_device_tensor_addrs`
        of a cache that the other cluster allocated, plus any offset into the tensor. The source stays until the task has ended.

        - Without block lists: row `src_batch_index` of each tensor, whole, to exactly its address.
        - With both lists (uint64): block ``src_block_indices[i]`` to the address plus ``dst_block_indices[i]`` times the bytes of a
          block; of equal destinations the last one stays. `dst_block_memory_size`: bytes of a destination block; None and 0 mean
          the source's, and nothing else can be transferred.

        What happens to one config is a result of the task and not raised: LLM_NOT_YET_LINK; LLM_PARAM_INVALID for addresses and
        numbers that are not there, before its first byte, and for a synchronizer that returned False; LLM_FAILED for one that
        raised; LLM_WAIT_PROCESS_TIMEOUT if a layer took longer than `sync_kv_timeout` or the peer died. The first failure ends the
        task, and what was not finished by then has the result None.

        Raises:
            TypeError, LLMParamError: an argument.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated source.
        """
        self._check_role("transfer_cache_async", LLMRole.PROMPT)
        try:
            request = TransferRequest(src_cache, layer_synchronizer, transfer_configs, src_block_indices, dst_block_indices,
                                      dst_block_memory_size)
        except MemoryError as error:
            raise self._cluster.no_memory("addresses and lists of blocks", error) from error
        return CacheTask(self._pushes.start(self._usable(src_cache), layer_synchronizer, request.destinations, request.blocks))
