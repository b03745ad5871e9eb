"""KvCacheManager: the calls of llm_datadist's first generation, arguments checked in the order of the contract.

Role first, then types, then values; nothing is touched before all of it passed. The work is done in `caches.py` (memory, keys) and
`transfer.py` (bytes).
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from shmkv import _pull, transfer
from shmkv._pull import PreparedPull
from shmkv.async_calls import AsyncCalls
from shmkv.block_calls import BlockCalls
from shmkv.cache_arguments import (
    check_allocation,
    check_batch_dim_of_blocks,
    check_rows,
    check_ttl,
    published_tensors,
    rows_of_keys,
    words_of_rows,
)
from shmkv.cache_layout import CacheLayout
from shmkv.checks import (
    check_bool,
    check_copy_size,
    check_dict,
    check_int,
    check_int32,
    check_positive,
    check_sequence,
    check_type,
    check_uint32,
    check_uint64,
)
from shmkv.errors import LLMParamError
from shmkv.heads import HeadSlice
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, KeyWords
from shmkv.kv_cache import KvCache, check_kv_cache, make_view
from shmkv.memory_calls import MemoryCalls
from shmkv.operator_calls import OperatorCalls
from shmkv.own_cache import OwnCache
from shmkv.pull_arguments import LastPull, PullRequest, check_device, check_usable_key
from shmkv.pull_failure import PullKey
from shmkv.push_calls import PushCalls
from shmkv.registered import RegisteredCache
from shmkv.tensor import Tensor, TensorDesc
from shmkv.types import CacheDesc, LLMRole
from shmkv.view_calls import ViewCalls

ANY_KEY = CacheKeyByIdAndIndex(0, 0)
DECODER = LLMRole.DECODER       # looking a member up in an enumeration costs more than the rest of a pull's checks


class KvCacheManager(BlockCalls, PushCalls, MemoryCalls, ViewCalls, AsyncCalls, OperatorCalls):
    """Caches of one initialised LLMDataDist; got by `LLMDataDist.kv_cache_manager`. Calls are safe from any thread.

    What calls have in common: TypeError for an argument of a wrong type; LLMException with LLM_ENGINE_FINALIZED after finalize,
    with LLM_FAILED in a forked child, and with LLM_LINK_BUSY for a signal handler that would have to wait for the pull or the call
    that it interrupted.
    """

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """LLMParamError unless exactly one of req_id and prefix_id is given (the other is 2**64 - 1)."""
        check_usable_key(cache_key)

    # -- memory -----------------------------------------------------------------------------------------------------

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = (), *, publish: bool = True,
                       zero: bool = False, key_ttl_ms: int | None = None, wait_ms: int | None = None) -> KvCache:
        """Allocate the tensors of `cache_desc` in shared memory and bind `cache_keys[i]` to row i.

        Keys need role PROMPT. With ``publish=False`` nothing can be pulled before `publish`, which is the safe way: fill first.
        Fresh memory is zero, recycled memory is undefined unless ``zero=True``. A key that nobody fetched
        within `key_ttl_ms` (1 to 2**32 - 1, counted from this call) is removed by this manager's next call; None: it stays.

        When memory is short and `wait_ms` (uint32) is given, it is waited for so long at most: until caches of this cluster are
        freed, by readers that consume their keys, by leases that end, or by other threads.

        Raises:
            LLMParamError: description, placement, role, too many keys, a key that is bound already or names nothing.
            LLMException: LLM_DEVICE_OUT_OF_MEMORY with the bytes wanted and free.
        """
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        keys = check_sequence("cache_keys", cache_keys, CacheKey)
        wanted = check_allocation(cache_desc, publish, zero, self._cluster.no_memory)
        ttl_ms = check_ttl(key_ttl_ms)
        if keys:
            self._check_role("allocate_cache with cache_keys", LLMRole.PROMPT)
        rows = rows_of_keys(keys, wanted.rows)
        if wait_ms is None:
            return self._allocate(wanted, rows, publish=publish, zero=zero, key_ttl_ms=ttl_ms)
        return self._waits.for_memory(lambda: self._allocate(wanted, rows, publish=publish, zero=zero, key_ttl_ms=ttl_ms),
                                      check_uint32("wait_ms", wait_ms))

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None, *,
                              publish: bool = True, zero: bool = False) -> KvCache:
        """Allocate a cache whose rows (dimension 0) are blocks. `blocks_cache_key` names it as long as it lives, one cache a
        model id; a key needs a role other than DECODER.

        Raises:
            LLMParamError: description (the batch dimension must be 0), placement, role, a key that is bound already.
            LLMException: LLM_DEVICE_OUT_OF_MEMORY with the bytes wanted and free.
        """
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        if blocks_cache_key is not None:
            check_type("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        wanted = check_allocation(cache_desc, publish, zero, self._cluster.no_memory)
        check_batch_dim_of_blocks(wanted.desc)
        if blocks_cache_key is not None:
            self._check_role("allocate_blocks_cache with blocks_cache_key", LLMRole.PROMPT, LLMRole.MIX)
        model_id = None if blocks_cache_key is None else blocks_cache_key.model_id
        return self._allocate(wanted, {}, publish=publish, zero=zero, blocks=True, blocks_model_id=model_id)

    def _allocate(self, wanted: CacheLayout, rows: dict[int, KeyWords], *, publish: bool, zero: bool, blocks: bool = False,
                  blocks_model_id: int | None = None, key_ttl_ms: int | None = None) -> KvCache:
        made: list[OwnCache] = []
        try:
            with self._cluster.lock:
                own = self._cluster.caches.allocate(wanted, rows, publish=publish, zero=zero, blocks=blocks,
                                                    blocks_model_id=blocks_model_id, key_ttl_ms=key_ttl_ms, into=made)
            return KvCache(own.cache_id, own.desc.snapshot(), None, self, own)
        except BaseException:
            for cache in made:              # interrupted before anybody had a handle
                self._dropped(cache).append(cache)
            raise

    def deallocate_cache(self, cache: KvCache) -> None:
        """Drop the id reference; the memory goes when no key is left and nobody reads it. Twice is no error.

        Raises:
            TypeError: not a KvCache.
            LLMParamError: a cache of placement HOST: `unregister_cache` lets go of one that was registered.
        """
        self._cluster.check_usable()
        check_kv_cache("cache", cache)
        check_device("cache", cache)
        with self._cluster.lock:
            own = cache._own
            if own is not None and self._cluster.caches.is_current(own):
                self._cluster.caches.deallocate(own)
            cache._close()
        if isinstance(own, RegisteredCache):
            own.release()

    def collect(self) -> int:
        """Free now what nobody uses any more: bytes given back to the system. And the records of removed links out of which
        nothing is lent any more.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_FAILED in a forked child.
        """
        self._cluster.check_usable()
        self._links.sweep_closing()
        with self._cluster.lock:
            return self._cluster.caches.collect()

    # -- keys and progress ------------------------------------------------------------------------------------------

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget a key (role PROMPT); unknown, consumed and padding keys are no error. A pull that is in its row fails with
        LLM_KV_CACHE_NOT_EXIST.

        Raises:
            TypeError: not a CacheKey.
            LLMParamError: another role.
        """
        self._check_role("remove_cache_key", LLMRole.PROMPT)
        check_type("cache_key", cache_key, CacheKey)
        if cache_key.is_padding:
            return
        with self._cluster.lock:
            self._cluster.caches.remove_key(cache_key.words)

    def bind(self, cache: KvCache, keys: dict[int, CacheKey], *, publish: bool = True, key_ttl_ms: int | None = None) -> None:
        """Name rows of a cache at run time: {batch index: key}. A row that had a key loses it.

        The rows count as filled and can be pulled from then on; with ``publish=False`` not before the next `publish`. To fill a
        row again: `unbind`, fill, `bind`. A key that nobody fetched within `key_ttl_ms` (1 to 2**32 - 1, counted from this call) is
        removed by this manager's next call; None: it stays.

        Raises:
            TypeError: an argument, or what is in `keys`.
            LLMParamError: another role; a registered cache; a row that is not there; a key without exactly one of req_id and
                prefix_id, for two rows, or bound to another one already; `key_ttl_ms`.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache; LLM_DEVICE_OUT_OF_MEMORY for the records of the keys.
        """
        self._check_role("bind", LLMRole.PROMPT)
        check_kv_cache("cache", cache)
        check_dict("keys", keys, int, CacheKey)
        check_bool("publish", publish)
        ttl_ms = check_ttl(key_ttl_ms)
        words = words_of_rows(keys)
        with self._cluster.lock:
            own = self._own(cache)
            check_rows(words, own.desc.batch_size, "keys")
            self._cluster.caches.bind(own, words, publish=publish, key_ttl_ms=ttl_ms)

    def unbind(self, cache: KvCache, rows: Iterable[int]) -> None:
        """Take the keys of rows away before they are filled again: a pull that is in one of them fails, and none gets in, by cache
        id either, before `bind` or `publish`.

        Raises:
            TypeError: not a KvCache, or a row that is no int.
            LLMParamError: another role; a registered cache; a row that is not there.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._check_role("unbind", LLMRole.PROMPT)
        check_kv_cache("cache", cache)
        with self._cluster.lock:
            own = self._own(cache)
            self._cluster.caches.unbind(own, check_rows(rows, own.desc.batch_size))

    def publish(self, cache: KvCache, *, rows: Iterable[int] | None = None, layers: int | None = None,
                tensor_num_per_layer: int = 2, key_ttl_ms: int | None = None) -> None:
        """Make rows pullable (all by default): their bytes are complete, or those of the first `layers` layers are.

        `key_ttl_ms` (1 to 2**32 - 1): the rows' keys that nobody fetched so long after this call are removed by this manager's next
        call; None leaves the deadline that they have, or have not.

        Raises:
            TypeError: an argument.
            LLMParamError: a row that is not there; more layers than the cache has tensors for; `tensor_num_per_layer` or
                `key_ttl_ms` of 0; a registered cache.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._cluster.check_usable()
        check_kv_cache("cache", cache)
        check_positive("tensor_num_per_layer", check_uint32("tensor_num_per_layer", tensor_num_per_layer))
        if layers is not None:
            check_uint32("layers", layers)
        ttl_ms = check_ttl(key_ttl_ms)
        with self._cluster.lock:
            own = self._own(cache)
            tensors = published_tensors(own.desc.num_tensors, layers, tensor_num_per_layer)
            wanted = range(own.desc.batch_size) if rows is None else check_rows(rows, own.desc.batch_size)
            self._cluster.caches.publish(own, wanted, tensors, ttl_ms)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def pull_cache(self, cache_key: PullKey, kv_cache: KvCache, batch_index: int = 0, size: int = -1, *,
                   src_layer_range: range | None = None, dst_layer_range: range | None = None,
                   src_cache_offset: int | None = None, dst_cache_offset: int | None = None,
                   tensor_num_per_layer: int = 2, heads: HeadSlice | None = None, strict_format: bool = False,
                   wait: bool = False, timeout_ms: int | None = None) -> None:
        """Copy the row that `cache_key` names into row `batch_index` of `kv_cache` (role DECODER).

        Bytes are copied: shapes and dtypes are not compared. Of each selected tensor `size` bytes go from byte `src_cache_offset`
        of the source row to byte `dst_cache_offset` of the destination row; -1 means the rest of the *destination* row. A layer
        range selects tensors ``start * tensor_num_per_layer`` to ``stop * tensor_num_per_layer - 1``; without one all tensors of
        that side. A request key is consumed once all its source tensors were pulled; an offset that is given, even 0, keeps it.
        `heads` takes some of the heads instead of whole rows, and keeps the key, too: other ranks may want the others. Where both
        sides were given a `kv_tensor_format` and the two differ, that is logged once a link, or with `strict_format` an
        LLMParamError.

        A key that is not there, or not published yet, is answered at once. With ``wait=True`` it is waited for, and tensors are
        copied as they are published, until `timeout_ms` (from 1 on, None = sync_kv_timeout; for pulls that wait only) is over. A
        key that ends meanwhile is answered at once, and so is a lost peer. The key is marked as pulled at the end.

        Raises:
            LLMParamError: an argument, or source and destination that do not fit each other.
            LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_LINK_BUSY, LLM_WAIT_PROCESS_TIMEOUT. Only after a
                timeout, an interrupt, the peer's death or a failed wait may bytes of the destination have changed; the key stays.
        """
        if self._cluster.role is not DECODER or self._cluster.is_closed:
            self._check_role("pull_cache", DECODER)
        if wait is not False:
            check_bool("wait", wait)
            self._pull_waiting(PullRequest(cache_key, kv_cache, batch_index, size, src_layer_range=src_layer_range,
                                           dst_layer_range=dst_layer_range, src_cache_offset=src_cache_offset,
                                           dst_cache_offset=dst_cache_offset, tensor_num_per_layer=tensor_num_per_layer,
                                           heads=heads, strict_format=strict_format), timeout_ms)
            return
        # Whoever pulls with some options pulls with them again: the cache keeps a prepared pull for each set of them, and only key
        # and row are left to check. The very objects of the last call need not even be looked at.
        if type(kv_cache) is KvCache:
            last = kv_cache._last
            if last is not None and last.pull_same(cache_key, batch_index, size, src_layer_range, dst_layer_range,
                                                   src_cache_offset, dst_cache_offset, tensor_num_per_layer, heads, strict_format):
                return
            prepared = kv_cache._prepared_for(size, src_layer_range, dst_layer_range, src_cache_offset, dst_cache_offset,
                                              tensor_num_per_layer, heads, strict_format)
            if prepared is not None and type(batch_index) is int:
                prepared.pull(cache_key, batch_index)
                return
        request = PullRequest(cache_key, kv_cache, batch_index, size, src_layer_range=src_layer_range,
                              dst_layer_range=dst_layer_range, src_cache_offset=src_cache_offset,
                              dst_cache_offset=dst_cache_offset, tensor_num_per_layer=tensor_num_per_layer, heads=heads,
                              strict_format=strict_format)
        if kv_cache._own is not None:
            kv_cache._keep_prepared(request.options, self._prepare(request))
        self._pull(request)

    def prepare_pull(self, kv_cache: KvCache, *, batch_index: int = 0, size: int = -1, src_layer_range: range | None = None,
                     dst_layer_range: range | None = None, src_cache_offset: int | None = None,
                     dst_cache_offset: int | None = None, tensor_num_per_layer: int = 2,
                     heads: HeadSlice | None = None, strict_format: bool = False, wait: bool = False,
                     timeout_ms: int | None = None) -> PreparedPull:
        """A `pull_cache` with everything but the key settled and checked: call what is returned with a key, as often as needed.

        It answers what the plain call would, also after the peer restarted or the caches changed. With ``wait=True`` each call
        waits as that call does, `timeout_ms` from its own beginning on. Raises as `pull_cache` does for these arguments.
        """
        self._check_role("prepare_pull", LLMRole.DECODER)
        pull = functools.partial(self._pull_waiting, timeout_ms=self._wait_ms(timeout_ms)) if check_bool("wait", wait) else None
        return self._prepare(PullRequest(ANY_KEY, kv_cache, batch_index, size, src_layer_range=src_layer_range,
                                         dst_layer_range=dst_layer_range, src_cache_offset=src_cache_offset,
                                         dst_cache_offset=dst_cache_offset, tensor_num_per_layer=tensor_num_per_layer,
                                         heads=heads, strict_format=strict_format), pull)

    def pull_many(self, requests: Sequence[PullRequest], *, wait: bool = False, timeout_ms: int | None = None) -> None:
        """Several pulls in one call (role DECODER), in order; neighbours from one cluster share one lock and one deadline.

        The first request that fails ends the call: its exception has its place in `failed_request`, those before it are done and
        those behind it are not. All destinations of neighbours are checked before their first byte.

        With ``wait=True`` what is not there or not published yet is waited for, as by ``pull_cache(wait=True)``, for all requests
        at once: each goes on when there is something for it, `timeout_ms` (None = sync_kv_timeout) is the deadline of all, and
        all destinations are checked before the first byte. Those that are done when one fails stand in `done_requests` of the
        exception.

        Raises:
            TypeError: `requests` is no list or tuple of PullRequest.
            LLMParamError: another role; `timeout_ms`; a source and a destination that do not fit each other.
            LLMException: as `pull_cache`, of the request in `failed_request`.
        """
        self._check_role("pull_many", LLMRole.DECODER)
        pulls: list[transfer.PullArguments] = [
            (request.cache_key, request.kv_cache._local or self._usable(request.kv_cache).local, request.kv_cache._cache_desc,
             request.select, request.consumes) for request in check_sequence("requests", requests, PullRequest)]
        if check_bool("wait", wait):
            self._pull_many_waiting(pulls, timeout_ms)
        else:
            transfer.pull_many(self._cluster, self._links, pulls)

    def last_pull(self) -> LastPull:
        """What the calling thread's last successful pull or copy did; zeros, "" and False before the first."""
        return LastPull(*_pull.last_pull())

    def copy_cache(self, dst: KvCache, src: KvCache, dst_batch_index: int = 0, src_batch_index: int = 0, offset: int = 0,
                   size: int = -1, req_id: int | None = None) -> None:
        """Copy a row of `src` into a row of `dst`, both of this process, all tensors, the same `offset` on both sides.

        `offset` and `size` are bytes of each tensor's row, -1 = the rest of the source row. `req_id` is not used.

        Raises:
            LLMParamError: an argument, unequal numbers of tensors, bytes that do not fit a row.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache.
        """
        self._cluster.check_usable()
        check_kv_cache("dst", dst)
        check_kv_cache("src", src)
        check_device("dst", dst)
        check_device("src", src)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_copy_size("size", size)
        if req_id is not None:
            check_int("req_id", req_id)
        self._copy_row(dst, src, dst_batch_index, src_batch_index, offset, size)

    # -- reading ----------------------------------------------------------------------------------------------------

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """One Tensor a device (so exactly one) over tensor `tensor_index` of the cache: live, read-only through `numpy()`.

        To fill a cache use `KvCache.tensors`.

        Raises:
            TypeError: not a KvCache, or `tensor_index` no int.
            LLMParamError: a tensor that is not there; a registered cache.
            LLMException: LLM_KV_CACHE_NOT_EXIST for a deallocated cache, and for one of `create_cpu_cache`.
        """
        self._cluster.check_usable()
        check_kv_cache("cache", cache)
        check_int32("tensor_index", tensor_index)
        if not 0 <= tensor_index < cache.cache_desc.num_tensors:
            raise LLMParamError(f"argument 'tensor_index' must be 0 to {cache.cache_desc.num_tensors - 1}, got {tensor_index}")
        with self._cluster.lock:
            own = self._own(cache)
            view = make_view(own.segment.region, own.offsets[tensor_index], own.desc, tensor_index)
        return [Tensor._over(view.numpy(), TensorDesc(view.dtype, view.shape))]
