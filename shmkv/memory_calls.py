"""The calls of a manager around memory that the caller already has."""
from __future__ import annotations

from shmkv.cache_arguments import check_batch_dim_of_blocks
from shmkv.cache_layout import CacheLayout, layout
from shmkv.checks import check_type
from shmkv.errors import LLMParamError
from shmkv.kv_cache import KvCache, check_kv_cache
from shmkv.manager_base import ManagerBase
from shmkv.registered import RegisteredCache, held_layout
from shmkv.types import CacheDesc
from shmkv.user_memory import HeldMemory, lay_out


class MemoryCalls(ManagerBase):
    """Private memory as destination of pulls and as either end of local copies."""

    def register_cache(self, cache_desc: CacheDesc, buffers: object) -> KvCache:
        """A cache in memory of the caller: pulls write straight into it. Nothing is copied, and no other process can pull from it.

        `buffers`: objects with the buffer protocol, ``__array_interface__`` or DLPack on the CPU (numpy, ml_dtypes, torch, mmap,
        bytearray). One a tensor, of its shape; or with more axes in front whose indices count tensors ([2, *shape] for K and V of a
        layer, [layers, 2, *shape] for all); or flat bytes of whole tensors. Strided views are fine as long as the bytes of a row
        behind the batch dimension lie together and none are shared, so ``kv[:, 0]`` of blocks that hold K and V is.

        The memory is held until `unregister_cache`, or until nobody refers to the cache; a bytearray cannot be resized meanwhile, a
        numpy array neither. A torch tensor's storage can, which is for the caller not to do. The placement may be HOST, for
        `swap_blocks`.

        Raises:
            TypeError: a buffer with none of the three protocols.
            LLMParamError: description; a buffer that is read-only, on another device, of another shape, size or element size; an
                axis with the wrong stride, named with what was found and expected; tensors that share bytes.
        """
        return self._register(cache_desc, buffers, is_blocks=False)

    def register_blocks_cache(self, cache_desc: CacheDesc, buffers: object) -> KvCache:
        """A blocks cache in memory of the caller, whose rows (dimension 0) are the blocks: `pull_blocks` writes straight into those
        that it is told. Nothing is copied, and no other process can pull from it. With placement HOST it is what `swap_blocks`
        copies out to and back from.

        `buffers` are objects as for `register_cache`: one a tensor, of its shape; or with axes in front whose indices count
        tensors; or flat bytes of whole tensors. The memory is held until `unregister_cache`, or until nobody refers to the cache.

        Raises:
            TypeError: a buffer with none of the three protocols.
            LLMParamError: as `register_cache`; a `batch_dim_index` other than 0.
        """
        return self._register(cache_desc, buffers, is_blocks=True)

    def _register(self, cache_desc: CacheDesc, buffers: object, *, is_blocks: bool) -> KvCache:
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        wanted = self._layout(cache_desc)
        if is_blocks:
            check_batch_dim_of_blocks(wanted.desc)
        held = _held(wanted.desc, buffers)
        try:
            own = RegisteredCache.over(held, self._cluster.caches.next_id(), held_layout(wanted, held), is_blocks)
            cache = KvCache(own.cache_id, own.desc.snapshot(), None, self, own)     # whose end is known from here on
        except MemoryError as error:
            held.release()          # the traceback would keep it for as long as the exception lives
            raise self._cluster.no_memory("a registered cache", error) from error
        with self._cluster.lock:
            self._cluster.caches.registered.add(own)
        return cache

    def _layout(self, desc: CacheDesc) -> CacheLayout:
        try:
            return layout(desc)
        except MemoryError as error:
            raise self._cluster.no_memory("the layout of a cache", error) from error

    def unregister_cache(self, cache: KvCache) -> None:
        """Let go of the memory of a registered cache as soon as no call uses it any more. Twice is no error.

        Raises:
            LLMParamError: a cache that was not registered.
        """
        self._cluster.check_usable()
        check_kv_cache("cache", cache)
        with self._cluster.lock:
            own = cache._own
            if own is not None and not isinstance(own, RegisteredCache):
                raise LLMParamError(f"{cache!r} was not registered: deallocate_cache gives its memory back")
            if own is not None and self._cluster.caches.is_current(own):
                self._cluster.caches.deallocate(own)
            cache._close()
        if own is not None:
            own.release()


def _held(desc: CacheDesc, buffers: object) -> HeldMemory:
    tensors = range(desc.num_tensors)
    return lay_out([desc.tensor_shape(i) for i in tensors], [desc.tensor_data_type(i).nbytes for i in tensors], desc.batch_dim,
                   buffers)
