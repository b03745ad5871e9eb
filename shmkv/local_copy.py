"""Copies between caches of this process: checked arguments in, one call of the core, exceptions out."""
from __future__ import annotations

import errno
from collections.abc import Sequence

from shmkv import _link, _pull
from shmkv._blocks import TO_BLOCKS, BlockLists
from shmkv._local import LocalCache
from shmkv.caches import Usable
from shmkv.cluster import Cluster
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode

# A local copy has no timeout in the contract; this bounds it all the same.
COPY_TIMEOUT_MS = 2**31 - 1


def copy_row(cluster: Cluster, src: Usable, dst: Usable, src_row: int, dst_row: int, offset: int, size: int) -> None:
    """Copy one row between two own caches; the same offset on both sides, `size` -1 = the rest of the source row. The caller has
    counted the source in."""
    if src.desc.num_tensors != dst.desc.num_tensors:
        raise LLMParamError(f"src has {src.desc.num_tensors} tensors, dst has {dst.desc.num_tensors}: they must be equal")
    for name, row, cache in (("src_batch_index", src_row, src), ("dst_batch_index", dst_row, dst)):
        if row >= cache.desc.batch_size:
            raise LLMParamError(f"argument '{name}' must be below {cache.desc.batch_size}, got {row}")
    for nbytes, first, count in _windows(src, dst, offset, size):
        status = _pull.copy(src.local, dst.local, (nbytes, offset, offset, src_row, dst_row, first, count, first, count, 0),
                            COPY_TIMEOUT_MS, disjoint=src is dst and src_row != dst_row)
        if status:
            raise _failure(cluster, "copy_cache", status)


def _windows(src: Usable, dst: Usable, offset: int, size: int) -> list[tuple[int, int, int]]:
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


def copy_blocks(cluster: Cluster, what: str, src: LocalCache, dst: LocalCache, pairs: Sequence[tuple[int, int]], *,
                disjoint: bool) -> None:
    """Copy blocks of `src` to blocks of `dst`, all tensors, in one call of the kernel. No destination twice, and none the source of
    another; `disjoint`: the two share no bytes, or it is one cache. The caller has counted the source in."""
    try:
        lists = BlockLists([src for src, _ in pairs], [dst for _, dst in pairs], TO_BLOCKS)
    except MemoryError as error:
        raise cluster.no_memory("lists of blocks", error) from error
    status = _pull.copy(src, dst, (-1, 0, 0, 0, 0, 0, -1, 0, -1, 0), COPY_TIMEOUT_MS, lists=lists, disjoint=disjoint)
    if status:
        raise _failure(cluster, what, status)


def _failure(cluster: Cluster, what: str, status: int) -> LLMException:
    """The exception (not raised) for a copy inside this process that was answered `status`."""
    if status == -errno.ENOMEM:
        return LLMException(f"{what}: no memory for a temporary copy", status_code=cluster.settings.out_of_memory_status)
    if status == _link.BUSY:
        return LLMException(f"{what}: called from a signal handler that interrupted a pull",
                            status_code=LLMStatusCode.LLM_LINK_BUSY)
    if status == _pull.DST_GONE:
        return LLMException(f"{what}: the destination was deallocated", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    return LLMException(f"{what} was not done: status {status}")
