"""Pull and copy: checked arguments in, calls of the core, statuses out as exceptions (`pull_failure.py`)."""
from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from shmkv import _link, _lookup, _pull
from shmkv._core import LocalCache
from shmkv._link_handle import LinkHandle
from shmkv.caches import OwnCache, OwnCaches
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode
from shmkv.keys import CacheKey, CacheKeyByIdAndIndex
from shmkv.link import Links
from shmkv.pull_failure import PullKey, Select, pull_failure
from shmkv.types import CacheDesc

# A local copy has no timeout in the contract; this bounds it all the same.
COPY_TIMEOUT_MS = 2**31 - 1


def pull(cluster: Cluster, links: Links, key: PullKey, dst: LocalCache, desc: CacheDesc, select: Select, consumes: bool) -> None:
    """Pull one row of another cluster's cache, or of an own one, into `dst`, which `desc` describes.

    `select`: (size, src_offset, dst_offset, 0, dst row, first source tensor, how many or -1, the same of the destination, tensors
    a layer that must divide the source's number or 0), bytes and ordinals; `consumes`: no offset was given.
    """
    handle = links.handle(key.cluster_id)
    if handle is not None:
        status = _pull.pull(handle, dst, key.packed, select, consumes, cluster.settings.sync_kv_timeout_ms)
    elif key.cluster_id == cluster.cluster_id:
        status = _pull_own(cluster, key, dst, select, consumes)
    else:
        status = _pull.check(dst, select) or _link.ENDED
    if status == _link.ENDED:
        cluster.check_usable()          # ended by our own finalize?
    if status:
        raise pull_failure(status, cluster, links, key, desc, select)


def _pull_own(cluster: Cluster, key: PullKey, dst: LocalCache, select: Select, consumes: bool) -> int:
    """A pull out of the own cluster: no link, no hazard; the source is counted in while it is read."""
    status = int(_pull.check(dst, select))
    if status:
        return status
    with cluster.lock:
        found = _find_own(cluster.caches, key)
        if isinstance(found, int):
            return found
        source, row, generation = found
        if not cluster.caches.is_published(source, row, select[5], select[6]):
            return int(_lookup.UNPUBLISHED)
        source.local.count_in()
    try:
        status = int(_pull.copy(source.local, dst, (*select[:3], row, *select[4:]), cluster.settings.sync_kv_timeout_ms))
        if status == 0:
            with cluster.lock:
                status = cluster.caches.finish_own(source, row, generation, consumes, select[5], select[6])
    finally:
        source.local.leave()
    return status


def _find_own(caches: OwnCaches, key: PullKey) -> tuple[OwnCache, int, int] | int:
    if isinstance(key, CacheKey):
        return caches.source_by_key(key.words)
    return caches.source_by_id(key.cache_id, key.batch_index)


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
            checked: Callable[[PullKey, int], None]) -> _pull.PreparedPull:
    """A pull whose arguments are checked. `checked(key, row)` is the same pull with all checks, for when the quick way does not
    apply."""

    def again(key: PullKey, row: int) -> LinkHandle | None:
        checked(key, row)
        return links.handle(key.cluster_id)

    def fail(key: PullKey, row: int, status: int) -> LLMException:
        return pull_failure(status, cluster, links, key, desc, (*select[:4], row, *select[5:]))

    return _pull.PreparedPull(dst, select, consumes, cluster.settings.sync_kv_timeout_ms, (CacheKey, CacheKeyByIdAndIndex),
                              again, fail)


def copy(cluster: Cluster, src: OwnCache, dst: OwnCache, src_row: int, dst_row: int, offset: int, size: int) -> None:
    """Copy one row between two own caches; the same offset on both sides, `size` -1 = the rest of the source row. The caller has
    counted the source in."""
    if src.desc.num_tensors != dst.desc.num_tensors:
        raise LLMParamError(f"src has {src.desc.num_tensors} tensors, dst has {dst.desc.num_tensors}: they must be equal")
    for name, row, cache in (("src_batch_index", src_row, src), ("dst_batch_index", dst_row, dst)):
        if row >= cache.desc.batch_size:
            raise LLMParamError(f"argument '{name}' must be below {cache.desc.batch_size}, got {row}")
    for nbytes, first, count in _copy_windows(src, dst, offset, size):
        status = _pull.copy(src.local, dst.local, (nbytes, offset, offset, src_row, dst_row, first, count, first, count, 0),
                            COPY_TIMEOUT_MS)
        if status:
            raise _copy_failure(status, cluster, nbytes)


def _copy_windows(src: OwnCache, dst: OwnCache, offset: int, size: int) -> list[tuple[int, int, int]]:
    """(bytes, first tensor, how many or -1) of each call of the core that a copy takes: one wherever one says it all, so unless
    the rest of source rows of unequal length goes into longer rows. Every tensor is checked before the first byte moves."""
    pairs = list(zip(src.layout.row_nbytes, dst.layout.row_nbytes, strict=True))
    kinds = dict.fromkeys(pairs)
    for strides in kinds:
        length = strides[0] - offset if size == -1 else size
        if offset >= min(strides) or length > min(strides) - offset:
            place = "" if len(kinds) == 1 else f" of tensor {pairs.index(strides)}"
            raise LLMParamError(f"argument 'offset' {offset} and size {size} do not fit rows{place} of {strides[0]} (src) and "
                                f"{strides[1]} (dst) bytes")
    if size != -1 or len({source for source, _ in kinds}) == 1:
        return [(pairs[0][0] - offset if size == -1 else size, 0, -1)]
    if all(source == target for source, target in kinds):
        return [(-1, 0, -1)]
    return [(source - offset, place, 1) for place, (source, _) in enumerate(pairs)]


def _copy_failure(status: int, cluster: Cluster, nbytes: int) -> LLMException:
    """The exception (not raised) for a copy that was answered `status`."""
    if status == -errno.ENOMEM:
        wanted = f"{nbytes} bytes a tensor" if nbytes >= 0 else "the row"
        return LLMException(f"no memory for a temporary copy of {wanted}", status_code=cluster.settings.out_of_memory_status)
    if status == _link.BUSY:
        return LLMException("called from a signal handler that interrupted a pull", status_code=LLMStatusCode.LLM_LINK_BUSY)
    if status == _pull.DST_GONE:
        return LLMException("dst was deallocated", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    return LLMException(f"copy_cache was not done: status {status}")
