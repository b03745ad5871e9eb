"""CacheManager: the calls of llm_datadist's second generation, arguments checked in the order of the contract.

Nothing here depends on a role. The work is that of the first generation's manager; what differs is what is asked of the arguments.
"""
from __future__ import annotations

from collections.abc import Sequence

from shmkv.addressed import AddressedCache
from shmkv.block_arguments import check_copy_block_info, check_swap_indices
from shmkv.cache import Cache, check_cache, check_kind
from shmkv.cache_arguments import check_allocation, check_batch_dim_of_blocks, rows_of_keys
from shmkv.cache_layout import CacheLayout
from shmkv.cache_requests import CacheBlocksPull, CachePull, RemoteCacheBlocksPull, RemoteCachePull
from shmkv.checks import check_copy_size, check_dict, check_sequence, check_type, check_uint32, check_uint64
from shmkv.errors import LLMParamError
from shmkv.key_push_calls import KeyPushCalls
from shmkv.keys import BlocksCacheKey, CacheKey, KeyWords
from shmkv.local_work import LocalWork, check_alike
from shmkv.options import HOST_MEM_POOL, MEM_POOL
from shmkv.own_cache import OwnCache
from shmkv.pull_arguments import check_usable_key
from shmkv.pull_failure import PullKey, SourceKey
from shmkv.register_calls import RegisterCalls
from shmkv.types import CacheDesc, Placement


class CacheManager(LocalWork, RegisterCalls, KeyPushCalls):
    """Caches of one LLMDataDist that was initialised with `enable_cache_manager`; got by `LLMDataDist.cache_manager`. Calls are
    safe from any thread.

    What they have in common: TypeError for an argument of a wrong type; LLMException with LLM_ENGINE_FINALIZED after finalize, with
    LLM_FAILED in a forked child, and with LLM_LINK_BUSY for a signal handler that would have to wait for the pull or the call that
    it interrupted.
    """

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """LLMParamError unless exactly one of req_id and prefix_id is given (the other is 2**64 - 1)."""
        check_usable_key(cache_key)

    # -- memory -----------------------------------------------------------------------------------------------------

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Allocate the tensors of `cache_desc` in shared memory and bind `cache_keys[i]` to row i.

        The memory counts in the pool of the placement: `mem_pool_cfg` for DEVICE, `host_mem_pool_cfg` for HOST. Either can be
        pulled from. Fresh memory is zero, recycled memory is undefined.

        Raises:
            LLMParamError: description, no pool for the placement, too many keys, one key twice, a key that is bound already.
            LLMException: LLM_OUT_OF_MEMORY, the pool or the memory of the host is full.
        """
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        keys = check_sequence("cache_keys", cache_keys, CacheKey)
        wanted = self._check_allocation(cache_desc)
        return self._allocate(wanted, rows_of_keys(keys, wanted.rows, unique=True))

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a cache whose rows (dimension 0) are blocks. `blocks_cache_key` names it as long as it lives, one cache a model
        id. Raises as `allocate_cache` does."""
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        if blocks_cache_key is not None:
            check_type("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        wanted = self._check_allocation(cache_desc)
        check_batch_dim_of_blocks(wanted.desc)
        return self._allocate(wanted, {}, blocks=True,
                              blocks_model_id=None if blocks_cache_key is None else blocks_cache_key.model_id)

    def _check_allocation(self, desc: CacheDesc) -> CacheLayout:
        wanted = check_allocation(desc, True, False, self._cluster.no_memory, tuple(Placement))
        if wanted.desc.placement not in self._cluster.caches.pools:
            option = MEM_POOL if wanted.desc.placement == Placement.DEVICE else HOST_MEM_POOL
            raise LLMParamError(f"placement {wanted.desc.placement!s} of argument 'cache_desc' needs the option {option}")
        return wanted

    def _allocate(self, wanted: CacheLayout, rows: dict[int, KeyWords], *, blocks: bool = False,
                  blocks_model_id: int | None = None) -> Cache:
        made: list[OwnCache] = []
        try:
            with self._cluster.lock:
                own = self._cluster.caches.allocate(wanted, rows, publish=True, zero=False, blocks=blocks,
                                                    blocks_model_id=blocks_model_id, into=made)
            return Cache(own.cache_id, own.desc.snapshot(), None, blocks, self, own)
        except BaseException:
            for cache in made:              # interrupted before anybody had a handle
                self._dropped(cache).append(cache)
            raise

    def deallocate_cache(self, cache: Cache) -> None:
        """Drop the id reference; the memory goes when no key is left and nobody reads it. Twice is no error.

        Raises:
            TypeError: not a Cache.
            LLMParamError: a blocks cache, or one that was registered.
        """
        self._deallocate(cache, is_blocks=False)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Drop the id reference of a blocks cache, and its key; the memory goes when nobody reads it. Twice is no error.

        Raises:
            TypeError: not a Cache.
            LLMParamError: not a blocks cache, or one that was registered.
        """
        self._deallocate(cache, is_blocks=True)

    def _deallocate(self, cache: Cache, *, is_blocks: bool) -> None:
        self._cluster.check_usable()
        check_cache("cache", cache)
        with self._cluster.lock:
            own = cache._own
            if own is not None:
                check_kind("cache", cache, is_blocks=is_blocks)
                if isinstance(own, AddressedCache):
                    raise LLMParamError(f"{cache!r} was registered: unregister_cache forgets it")
                if self._cluster.caches.is_current(own):
                    self._cluster.caches.deallocate(own)
            cache._close()

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget a key; unknown, consumed and padding keys are no error.

        Raises:
            TypeError: not a CacheKey.
        """
        self._cluster.check_usable()
        check_type("cache_key", cache_key, CacheKey)
        if cache_key.is_padding:
            return
        with self._cluster.lock:
            self._cluster.caches.remove_key(cache_key.words)

    # -- pulls ------------------------------------------------------------------------------------------------------

    def pull_cache(self, cache_key: PullKey, cache: Cache, batch_index: int = 0, size: int = -1, *,
                   src_layer_range: range | None = None, dst_layer_range: range | None = None,
                   src_cache_offset: int | None = None, dst_cache_offset: int | None = None,
                   tensor_num_per_layer: int = 2) -> None:
        """Copy the row that `cache_key` names into row `batch_index` of `cache`, of either placement; as
        `KvCacheManager.pull_cache`.

        Where the own cluster was initialised as remote-accessible, the key has to be a CacheKeyByIdAndIndex, and nothing is
        consumed. Nor is a key of registered memory, ever.

        Raises:
            LLMParamError: an argument, a blocks cache, or source and destination that do not fit each other.
            LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_LINK_BUSY, LLM_TIMEOUT.
        """
        if type(cache) is Cache and type(batch_index) is int:
            prepared = cache._prepared_for(size, src_layer_range, dst_layer_range, src_cache_offset, dst_cache_offset,
                                           tensor_num_per_layer, None, False)
            if prepared is not None:
                prepared.pull(cache_key, batch_index)
                return
        self._cluster.check_usable()
        kind = RemoteCachePull if self._cluster.settings.remote_accessible else CachePull
        request = kind(cache_key, cache, batch_index, size, src_layer_range=src_layer_range, dst_layer_range=dst_layer_range,
                       src_cache_offset=src_cache_offset, dst_cache_offset=dst_cache_offset,
                       tensor_num_per_layer=tensor_num_per_layer)
        if cache._own is not None:
            cache._keep_prepared(request.options, self._prepare(request))
        self._pull(request)

    def pull_blocks(self, src_cache_key: SourceKey, dst_cache: Cache, src_blocks: Sequence[int] = (),
                    dst_blocks: Sequence[int] = (), *, src_layer_range: range | None = None,
                    dst_layer_range: range | None = None, tensor_num_per_layer: int = 2) -> None:
        """Copy many blocks in one call, for every selected tensor, into a blocks cache of either placement.

        - BlocksCacheKey: block ``src_blocks[i]`` goes to ``dst_blocks[i]``, in order; both sides' blocks have the same bytes.
        - CacheKey or CacheKeyByIdAndIndex, with `src_blocks` empty: the row is cut into chunks of the destination's block size,
          chunk i goes to ``dst_blocks[i]``. A request key is consumed as by `pull_cache`.

        Raises as `pull_cache` does.
        """
        self._cluster.check_usable()
        kind = RemoteCacheBlocksPull if self._cluster.settings.remote_accessible else CacheBlocksPull
        try:
            request = kind(src_cache_key, dst_cache, src_blocks, dst_blocks, batch_index=0, src_layer_range=src_layer_range,
                           dst_layer_range=dst_layer_range, tensor_num_per_layer=tensor_num_per_layer, strict_format=False)
        except MemoryError as error:
            raise self._cluster.no_memory("lists of blocks", error) from error
        self._pull_blocks(request)

    # -- copies in this process -------------------------------------------------------------------------------------

    def copy_cache(self, dst: Cache, src: Cache, dst_batch_index: int = 0, src_batch_index: int = 0, offset: int = 0,
                   size: int = -1, req_id: int | None = None) -> None:
        """Copy a row of `src` into a row of `dst`, neither a blocks cache, all tensors, the same `offset` on both sides.

        `offset` and `size` are bytes of each tensor's row, -1 = the rest of the source row. `req_id` (uint64) is not used.

        Raises:
            LLMParamError: an argument, a blocks cache, unequal numbers of tensors, bytes that do not fit a row.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._cluster.check_usable()
        for name, cache in (("dst", dst), ("src", src)):
            check_cache(name, cache)
        for name, cache in (("dst", dst), ("src", src)):
            check_kind(name, cache, is_blocks=False)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_copy_size("size", size)
        if req_id is not None:
            check_uint64("req_id", req_id)
        self._copy_row(dst, src, dst_batch_index, src_batch_index, offset, size)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks within one blocks cache, all tensors: {source: [destination, ...]}. In the dict's order, each copy sees the
        earlier ones; an empty dict or list does nothing.

        Raises:
            TypeError: an argument.
            LLMParamError: not a blocks cache, a block that is not there; nothing was copied then.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._cluster.check_usable()
        check_cache("cache", cache)
        info = check_copy_block_info(copy_block_info)
        check_kind("cache", cache, is_blocks=True)
        self._copy_within(cache, info)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a blocks cache of placement HOST and one of placement DEVICE, either way: {source block: destination
        block}, all tensors. In spite of its name nothing is exchanged.

        Raises:
            LLMParamError: an argument, not exactly one HOST and one DEVICE, unequal tensors or block bytes, a block not there.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._cluster.check_usable()
        names = ("src_cache", "dst_cache")
        for name, cache in zip(names, (src_cache, dst_cache), strict=True):
            check_cache(name, cache)
        check_dict("src_to_dst", src_to_dst, int, int)
        for name, cache in zip(names, (src_cache, dst_cache), strict=True):
            check_kind(name, cache, is_blocks=True)
        check_alike(src_cache.cache_desc, dst_cache.cache_desc, names)
        pairs = check_swap_indices(src_to_dst, src_cache.cache_desc.batch_size, dst_cache.cache_desc.batch_size)
        self._swap(src_cache, dst_cache, pairs, names)
