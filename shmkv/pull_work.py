"""Pulls of checked requests into caches of this process, for the managers of both generations of the API."""
from __future__ import annotations

import weakref
from collections.abc import Callable

from shmkv import transfer
from shmkv._local import LocalCache
from shmkv._pull import PreparedPull
from shmkv.block_arguments import BlocksRequest
from shmkv.cache_handle import CacheHandle
from shmkv.errors import LLMException, LLMStatusCode
from shmkv.manager_base import ManagerBase
from shmkv.pull_arguments import PullRequest
from shmkv.pull_failure import PullKey
from shmkv.registered import at_addresses
from shmkv.types import LLMRole


class PullWork(ManagerBase):
    """Without public calls."""

    def _prepare(self, request: PullRequest, pull: Callable[[PullRequest], None] | None = None) -> PreparedPull:
        """A prepared pull with the options of a request, done by `pull` each time if that is given. The cache may keep it, so it
        does not keep the cache."""
        own, reference, options = self._usable(request.kv_cache), weakref.ref(request.kv_cache), request.options
        kind, pull_checked = type(request), pull or self._pull

        def checked(cache_key: PullKey, row: int) -> None:
            cache = reference()
            if cache is None:
                raise LLMException("the destination was deallocated", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
            self._check_role("pull_cache", LLMRole.DECODER)
            pull_checked(kind.with_options(cache_key, cache, row, options))

        return transfer.prepare(self._cluster, self._links, own.local, own.desc, request.select, request.consumes, checked,
                                request.KEYS, is_quick=pull is None)

    def _pull(self, request: PullRequest) -> None:
        own = self._usable(request.kv_cache)
        transfer.pull(self._cluster, self._links, request.cache_key, own.local, own.desc, request.select, request.consumes)

    def _pull_blocks(self, request: BlocksRequest) -> None:
        transfer.pull(self._cluster, self._links, request.cache_key, self._local(request.kv_cache), request.kv_cache.cache_desc,
                      request.select, request.MAY_CONSUME, request.lists)

    def _local(self, cache: CacheHandle) -> LocalCache:
        """A cache of either placement; memory given by address is not looked at before now."""
        addresses = cache._addresses() if cache._own is None and cache.is_host else []
        if not addresses:
            return self._usable(cache).local
        try:
            return at_addresses(cache.cache_desc, addresses)
        except MemoryError as error:
            raise self._cluster.no_memory("the layout of a cache", error) from error
