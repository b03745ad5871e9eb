"""The calls of a manager that move blocks: between clusters, within a cache, between private and shared memory."""
from __future__ import annotations

from shmkv.block_arguments import BlocksRequest, check_copy_block_info, check_swap_indices
from shmkv.checks import check_dict
from shmkv.kv_cache import KvCache, check_kv_cache
from shmkv.local_work import LocalWork, check_alike
from shmkv.pull_arguments import check_device
from shmkv.pull_failure import SourceKey
from shmkv.types import LLMRole


class BlockCalls(LocalWork):
    """A block is a row of a cache, whatever its kind; `allocate_blocks_cache` makes those that a BlocksCacheKey names."""

    def pull_blocks(self, prompt_cache_key: SourceKey, decoder_kv_cache: KvCache, prompt_blocks: list[int],
                    decoder_blocks: list[int], *, src_layer_range: range | None = None, dst_layer_range: range | None = None,
                    tensor_num_per_layer: int = 2, batch_index: int = 0, strict_format: bool = False) -> None:
        """Copy many blocks in one call (role DECODER), for every selected tensor.

        - BlocksCacheKey: block ``prompt_blocks[i]`` goes to ``decoder_blocks[i]``, in order, so that of equal destinations the last
          one stays; the two sides' blocks must have the same bytes. A blocks key is never consumed.
        - CacheKey or CacheKeyByIdAndIndex, with `prompt_blocks` empty: the row is cut into chunks of the destination's block size,
          chunk i goes to ``decoder_blocks[i]``. A request key is consumed as by `pull_cache`.
        - BlocksCacheKey into a cache of `allocate_cache` or `register_cache`, with `decoder_blocks` empty: block
          ``prompt_blocks[i]`` becomes chunk i of row `batch_index`.

        Layer ranges and `strict_format` as for `pull_cache`. Each source block has to be published, if its owner publishes at all.

        Raises:
            LLMParamError: an argument, blocks that are not there or do not fit.
            LLMException: as for `pull_cache`.
        """
        self._check_role("pull_blocks", LLMRole.DECODER)
        try:
            request = BlocksRequest(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, batch_index=batch_index,
                                    src_layer_range=src_layer_range, dst_layer_range=dst_layer_range,
                                    tensor_num_per_layer=tensor_num_per_layer, strict_format=strict_format)
        except MemoryError as error:
            raise self._cluster.no_memory("lists of blocks", error) from error
        self._pull_blocks(request)

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks within one cache, all tensors: {source: [destination, ...]}. In the dict's order, each copy sees the earlier
        ones; an empty dict or list does nothing.

        Raises:
            LLMParamError: an argument, own memory of the caller, a block that is not there; nothing was copied then.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache; out of memory, with some of the copies done.
        """
        self._cluster.check_usable()
        check_kv_cache("cache", cache)
        info = check_copy_block_info(copy_block_info)
        check_device("cache", cache)
        self._copy_within(cache, info)

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between private memory (placement HOST) and a cache of placement DEVICE, either way: {source block:
        destination block}, all tensors. In spite of its name nothing is exchanged.

        Raises:
            LLMParamError: an argument, not exactly one HOST and one DEVICE, unequal tensors or block bytes, a block not there.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._cluster.check_usable()
        check_kv_cache("src", src)
        check_kv_cache("dst", dst)
        check_dict("src_to_dst", src_to_dst, int, int)
        check_alike(src.cache_desc, dst.cache_desc)
        self._swap(src, dst, check_swap_indices(src_to_dst, src.cache_desc.batch_size, dst.cache_desc.batch_size))
