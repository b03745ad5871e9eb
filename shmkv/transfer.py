"""Pull and copy: arguments in, the hot call, statuses out as exceptions.

The numbers of the core are turned into status codes and sentences here and nowhere else. Which code a timeout gets is a value of
the settings.
"""
from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from shmkv import _core, _link, _lookup, _mapping, _plan
from shmkv.caches import KEY_NONE, OwnCache, OwnCaches, key_words
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode, error_for_status
from shmkv.keys import CacheKey, CacheKeyByIdAndIndex
from shmkv.link import Links

# A local copy has no timeout in the contract; this bounds it all the same.
COPY_TIMEOUT_MS = 2**31 - 1

_GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
_INVALID = LLMStatusCode.LLM_PARAM_INVALID


@dataclass(frozen=True)
class Window:
    """Which bytes of a row: `size` bytes (-1: the rest of the destination row) from an offset on each side, None = 0."""

    size: int = -1
    src_offset: int | None = None
    dst_offset: int | None = None

    @property
    def consumes(self) -> bool:
        """An offset that was given, even 0, says that the caller pulls in pieces: the key stays."""
        return self.src_offset is None and self.dst_offset is None


@dataclass(frozen=True)
class Tensors:
    """Which tensors on each side: (first, count), count -1 = all; `divisor` must divide the source's number, 0 = anything."""

    src: tuple[int, int] = (0, -1)
    dst: tuple[int, int] = (0, -1)
    divisor: int = 0


ALL_TENSORS = Tensors()


def pull(cluster: Cluster, links: Links, key: CacheKey | CacheKeyByIdAndIndex, dst: OwnCache, row: int, window: Window,
         tensors: Tensors) -> None:
    """Pull one row of another cluster's cache, or of an own one, into row `row` of `dst`."""
    select = (window.size, window.src_offset or 0, window.dst_offset or 0,
              _row(key), row, *tensors.src, *tensors.dst, tensors.divisor)
    if key.cluster_id == cluster.cluster_id:
        status = _pull_own(cluster.caches, key, dst, select, window.consumes, cluster)
    else:
        handle = links.handle(key.cluster_id)
        if handle is None:
            status = _check_locally(dst, select) or _link.ENDED
        else:
            status = _core.pull(handle, dst.local, _words(key), select, window.consumes, cluster.settings.sync_kv_timeout_ms)
    if status:
        raise _failure(status, cluster, links, key, dst, select)


def _words(key: CacheKey | CacheKeyByIdAndIndex) -> tuple[int, int, int, int]:
    if isinstance(key, CacheKeyByIdAndIndex):
        return KEY_NONE, max(key.cache_id, 0), 0, 0
    return key_words(key)


def _check_locally(dst: OwnCache, select: tuple[int, ...]) -> int:
    """The destination's own checks, which come before the question of a link."""
    return int(_core.check(dst.local, select))


def _pull_own(caches: OwnCaches, key: CacheKey | CacheKeyByIdAndIndex, dst: OwnCache, select: tuple[int, ...], consumes: bool,
              cluster: Cluster) -> int:
    """A pull out of the own cluster: no link, no hazard; the source is counted in while it is read."""
    status = _check_locally(dst, select)
    if status:
        return status
    with cluster.lock():
        found = _find_own(caches, key)
        if isinstance(found, int):
            return found
        source, row, generation = found
        if not caches.is_published(source, row, select[5], select[6]):
            return int(_lookup.UNPUBLISHED)
        source.local.count_in()
    try:
        status = _core.copy(source.local, dst.local, (*select[:3], row, *select[4:]), cluster.settings.sync_kv_timeout_ms)
    finally:
        source.local.leave()
    if status == 0 and consumes:
        with cluster.lock():
            caches.mark_pulled(source, row, generation, select[5], select[6])
    return int(status)


def _find_own(caches: OwnCaches, key: CacheKey | CacheKeyByIdAndIndex) -> tuple[OwnCache, int, int] | int:
    if isinstance(key, CacheKey):
        return caches.source_by_key(key_words(key))
    return caches.source_by_id(key.cache_id, key.batch_index)


def copy(cluster: Cluster, src: OwnCache, dst: OwnCache, src_row: int, dst_row: int, offset: int, size: int) -> None:
    """Copy one row between two own caches; the same offset on both sides, `size` -1 = the rest of the source row. The caller
    has counted the source in."""
    if src.desc.num_tensors != dst.desc.num_tensors:
        raise LLMParamError(f"src has {src.desc.num_tensors} tensors, dst has {dst.desc.num_tensors}: they must be equal")
    for name, row, cache in (("src_batch_index", src_row, src), ("dst_batch_index", dst_row, dst)):
        if row >= cache.desc.batch_size:
            raise LLMParamError(f"argument '{name}' must be below {cache.desc.batch_size}, got {row}")
    strides = src.desc.row_geometry.row_nbytes, dst.desc.row_geometry.row_nbytes
    length = strides[0] - offset if size == -1 else size
    if offset >= min(strides) or length > min(strides) - offset:
        raise LLMParamError(f"argument 'offset' {offset} and size {size} do not fit rows of {strides[0]} (src) and "
                            f"{strides[1]} (dst) bytes")
    status = _core.copy(src.local, dst.local, (length, offset, offset, src_row, dst_row, 0, -1, 0, -1, 0), COPY_TIMEOUT_MS)
    if status == -errno.ENOMEM:
        raise LLMException(f"no memory for a temporary copy of {length} bytes a tensor",
                           status_code=cluster.settings.out_of_memory_status)
    if status == _link.BUSY:
        raise LLMException("called from a signal handler that interrupted a pull", status_code=LLMStatusCode.LLM_LINK_BUSY)
    if status:
        raise LLMException("a cache was deallocated", status_code=_GONE)


# -- from numbers to exceptions ----------------------------------------------------------------------------------------

def _failure(status: int, cluster: Cluster, links: Links, key: CacheKey | CacheKeyByIdAndIndex, dst: OwnCache,
             select: tuple[int, ...]) -> LLMException:
    code = _code(status, cluster)
    text = f"pull of {key!r} into cache {dst.cache_id}: {_sentence(status, cluster, links, key, dst, select)}"
    return error_for_status(code, text)


def _code(status: int, cluster: Cluster) -> LLMStatusCode:
    """The status code of the contract for a number of the core."""
    settings = cluster.settings
    fixed = {
        _link.ENDED: LLMStatusCode.LLM_NOT_YET_LINK,
        _link.BUSY: LLMStatusCode.LLM_LINK_BUSY,
        _link.PEER_GONE: settings.timeout_status,
        _link.TIMEOUT: settings.timeout_status,
        _link.FORKED: LLMStatusCode.LLM_FAILED,
        _lookup.DAMAGED: LLMStatusCode.LLM_FAILED,
        _plan.DAMAGED: LLMStatusCode.LLM_FAILED,
        -errno.ENOENT: _GONE,
        -errno.ENOMEM: settings.out_of_memory_status,
    }
    if status in fixed:
        return fixed[status]
    if status in _plan.ARGUMENT_FAULTS:
        return _INVALID
    if status in _lookup.MISSES or status in (_core.DST_GONE, _core.SRC_GONE):
        return _GONE
    return LLMStatusCode.LLM_FAILED


def _sentence(status: int, cluster: Cluster, links: Links, key: CacheKey | CacheKeyByIdAndIndex, dst: OwnCache,
              select: tuple[int, ...]) -> str:
    """What was tried, on which name, what was found and what was expected."""
    size, src_offset, dst_offset, _, row = select[:5]
    peer = f"cluster {key.cluster_id}"
    row_nbytes = dst.desc.row_geometry.row_nbytes
    wanted = f"size {size} at src_cache_offset {src_offset}, dst_cache_offset {dst_offset}"
    known = {
        _plan.DST_ROW: f"argument 'batch_index' must be below the batch size {dst.desc.batch_size}, got {row}",
        _plan.DST_RANGE: f"the destination tensors {_shown(select[7:9])} are not all in its {dst.desc.num_tensors}",
        _plan.DST_WINDOW: f"{wanted} does not fit destination rows of {row_nbytes} bytes (shape {dst.desc.shape})",
        _plan.SRC_WINDOW: f"{wanted} does not fit the source row; destination rows have {row_nbytes} bytes "
                          f"(shape {dst.desc.shape}){_source_shape(links, key)}",
        _plan.SRC_RANGE: f"the source tensors {_shown(select[5:7])} are not all there",
        _plan.COUNTS: f"source and destination select different numbers of tensors: {_shown(select[5:7])} against "
                      f"{_shown(select[7:9])} of {dst.desc.num_tensors}",
        _plan.DIVISOR: f"argument 'tensor_num_per_layer' {select[9]} does not divide the number of source tensors"
                       f"{_source_shape(links, key)}",
        _core.DST_GONE: "the destination was deallocated",
        _core.SRC_GONE: "the source was freed meanwhile",
        _lookup.NEVER: f"{peer} has no such key or row: never published there, or long gone",
        _lookup.CONSUMED: f"the key was pulled completely before and is consumed; {peer} has to publish it again",
        _lookup.REMOVED: f"the key or its cache was removed by {peer}",
        _lookup.UNPUBLISHED: f"{peer} has bound it but not published all of its tensors yet",
        _link.ENDED: f"not linked to {peer}" + (f" ({links.last_failure[key.cluster_id]})"
                                               if key.cluster_id in links.last_failure else ""),
        _link.BUSY: f"the link to {peer} is being removed, or a signal handler interrupted a pull on this thread",
        _link.PEER_GONE: f"{peer} died, finalized or was restarted: unlink and link again",
        _link.TIMEOUT: f"not done within sync_kv_timeout of {cluster.settings.sync_kv_timeout_ms} ms{_holder(links, key)}",
        _link.FORKED: "the link belongs to the parent process",
        _lookup.DAMAGED: f"the directory of {peer} holds numbers that no cluster writes",
        _plan.DAMAGED: f"the tensors recorded by {peer} do not lie inside their segment",
        -errno.ENOENT: f"the segment of {peer} has no name any more",
        -errno.ENOMEM: "cannot map the segment: out of memory, or vm.max_map_count mappings are in use",
    }
    return known.get(status) or f"cannot map the segment of {peer}: {_mapping.describe(status)}"


def _shown(first_and_count: tuple[int, ...]) -> str:
    first, count = first_and_count
    return "(all)" if count < 0 else f"{first} to {first + count - 1}"


def _source_shape(links: Links, key: CacheKey | CacheKeyByIdAndIndex) -> str:
    """The source's geometry as its owner recorded it, for a message: another look, without a lock."""
    handle = links.handle(key.cluster_id)
    found = None if handle is None else _lookup.describe(handle.directory, _words(key), _row(key))
    if found is None:
        return ""
    num_tensors, outer, rows, inner = found
    return f"; source rows have {outer * inner} bytes ({num_tensors} tensors, {outer} x {rows} rows x {inner} bytes)"


def _row(key: CacheKey | CacheKeyByIdAndIndex) -> int:
    return key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else 0


def _holder(links: Links, key: CacheKey | CacheKeyByIdAndIndex) -> str:
    """Who has the link's word now, for a message."""
    handle = links.handle(key.cluster_id)
    if handle is None or handle.word == 0:
        return ""
    if handle.word % 2 == 0:
        return f"; the link is held by process {os.getpid()} (this one)"
    member = next((m for m in links.members() if m.slot == handle.peer_slot), None)
    return f"; the link is held by process {member.pid if member else 'unknown'} of cluster {key.cluster_id}"
