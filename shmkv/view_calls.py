"""The calls of a manager that read a row where it is: views, forks, looks."""
from __future__ import annotations

from shmkv import lending
from shmkv._lend import ForkedRegion
from shmkv.cache_layout import CacheLayout
from shmkv.cache_view import CacheView
from shmkv.checks import check_bool, check_copy_size, check_optional_offset, check_type, check_uint64
from shmkv.forked import fork_layout
from shmkv.keys import CacheKey
from shmkv.kv_cache import KvCache
from shmkv.manager_base import ManagerBase
from shmkv.pull_arguments import PULL_KEYS, check_source_range, check_usable_key
from shmkv.pull_failure import PullKey, Select
from shmkv.registered import RegisteredCache
from shmkv.types import CacheDesc, LLMRole

_REST, _PER_LAYER = -1, 2         # the defaults, compared as objects: what is equal to them may be of another type
_WHOLE_ROW: Select = (_REST, 0, 0, 0, 0, 0, -1, 0, -1, 0)


class ViewCalls(ManagerBase):
    """Zero-copy: a lease keeps the owner's memory meanwhile."""

    def view_cache(self, cache_key: PullKey, *, cache_desc: CacheDesc | None = None, src_layer_range: range | None = None,
                   tensor_num_per_layer: int = 2, src_cache_offset: int | None = None, size: int = -1,
                   consume: bool = True) -> CacheView:
        """Look at the row that `cache_key` names, in the memory of the cluster that filled it (role DECODER). Nothing is copied,
        whatever its size; arrays are read-only.

        Layers, `src_cache_offset` and `size` (bytes; size -1 = the rest of the row) select as for `pull_cache`; a key is consumed
        as by a pull of the same, unless ``consume=False``. `cache_desc` gives the shapes that the arrays have (rows of as many
        bytes); without one they have one axis of the owner's element type.

        The memory is kept until the view is closed or this process dies: the owner's deallocate and recycling wait for it.

        Raises:
            LLMParamError: an argument, tensors or bytes that are not there.
            LLMException: as `pull_cache`; LLM_LINK_BUSY when SHMKV_MAX_LEASES are taken.
        """
        self._check_role("view_cache", LLMRole.DECODER)
        check_key(cache_key)
        if src_cache_offset is None and size is _REST and src_layer_range is None and tensor_num_per_layer is _PER_LAYER:
            select = _WHOLE_ROW
        else:
            offset = check_optional_offset("src_cache_offset", src_cache_offset) or 0
            check_copy_size("size", size)
            first, count, divisor = check_source_range(src_layer_range, tensor_num_per_layer)
            select = (size, offset, 0, 0, 0, first, count, 0, -1, divisor)
        if cache_desc is not None:
            cache_desc = check_type("cache_desc", cache_desc, CacheDesc).snapshot()
        loan = self._lend(cache_key, select, check_bool("consume", consume) and src_cache_offset is None)
        try:
            view = CacheView(loan, (select[1], select[0]), cache_desc, select[5], self._links.sweep_closing)
        except BaseException:
            loan.close()
            raise
        self._cluster.keep_view(view)
        return view

    def fork_cache(self, cache_key: PullKey, cache_desc: CacheDesc | None = None, *, consume: bool = True) -> KvCache:
        """A private, writable cache of one row that shares the pages of the row that `cache_key` names until they are written (role
        DECODER): branches of a beam search or of speculative decoding over one prefix, without copying it.

        `cache_desc` describes it, with a batch size of 1 and rows of as many bytes; without one each tensor has shape
        [1, elements]. `tensors` are writable; pulls and local copies can write into it. What the owner writes to its row later may
        show in pages that were not written here. The owner's memory is kept until the fork is deallocated and its views are gone.

        Raises: as `view_cache`.
        """
        self._check_role("fork_cache", LLMRole.DECODER)
        check_key(cache_key)
        if cache_desc is not None:
            check_type("cache_desc", cache_desc, CacheDesc)
        loan = self._lend(cache_key, _WHOLE_ROW, check_bool("consume", consume))
        try:
            self._cluster.keep_view(loan)       # what was made of it stays mapped
            layout = fork_layout(loan, cache_desc)
            region = lending.fork(self._cluster, self._links, cache_key, loan)
        except BaseException as error:
            loan.close()
            if isinstance(error, MemoryError):
                raise self._cluster.no_memory("a fork", error) from error
            raise
        return self._forked(region, layout)

    def _forked(self, region: ForkedRegion, layout: CacheLayout) -> KvCache:
        try:
            own = RegisteredCache.over(region, self._cluster.caches.next_id(), layout, is_blocks=False)
            cache = KvCache(own.cache_id, own.desc.snapshot(), None, self, own)
        except MemoryError as error:
            raise self._cluster.no_memory("a fork", error) from error
        with self._cluster.lock:
            self._cluster.caches.registered.add(own)
        return cache

    def _lend(self, key: PullKey, select: Select, consumes: bool) -> lending.Lender:
        try:
            return lending.lend(self._cluster, self._links, key, select, consumes)
        except MemoryError as error:
            raise self._cluster.no_memory("a view", error) from error

    def set_prefix_capacity(self, nbytes: int | None) -> None:
        """How much memory may be kept by prefix keys alone, after deallocate: bytes, None for no limit (the default). Beyond it the
        least recently used prefixes lose their keys and go; those that are being read, or kept by a view or fork, stay meanwhile.
        `stats` tells hits and evictions.

        Raises:
            TypeError, LLMParamError: `nbytes` is neither None nor an int from 0 to 2**64 - 1.
        """
        self._cluster.check_usable()
        if nbytes is not None:
            check_uint64("nbytes", nbytes)
        with self._cluster.lock:
            self._cluster.caches.prefix.capacity = nbytes
            self._cluster.caches.collect()

    def contains(self, cache_key: CacheKey) -> bool:
        """Is the key bound, and all of its row published: would a pull find it now? Of the own cluster or of one that is linked to.
        Takes no lock, and is only a hint: the next moment it may be otherwise.

        Raises:
            LLMException: LLM_NOT_YET_LINK, or the timeout status when the peer is gone.
        """
        self._cluster.check_usable()
        check_type("cache_key", cache_key, CacheKey)
        check_usable_key(cache_key)
        return lending.contains(self._cluster, self._links, cache_key)


def check_key(cache_key: object) -> None:
    """A key of a row, usable."""
    check_type("cache_key", cache_key, *PULL_KEYS)
    if isinstance(cache_key, CacheKey):
        check_usable_key(cache_key)

