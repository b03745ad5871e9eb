"""What all calls of a manager stand on: the cluster, its links, and the caches behind handles."""
from __future__ import annotations

from collections import deque
from typing import Any

from shmkv._drop import DropQueue
from shmkv._view import TensorView
from shmkv.cache_handle import CacheHandle
from shmkv.caches import Usable
from shmkv.checks import ApiObject
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode
from shmkv.kv_cache import make_view, row_shape, view_of
from shmkv.link import Links
from shmkv.link_watch import LinkWatch
from shmkv.own_cache import OwnCache
from shmkv.push import Pushes
from shmkv.registered import RegisteredCache
from shmkv.types import LLMRole
from shmkv.waiting import Waits


class ManagerBase(ApiObject):
    """Without public calls but one; the others are in the classes derived from it."""

    def __init__(self, cluster: Cluster, links: Links, watch: LinkWatch, pushes: Pushes) -> None:
        self._cluster = cluster
        self._links = links
        self._watch = watch
        self._waits = Waits(cluster, links)
        self._pushes = pushes

    def is_initialized(self) -> bool:
        """False after finalize and in a forked child."""
        return not self._cluster.is_closed and not self._cluster.is_forked

    def _is_pulling(self) -> bool:
        """Is a pull begun and not over that waits or goes on piece by piece?"""
        return self._waits.are_pulling

    def _end_waits(self) -> None:
        """At finalize, when new calls are refused already: who waits is told, and gives back what it holds."""
        if self._cluster.is_forked:
            self._waits.abandon()
        else:
            self._waits.close()

    def _check_role(self, what: str, *roles: LLMRole) -> None:
        """LLMParamError for any role but these. The second generation of the API has no such limits."""
        self._cluster.check_usable()
        if self._cluster.role not in roles and not self._cluster.settings.cache_manager:
            names = " or ".join(str(role) for role in roles)
            raise LLMParamError(f"{what} needs role {names}, this is {self._cluster.role!s}")

    def _usable(self, cache: CacheHandle) -> Usable:
        """The living cache behind a handle, allocated or registered; LLM_KV_CACHE_NOT_EXIST otherwise, also for a handle of an
        earlier init."""
        if cache._own is None:
            raise LLMException(f"{cache!r} was deallocated, or is of no manager", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        return self._cluster.caches.get(cache._own)

    def _own(self, cache: CacheHandle) -> OwnCache:
        """The living allocated cache behind a handle. LLMParamError for a registered one: nobody else can read it, so its rows have
        no keys."""
        own = self._usable(cache)
        if not isinstance(own, OwnCache):
            raise LLMParamError(f"{cache!r} is registered memory of this process: other processes cannot pull from it")
        return own

    def _dropped(self, own: Usable) -> deque[Any] | DropQueue:
        """Where a cache goes whose last handle is gone."""
        return self._cluster.caches.freeing.dropped if isinstance(own, OwnCache) else self._cluster.caches.registered.dropped

    def _views(self, cache: CacheHandle) -> tuple[TensorView, ...]:
        if not self.is_initialized():
            return ()
        if isinstance(cache._own, RegisteredCache):
            return views_of_mapping(cache._own)
        with self._cluster.lock:        # so that memory is not recycled between a look at its exports and the first view
            own = self._own(cache)
            if own.own_region is None:
                return ()               # the caller's memory
            return tuple(make_view(own.own_region, offset, own.desc, place) for place, offset in enumerate(own.offsets))


def views_of_mapping(own: RegisteredCache) -> tuple[TensorView, ...]:
    """Views of a fork; memory of the caller has none, who has it already."""
    region, desc, tensors = own.region, own.desc, own.layout.tensors
    if region is None:
        return ()
    views = []
    for place, (offset, _, outer, *_) in enumerate(tensors.describe()):
        shape = tuple(desc.tensor_shape(place)) if outer == 1 else row_shape(desc, place, outer)
        pitch = tensors.piece_pitches()[place] if outer > 1 else 0
        views.append(view_of(region, offset, shape, desc.tensor_data_type(place), pitch=pitch))
    return tuple(views)
