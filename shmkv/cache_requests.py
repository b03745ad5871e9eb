"""What the second generation of the API asks of the arguments of a pull: other caches, other keys, other names."""
from __future__ import annotations

from shmkv.block_arguments import BlockNames, BlocksRequest
from shmkv.cache import check_cache, check_kind
from shmkv.cache_handle import CacheHandle
from shmkv.keys import CacheKeyByIdAndIndex
from shmkv.pull_arguments import PullRequest


class CachePull(PullRequest):
    """One `CacheManager.pull_cache`."""

    __slots__ = ()

    def _check_destination(self, cache: object) -> None:
        check_kind("cache", check_cache("cache", cache), is_blocks=False)


class RemoteCachePull(CachePull):
    """The same where memory is remote-accessible: nobody at the other end takes notice of a pull, so it has no keys and consumes
    none."""

    __slots__ = ()
    KEYS = (CacheKeyByIdAndIndex,)
    MAY_CONSUME = False


class CacheBlocksPull(BlocksRequest):
    """One `CacheManager.pull_blocks`."""

    __slots__ = ()
    NAMES = BlockNames("src_cache_key", "dst_cache", "src_blocks", "dst_blocks")
    LISTS = (list, tuple)

    def _check_type(self, cache: object) -> None:
        check_cache(self.NAMES.dst, cache)

    def _check_destination(self, cache: CacheHandle) -> None:
        check_kind(self.NAMES.dst, check_cache(self.NAMES.dst, cache), is_blocks=True)


class RemoteCacheBlocksPull(CacheBlocksPull):
    """The same where memory is remote-accessible."""

    __slots__ = ()
    MAY_CONSUME = False
