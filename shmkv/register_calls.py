"""The calls of a manager around memory of the caller that is given by its addresses."""
from __future__ import annotations

import time
from collections.abc import Sequence

from shmkv import _peer_memory
from shmkv.addressed import AddressedCache
from shmkv.cache import Cache
from shmkv.cache_arguments import check_batch_dim_of_blocks, rows_of_keys
from shmkv.cache_layout import CacheLayout, layout
from shmkv.checks import check_bool, check_int64, check_sequence, check_type
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMParamError
from shmkv.keys import BlocksCacheKey, CacheKey, KeyWords
from shmkv.link import Links
from shmkv.link_watch import LinkWatch
from shmkv.manager_base import ManagerBase
from shmkv.own_cache import OwnCache
from shmkv.pauses import Pauses
from shmkv.push import Pushes
from shmkv.types import CacheDesc, MemInfo, Memtype, Placement


class RegisterCalls(ManagerBase):
    """The memory stays the caller's: it is neither touched at registration nor ever freed here."""

    def __init__(self, cluster: Cluster, links: Links, watch: LinkWatch, pushes: Pushes) -> None:
        super().__init__(cluster, links, watch, pushes)
        self._is_call_linked = False

    def set_is_call_linked(self) -> None:
        """From now on registered memory is not remote-accessible. `LLMDataDist.link` calls this."""
        self._is_call_linked = True

    def register_cache(self, cache_desc: CacheDesc, addrs: Sequence[int], cache_keys: Sequence[CacheKey] = (),
                       remote_accessible: bool | None = None) -> Cache:
        """A cache in memory of the caller, one address a tensor; `cache_keys[i]` names row i and is never consumed.

        Memory within a cache that this cluster allocated can be used by other clusters as that cache can. Other memory of this
        process they can use where the kernel lets them reach it (`shmkv info` says whether it does), but not look at (views).
        `remote_accessible`: may other clusters push into it? By default memory of placement DEVICE that is registered before
        `LLMDataDist.link`.

        Raises:
            LLMParamError: description, addresses (none, 0, as many as there are tensors), keys, remote_accessible after `link`.
        """
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        numbers = check_sequence("addrs", addrs, int, containers=(list,))
        keys = check_sequence("cache_keys", cache_keys, CacheKey)
        remote = self._remote_accessible(cache_desc, remote_accessible)
        wanted = self._check(cache_desc, numbers)
        return self._register(wanted, numbers, rows_of_keys(keys, wanted.rows, unique=True), remote)

    def register_blocks_cache(self, cache_desc: CacheDesc, addrs: Sequence[int], blocks_cache_key: BlocksCacheKey | None = None,
                              remote_accessible: bool | None = None) -> Cache:
        """A blocks cache in memory of the caller, one address a tensor, whose rows (dimension 0) are the blocks. `blocks_cache_key`
        names it until `unregister_cache`, one cache a model id. Who can use the memory, and `remote_accessible`: as for
        `register_cache`.

        Raises:
            TypeError: an argument.
            LLMParamError: description (the batch dimension must be 0), addresses, a key that is bound already, remote_accessible
                after `link`.
        """
        self._cluster.check_usable()
        check_type("cache_desc", cache_desc, CacheDesc)
        numbers = check_sequence("addrs", addrs, int, containers=(list,))
        if blocks_cache_key is not None:
            check_type("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        remote = self._remote_accessible(cache_desc, remote_accessible)
        wanted = self._check(cache_desc, numbers)
        check_batch_dim_of_blocks(wanted.desc)
        return self._register(wanted, numbers, {}, remote, blocks=True,
                              blocks_model_id=None if blocks_cache_key is None else blocks_cache_key.model_id)

    def _remote_accessible(self, desc: CacheDesc, wanted: bool | None) -> bool:
        if wanted is None:
            return desc.placement == Placement.DEVICE and not self._is_call_linked
        if check_bool("remote_accessible", wanted) and self._is_call_linked:
            raise LLMParamError("argument 'remote_accessible' must not be True after LLMDataDist.link")
        return wanted

    def _check(self, desc: CacheDesc, addrs: Sequence[int]) -> CacheLayout:
        if not addrs or not all(addrs) or len(addrs) != desc.num_tensors:
            raise LLMParamError(f"argument 'addrs' must have {desc.num_tensors} addresses, at least one and none of them 0, got "
                                f"{len(addrs)} with {sum(not address for address in addrs)} of them 0")
        try:
            return layout(desc)
        except MemoryError as error:
            raise self._cluster.no_memory("the layout of a cache", error) from error

    def _register(self, wanted: CacheLayout, addrs: Sequence[int], rows: dict[int, KeyWords], remote_accessible: bool, *,
                  blocks: bool = False, blocks_model_id: int | None = None) -> Cache:
        made: list[OwnCache] = []
        try:
            with self._cluster.lock:
                own = self._cluster.caches.register(wanted, addrs, rows, blocks=blocks, blocks_model_id=blocks_model_id,
                                                    remote_accessible=remote_accessible, into=made)
            if self._cluster.settings.allow_ptrace:
                _peer_memory.allow_all()
            return Cache(own.cache_id, own.desc.snapshot(), list(addrs), blocks, self, own)
        except BaseException:
            for cache in made:              # interrupted before anybody had a handle
                self._dropped(cache).append(cache)
            raise

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a registered cache and its keys; its memory is the caller's. An unknown id is no error.

        When it returns, nobody moves bytes out of private memory or into it any more, so that it can be freed.

        Raises:
            LLMParamError: a cache that was allocated.
            LLMException: LLM_TIMEOUT when somebody still does after `sync_kv_timeout`: call again before the memory is freed.
        """
        self._cluster.check_usable()
        check_int64("cache_id", cache_id)
        with self._cluster.lock:
            caches = self._cluster.caches
            own = caches.by_id(cache_id)
            if own is not None and not isinstance(own, AddressedCache):
                raise LLMParamError(f"cache {cache_id} was not registered: deallocate_cache gives its memory back")
            if own is not None:
                caches.unregister(own)
        self._wait_until_unused(cache_id)

    def _wait_until_unused(self, cache_id: int) -> None:
        """Until nobody uses private memory that was registered under this number."""
        settings, pauses = self._cluster.settings, Pauses()
        deadline = time.monotonic() + settings.sync_kv_timeout_ms / 1000
        while self._is_in_use(cache_id):
            if time.monotonic() >= deadline:
                raise LLMException(f"the memory of cache {cache_id} is still read or written after sync_kv_timeout of "
                                   f"{settings.sync_kv_timeout_ms} ms", status_code=settings.timeout_status)
            pauses.sleep()

    def _is_in_use(self, cache_id: int) -> bool:
        with self._cluster.lock:
            own = self._cluster.caches.leaving(cache_id)
            if not isinstance(own, AddressedCache) or own.host is not None:
                return False            # what lies in a segment stays for as long as anybody uses it
            self._cluster.caches.collect()
            return self._cluster.caches.leaving(cache_id) is own

    def remap_registered_memory(self, mem_infos: MemInfo | Sequence[MemInfo]) -> None:
        """Check the arguments: memory of a host needs no mapping anew.

        Raises:
            LLMParamError: not MemInfo or a list of them, of MEM_TYPE_DEVICE, with address and size greater than 0.
        """
        self._cluster.check_usable()
        infos = [mem_infos] if isinstance(mem_infos, MemInfo) else mem_infos
        if not isinstance(infos, (list, tuple)) or not infos or not all(isinstance(info, MemInfo) for info in infos):
            raise LLMParamError(f"argument 'mem_infos' must be a MemInfo or a list of them, got {type(mem_infos).__name__}")
        for info in infos:
            if info.mem_type != Memtype.MEM_TYPE_DEVICE or info.addr <= 0 or info.size <= 0:
                raise LLMParamError(f"argument 'mem_infos' must have type MEM_TYPE_DEVICE, address and size above 0, got {info!s}")
