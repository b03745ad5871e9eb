"""Pushes to caches that a key names: checked arguments in, one call of the core, a status out."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv import _link, _lookup, _plan, _pull, _push, _push_key
from shmkv._blocks import TO_BLOCKS, BlockLists
from shmkv.caches import Usable
from shmkv.cluster import Cluster
from shmkv.errors import LLMException
from shmkv.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from shmkv.link import Links
from shmkv.own_cache import OwnCache
from shmkv.pull_failure import Select, failure
from shmkv.push_failure import push_code, push_sentence

TargetKey = CacheKeyByIdAndIndex | BlocksCacheKey


def push_to_key(cluster: Cluster, links: Links, key: TargetKey, source: Usable, select: Select, lists: BlockLists | None, *,
                whole_tensors: int = 0) -> int:
    """Copy whole rows of `source`, which was counted in, to the row that `key` names, or its blocks to those of the cache: 0 or a
    number of the core.

    `select`: (-1, or the bytes of a block of the destination where `lists` cut a row, 0, 0, source row, 0, first source tensor, how
    many or -1, the same of the destination, 0). `whole_tensors`: of how many tensors the transfer is that this is a part of, 0 = of
    these: which loop copies follows from the bytes of the whole.
    """
    # Others must not have taken this process for dead: they would use the memory that is written to.
    cluster.namespace.check_own_life(cluster.member)
    if key.cluster_id == cluster.cluster_id:
        return _push_own(cluster, key, source, select, lists)
    link = links.to_push(key.cluster_id)
    if isinstance(link, int):
        return link
    return _push_key.push(link, source.local, key.packed, select, lists, cluster.settings.sync_kv_timeout_ms,
                          whole_tensors=whole_tensors)


def key_push_failure(status: int, cluster: Cluster, links: Links, key: TargetKey) -> LLMException:
    """The exception (not raised) for a push that was answered `status`."""
    code = push_code(status, cluster)
    return failure(f"push to {key!r}", code, key_push_sentence(status, cluster, links, key))


def key_push_sentence(status: int, cluster: Cluster, links: Links, key: TargetKey) -> str:
    """What happened."""
    peer = f"cluster {key.cluster_id}"
    return {
        _lookup.NEVER: f"{peer} has no such cache",
        _lookup.DAMAGED: f"the directory of {peer} holds numbers that no cluster writes",
        _push_key.CLOSED: f"the cache is not remote-accessible: {peer} registered it so",
        _plan.DST_ROW: "the destination has no row with that batch index",
        _plan.DST_BLOCK: "argument 'dst_blocks' names blocks that the destination does not have",
        _plan.DST_RANGE: "the destination tensors of dst_layer_range are not all there",
        _plan.SRC_RANGE: "the source tensors of src_layer_range are not all there",
        _plan.COUNTS: "source and destination tensors differ in number: give both layer ranges, or caches that are alike",
        _plan.DST_WINDOW: "rows of the destination are shorter than those of the source",
        _plan.BLOCK_NBYTES: "blocks of the destination are shorter than those of the source, or not of dst_block_memory_size bytes",
        _plan.SRC_BLOCK: "argument 'src_blocks' names blocks that the source does not have",
        _plan.BLOCKS_WINDOW: "more blocks than the source row has room for",
        _link.ENDED: f"not linked to {peer}, or the link was removed",
    }.get(status) or push_sentence(status, cluster, links, key.cluster_id, 0)


# -- to a cache of the own cluster: no link, no hazard; both are counted in while they are used ------------------------------

def _push_own(cluster: Cluster, key: TargetKey, source: Usable, select: Select, lists: BlockLists | None) -> int:
    with cluster.lock:
        target = _find(cluster, key)
        if isinstance(target, int):
            return target
        if not target.remote_accessible:
            return int(_push_key.CLOSED)
        target.local.count_in()
    try:
        return _copy(cluster, key, source, target, select, lists)
    finally:
        target.local.leave()


def _find(cluster: Cluster, key: TargetKey) -> OwnCache | int:
    if isinstance(key, BlocksCacheKey):
        found = cluster.caches.sources.by_blocks_key(key.model_id)
        return int(_lookup.NEVER) if found is None else found
    row = cluster.caches.sources.by_id(key.cache_id, 0)
    return row if isinstance(row, int) else row[0]


def _copy(cluster: Cluster, key: TargetKey, source: Usable, target: OwnCache, select: Select, lists: BlockLists | None) -> int:
    tensors = _tensors(source, target, select)
    if isinstance(tensors, int):
        return tensors
    is_cut = lists is not None and lists.mode != TO_BLOCKS
    dst_row = key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else 0
    fault = _fault(source, target, select[3], dst_row, lists)
    if fault:
        return fault
    lengths = [(source.layout.row_nbytes[src], target.layout.row_nbytes[dst]) for src, dst in tensors]
    if is_cut and select[0] >= 0 and any(theirs != select[0] for _, theirs in lengths):
        return int(_plan.BLOCK_NBYTES)
    if not is_cut and any(ours > theirs for ours, theirs in lengths):
        return int(_plan.DST_WINDOW if lists is None else _plan.BLOCK_NBYTES)
    if is_cut or all(ours == theirs for ours, theirs in lengths):
        wanted = (-1, *select[1:4], dst_row, *select[5:])
        return int(_pull.copy(source.local, target.local, wanted, cluster.settings.sync_kv_timeout_ms, lists=lists))
    pairs = [(select[3], dst_row)] if lists is None else lists.pairs
    for (src, dst), (nbytes, _) in zip(tensors, lengths, strict=True):
        for src_row, row in pairs:
            status = int(_pull.copy(source.local, target.local, (nbytes, 0, 0, src_row, row, src, 1, dst, 1, 0),
                                    cluster.settings.sync_kv_timeout_ms))
            if status:
                return status
    return 0


def _tensors(source: Usable, target: OwnCache, select: Select) -> Sequence[tuple[int, int]] | int:
    """(source tensor, destination tensor) of what is selected, or why it cannot be."""
    chosen = []
    for (first, count), total, fault in ((select[7:9], target.desc.num_tensors, _plan.DST_RANGE),
                                         (select[5:7], source.desc.num_tensors, _plan.SRC_RANGE)):
        end = total if count < 0 else first + count
        if first >= end or end > total:
            return int(fault)
        chosen.append(range(first, end))
    dst, src = chosen
    return list(zip(src, dst, strict=True)) if len(src) == len(dst) else int(_plan.COUNTS)


def _fault(source: Usable, target: OwnCache, src_row: int, dst_row: int, lists: BlockLists | None) -> int:
    """Rows and blocks that are not there."""
    src_rows, dst_rows = source.desc.batch_size, target.desc.batch_size
    if lists is None:
        if src_row >= src_rows:
            return int(_push.ROW)
        return 0 if dst_row < dst_rows else int(_plan.DST_ROW)
    if lists.mode == TO_BLOCKS and max(src for src, _ in lists.pairs) >= src_rows:
        return int(_plan.SRC_BLOCK)
    if lists.mode != TO_BLOCKS and src_row >= src_rows:
        return int(_push.ROW)
    return 0 if max(dst for _, dst in lists.pairs) < dst_rows else int(_plan.DST_BLOCK)
