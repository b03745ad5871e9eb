"""The cluster of an engine's process, as far as a connector needs it.

An engine that publishes has the role PROMPT, for keys need it; one that only reads is a DECODER. An engine that does both is a
PROMPT that links and pulls all the same: the rules of roles are those of `LLMDataDist`'s calls, and below them a link has two equal
sides.
"""
from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shmkv import lending, transfer
from shmkv.cluster import Cluster
from shmkv.cluster_info import LLMClusterInfo
from shmkv.datadist import LLMDataDist
from shmkv.errors import LLMException, LLMStatusCode
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.keys import KEY_PREFIX, U64MAX, CacheKey
from shmkv.kv_cache import KvCache
from shmkv.kv_cache_manager import KvCacheManager
from shmkv.link import Links
from shmkv.membership import Member
from shmkv.options import NAMESPACE, SYNC_KV_TIME
from shmkv.pull_arguments import PullRequest
from shmkv.types import LLMRole

# So that people can read them; two processes that draw the same one are told by `init`.
CLUSTER_ID_BITS = 48


class Endpoint:
    """A member of the namespace until `close`. LLMException, LLMParamError as for `LLMDataDist.init`."""

    def __init__(self, settings: ConnectorSettings, role: LLMRole) -> None:
        self.settings = settings
        self.role = role
        cluster_id = secrets.randbits(CLUSTER_ID_BITS) if settings.cluster_id is None else settings.cluster_id
        self._dist = LLMDataDist(role, cluster_id)
        options = {SYNC_KV_TIME: str(settings.timeout_ms)}
        if settings.namespace is not None:
            options[NAMESPACE] = settings.namespace
        self._dist.init(options)
        self.manager: KvCacheManager = self._dist.kv_cache_manager
        if role == LLMRole.PROMPT:
            self.manager.set_prefix_capacity(settings.capacity_bytes)

    @property
    def cluster_id(self) -> int:
        """The name of this process in its namespace."""
        return self._dist.cluster_id

    @property
    def namespace(self) -> str:
        """The namespace that was joined."""
        return self._parts()[0].settings.namespace

    def _parts(self) -> tuple[Cluster, Links]:
        return self._dist._joined()

    # -- others -----------------------------------------------------------------------------------------------------

    def producers(self) -> list[Member]:
        """The living members of the namespace that may have published something, without this one."""
        namespace = self._parts()[0].namespace
        return [member for member in namespace.members()
                if member.role == LLMRole.PROMPT and member.cluster_id != self.cluster_id and namespace.lives(member)]

    def link(self, cluster_id: int, timeout_ms: int) -> bool:
        """Link to a producer, unless there is a link. False: it is not ready, or has gone again."""
        _, results = self._parts()[1].link([_info(cluster_id)], timeout_ms)
        return results in ([LLMStatusCode.LLM_SUCCESS], [LLMStatusCode.LLM_ALREADY_LINK])

    def is_usable(self, cluster_id: int) -> bool:
        """Is there a link to a process that lives?"""
        try:
            self._parts()[1].check(cluster_id)
        except LLMException:
            return False
        return True

    def unlink(self, cluster_id: int) -> None:
        """Let go of a link, whatever became of the other side."""
        self._parts()[1].unlink([_info(cluster_id)], timeout_ms=1, force=True)

    # -- keys and bytes -----------------------------------------------------------------------------------------------

    def contains(self, cluster_id: int, words: tuple[int, int]) -> bool:
        """Would a pull of this key find it now? No for a cluster that is gone."""
        return self.holder(words, (cluster_id,)) is not None

    def holder(self, words: tuple[int, int], cluster_ids: Iterable[int]) -> int | None:
        """The first of these clusters where a pull of this key would find it now, if there is one. Asked for each block of each
        prompt, so no key is made for it."""
        try:
            cluster, links = self._parts()
            return lending.holder(cluster, links, (KEY_PREFIX, U64MAX, *words), cluster_ids)
        except LLMException:
            return None

    def pull(self, wanted: Sequence[Piece], into: KvCache, layer: int) -> None:
        """One layer of several blocks, each into the row that it names, in the order given. LLMException as for `pull_cache`, at
        the first that fails."""
        cluster, links = self._parts()
        tensors = range(layer, layer + 1)
        requests = [PullRequest(piece.key, into, piece.row, src_layer_range=tensors, dst_layer_range=tensors,
                                tensor_num_per_layer=1) for piece in wanted]
        own = self.manager._usable(into)
        transfer.pull_many(cluster, links, [(each.cache_key, own.local, own.desc, each.select, False) for each in requests])

    def close(self) -> None:
        """Leave the namespace; what was published goes."""
        self._dist.finalize()


class Piece(NamedTuple):
    """A block of a cluster, and the row of the own cache that it goes to."""

    key: CacheKey
    row: int


def _info(cluster_id: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    return info
