"""From the numbers of the core to status codes and sentences: here and nowhere else.

A message says what was tried, on which name, what was found and what was expected. Which code a timeout gets is a value of the
settings.
"""
from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from shmkv import _attached, _carry, _inspect, _lease, _lend, _link, _lookup, _plan, _pull, peer_access
from shmkv.checks import shown
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMStatusCode, error_for_status
from shmkv.keys import KEY_NONE, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.link import Links
from shmkv.types import CacheDesc

Select = tuple[int, ...]              # as `_pull` takes it
PullKey = CacheKey | CacheKeyByIdAndIndex
SourceKey = PullKey | BlocksCacheKey

BLOCK_LISTS = {False: ("prompt_blocks", "decoder_blocks"), True: ("src_blocks", "dst_blocks")}     # names, by cache-manager mode


def pull_failure(status: int, cluster: Cluster, links: Links, key: SourceKey, desc: CacheDesc | None,
                 select: Select) -> LLMException:
    """The exception (not raised) for a pull that was answered `status`; `desc` describes the destination, None: nothing is copied,
    the row is lent."""
    what = f"{'pull' if desc else 'view'} of {key!r}"
    return failure(what, code_of(status, cluster), sentence_of(status, cluster, links, key, desc, select))


def failure(what: str, code: LLMStatusCode, sentence: str) -> LLMException:
    """The exception (not raised) for a call that was answered by a status."""
    return error_for_status(code, f"{what}: {sentence} ({code.name})")


def code_of(status: int, cluster: Cluster) -> LLMStatusCode:
    """The status code of the contract for a number of the core."""
    settings = cluster.settings
    fixed = {
        _link.ENDED: LLMStatusCode.LLM_NOT_YET_LINK,
        _link.BUSY: LLMStatusCode.LLM_LINK_BUSY,
        _link.PEER_GONE: settings.timeout_status,
        _link.TIMEOUT: settings.timeout_status,
        _pull.DST_GONE: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        _carry.PRIVATE: LLMStatusCode.LLM_PARAM_INVALID,
        _lease.NONE_FREE: LLMStatusCode.LLM_LINK_BUSY,
        _lend.UNMAPPED: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        -errno.ENOENT: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        -errno.ENOMEM: settings.out_of_memory_status,
    }
    if status in _plan.ARGUMENT_FAULTS:
        return LLMStatusCode.LLM_PARAM_INVALID
    if status in _lookup.MISSES:
        return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    if status in peer_access.STATUSES:
        return peer_access.access_code(status, settings)
    return fixed.get(status, LLMStatusCode.LLM_FAILED)


def sentence_of(status: int, cluster: Cluster, links: Links, key: SourceKey, desc: CacheDesc | None, select: Select) -> str:
    """What a number of the core means for this pull, with what was asked and what there is; without `desc` the row is lent."""
    peer = f"cluster {key.cluster_id}"
    if status in _plan.ARGUMENT_FAULTS and desc is None:
        return f"{_asked(select)} is not all there{_source(links, key)}"
    if status in _plan.ARGUMENT_FAULTS and desc is not None:
        return _argument_fault(status, cluster, links, key, desc, select)
    if status in _lookup.MISSES:
        return _miss(status, peer)
    if status in peer_access.STATUSES:
        return peer_access.reach_sentence(status, cluster, key.cluster_id, links.handle(key.cluster_id))
    known = {
        _pull.DST_GONE: "the destination was deallocated",
        _carry.PRIVATE: f"the source lies in private memory of the process of {peer}: it can be pulled, and not be looked at from "
                        "another process",
        _link.ENDED: f"not linked to {peer}{_last_failure(links, key)}: call link_clusters first",
        _link.BUSY: f"the link to {peer} is being removed, or a signal handler interrupted a pull on this thread",
        _link.PEER_GONE: f"{peer} died, finalized or was restarted: unlink and link again",
        _link.TIMEOUT: f"not done within sync_kv_timeout of {cluster.settings.sync_kv_timeout_ms} ms{_holder(links, key)}",
        _lease.NONE_FREE: f"all {cluster.settings.max_leases} leases of the link to {peer} are taken by views, forks and waiting "
                          f"pulls: close some, or set SHMKV_MAX_LEASES (at most {_lease.MOST})",
        _lend.UNMAPPED: "segments are read by system calls here (SHMKV_COPY=pread), so that there is no memory to look at",
        _link.FORKED: "the link belongs to the parent process",
        _lookup.DAMAGED: f"the directory of {peer} holds numbers that no cluster writes",
        _plan.DAMAGED: f"the tensors recorded by {peer} do not lie inside their segment",
        -errno.ENOENT: f"the segment of {peer} has no name any more",
        -errno.ENOMEM: "cannot map the segment: out of memory, or vm.max_map_count mappings are in use",
    }
    return known.get(status) or f"cannot map the segment of {peer}: {_attached.describe(status)}{_segment_layout(links, key)}"


def _asked(select: Select) -> str:
    return f"size {select[0]} at src_cache_offset {select[1]} of tensors {_shown(select[5:7])}"


def _argument_fault(status: int, cluster: Cluster, links: Links, key: SourceKey, desc: CacheDesc, select: Select) -> str:
    size, src_offset, dst_offset, _, row = select[:5]
    src, dst = _shown(select[5:7]), _shown(select[7:9])
    window = f"size {size} at src_cache_offset {src_offset}, dst_cache_offset {dst_offset}"
    source, (src_blocks, dst_blocks) = _source(links, key), BLOCK_LISTS[cluster.settings.cache_manager]
    rows = _rows(desc, select, _source_rows(links, key) if status == _plan.SRC_WINDOW else [])
    return {
        _plan.DST_ROW: f"argument 'batch_index' must be below the batch size {desc.batch_size}, got {row}",
        _plan.DST_RANGE: f"the destination tensors {dst} are not all among its {desc.num_tensors}",
        _plan.DST_WINDOW: f"{window} does not fit {rows}",
        _plan.SRC_WINDOW: f"{window} with {rows} does not fit the source row{source}",
        _plan.SRC_RANGE: f"the source tensors {src} are not all there{source}",
        _plan.COUNTS: f"source tensors {src} and destination tensors {dst} of {desc.num_tensors} differ in number"
                      f"{source}",
        _plan.DIVISOR: f"argument 'tensor_num_per_layer' {select[9]} does not divide the number of source tensors"
                       f"{source}",
        _plan.DST_BLOCK: f"argument '{dst_blocks}' must have blocks below {desc.batch_size}",
        _plan.SRC_BLOCK: f"argument '{src_blocks}' names blocks that are not there{source}",
        _plan.BLOCK_NBYTES: f"blocks must have the same bytes on both sides: {rows}{source}",
        _plan.BLOCKS_WINDOW: f"more blocks than fit the row on the other side: {rows}{source}",
        _plan.FORMAT: f"the source has another kv_tensor_format than {desc.kv_tensor_format!r}, which strict_format refuses",
        _plan.HEADS: f"the source's rows are not whole groups of src_heads heads{source}",
    }[status]


def _rows(desc: CacheDesc, select: Select, source_rows: Sequence[int]) -> str:
    """The destination's rows; of tensors that differ the one whose window does not fit, on its own side or, where the source's rows
    are known, on the other."""
    if desc.is_uniform:
        return f"destination rows of {desc.row_geometry.row_nbytes} bytes (shape {desc.shape})"
    size, src_offset, dst_offset = select[:3]
    src_first, (first, count) = select[5], select[7:9]
    for place in range(min(first, desc.num_tensors), min(first + count, desc.num_tensors) if count >= 0 else desc.num_tensors):
        row = desc.tensor_row_geometry(place).row_nbytes
        wanted = size if size >= 0 else row - dst_offset
        source = source_rows[src_first + place - first:][:1]
        if wanted <= 0 or wanted > row - dst_offset or any(wanted > nbytes - src_offset for nbytes in source):
            other = f", source tensor {src_first + place - first} has rows of {source[0]} bytes" if source else ""
            return f"destination rows of {row} bytes (tensor {place}, shape {desc.tensor_shape(place)}{other})"
    return "the destination's rows"


def _miss(status: int, peer: str) -> str:
    return {
        _lookup.NEVER: f"{peer} has no such key or row: not published yet, never, or long gone",
        _lookup.CONSUMED: f"the key was pulled before and is consumed; {peer} has to publish it again",
        _lookup.REMOVED: f"the key or its cache was removed by {peer}",
        _lookup.UNPUBLISHED: f"{peer} has bound it but not published all of its tensors yet",
    }[status]


def _last_failure(links: Links, key: SourceKey) -> str:
    reason = links.last_failure.get(key.cluster_id)
    return f" ({reason})" if reason else ""


def _shown(first_and_count: Sequence[int]) -> str:
    first, count = first_and_count
    return "(all)" if count < 0 else f"{first} to {first + count - 1}"


def _look_again(links: Links, key: SourceKey) -> tuple[int, int, int, int, int] | None:
    """(tensors, outer, rows, inner, segment) as the source's owner recorded them: another look, without a lock."""
    handle = links.handle(key.cluster_id)
    if handle is None:
        return None
    if not isinstance(key, CacheKeyByIdAndIndex):
        return _lookup.describe(handle.directory, key.words, 0)
    return _lookup.describe(handle.directory, (KEY_NONE, max(key.cache_id, 0), 0, 0), key.batch_index)


def _segment_layout(links: Links, key: SourceKey) -> str:
    """The layout of the source's segment against ours."""
    handle, found = links.handle(key.cluster_id), _look_again(links, key)
    text = "" if handle is None or found is None else _attached.layout_of(handle.segment_path(found[4]))
    return f" ({text})" if text else ""


def _source_rows(links: Links, key: SourceKey) -> list[int]:
    """Bytes of a row of each of the source's tensors, if that can still be told."""
    handle, found = links.handle(key.cluster_id), _look_again(links, key)
    return [] if handle is None or found is None else _inspect.row_nbytes(handle.directory, found[4])


def _source(links: Links, key: SourceKey) -> str:
    """The source's geometry."""
    found = _look_again(links, key)
    if found is None:
        return ""
    num_tensors, outer, rows, inner, _ = found
    each = _source_rows(links, key)
    if len(set(each)) > 1:
        return f"; the source has {num_tensors} tensors of {rows} rows, of {shown(each)} bytes"
    return f"; the source has {num_tensors} tensors of {rows} rows, each {outer} x {inner} = {outer * inner} bytes"


def _holder(links: Links, key: SourceKey) -> str:
    """Who has the link's word now."""
    handle = links.handle(key.cluster_id)
    if handle is None or handle.word == 0:
        return ""
    if handle.word % 2 == 0:
        return f"; the link is held by process {os.getpid()} (this one)"
    member = next((m for m in links.members() if m.slot == handle.peer_slot), None)
    return f"; the link is held by process {member.pid if member else 'unknown'} of cluster {key.cluster_id}"
