"""Pulls: checked arguments in, one call of the core, statuses out as exceptions (`pull_failure.py`)."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shmkv import _link, _pull
from shmkv._blocks import BlockLists
from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache
from shmkv.cluster import Cluster
from shmkv.errors import LLMException
from shmkv.link import Links
from shmkv.own_pull import pull_own
from shmkv.pull_failure import PullKey, Select, SourceKey, pull_failure
from shmkv.types import CacheDesc

log = logging.getLogger("shmkv")


def pull(cluster: Cluster, links: Links, key: SourceKey, dst: LocalCache, desc: CacheDesc, select: Select, consumes: bool,
         lists: BlockLists | None = None) -> None:
    """Pull one row of another cluster's cache, or of an own one, into `dst`, which `desc` describes; with `lists` many blocks, or a
    row from or into blocks.

    `select`: (size, src_offset, dst_offset, 0, dst row, first source tensor, how many or -1, the same of the destination, tensors
    a layer that must divide the source's number or 0), bytes and ordinals, and four numbers more for some of the heads or strict
    formats; `consumes`: no offset was given.
    """
    handle, timeout_ms = links.handle(key.cluster_id), cluster.settings.sync_kv_timeout_ms
    if handle is None and key.cluster_id != cluster.cluster_id and links.find_missing(key.cluster_id):
        handle = links.handle(key.cluster_id)
    if handle is not None:
        status = _pull.pull(handle, dst, key.packed, select, consumes, timeout_ms, lists=lists)
    elif key.cluster_id == cluster.cluster_id:
        status = pull_own(cluster, key, dst, select, consumes, lists)
    else:
        status = _pull.check(dst, select, lists=lists) or _link.ENDED
    if status == _link.ENDED:
        cluster.check_usable()          # ended by our own finalize?
    if status:
        raise pull_failure(status, cluster, links, key, desc, select)
    if handle is not None:
        remark_format(handle, key)


PullArguments = tuple[PullKey, LocalCache, CacheDesc, Select, bool]


def pull_many(cluster: Cluster, links: Links, pulls: Sequence[PullArguments]) -> None:
    """Carry out pulls in order; neighbours from one cluster go under one lock and one deadline. The first that fails ends the call:
    its exception has its place in `failed_request`, those before it are done."""
    begin = 0
    while begin < len(pulls):
        cluster_id = pulls[begin][0].cluster_id
        end = begin
        while end < len(pulls) and pulls[end][0].cluster_id == cluster_id:
            end += 1
        _pull_some(cluster, links, pulls, begin, end)
        begin = end


def _pull_some(cluster: Cluster, links: Links, pulls: Sequence[PullArguments], begin: int, end: int) -> None:
    handle = links.handle(pulls[begin][0].cluster_id)
    if handle is None:
        for place in range(begin, end):
            try:
                pull(cluster, links, *pulls[place])
            except LLMException as error:
                error.failed_request = place
                raise
        return
    requests = [(dst, key.packed, select, consumes) for key, dst, _, select, consumes in pulls[begin:end]]
    try:
        done, status = _pull.pull_many(handle, requests, cluster.settings.sync_kv_timeout_ms)
        remark_format(handle, pulls[begin][0])
    except MemoryError as error:
        failure = cluster.no_memory("pull_many", error)
        failure.failed_request = begin
        raise failure from error
    if status:
        key, _, desc, select, _ = pulls[begin + done]
        failure = pull_failure(status, cluster, links, key, desc, select)
        failure.failed_request = begin + done
        raise failure


def prepare(cluster: Cluster, links: Links, dst: LocalCache, desc: CacheDesc, select: Select, consumes: bool,
            checked: Callable[[PullKey, int], None], keys: tuple[type, ...], *, is_quick: bool = True) -> _pull.PreparedPull:
    """A pull whose arguments are checked. `checked(key, row)` is the same pull with all checks, for when the quick way does not
    apply: `keys` are the classes of those for which it does; without `is_quick` there is none."""

    def again(key: PullKey, row: int) -> LinkHandle | None:
        checked(key, row)
        return links.handle(key.cluster_id) if is_quick else None

    def fail(key: PullKey, row: int, status: int) -> LLMException:
        return pull_failure(status, cluster, links, key, desc, (*select[:4], row, *select[5:]))

    return _pull.PreparedPull(dst, select, consumes, cluster.settings.sync_kv_timeout_ms, keys, again, fail, remark_format)


def remark_format(handle: LinkHandle, key: SourceKey) -> None:
    """Say once a link that the two sides describe their tensors differently: the copy is by bytes all the same."""
    if handle.take_remark():
        log.warning("pulls from cluster %d copy between caches of different kv_tensor_format (%r is one): bytes are copied as they "
                    "are; strict_format=True refuses that", key.cluster_id, key)
