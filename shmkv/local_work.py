"""Copies between caches of this process after their arguments were checked, for the managers of both generations of the API."""
from __future__ import annotations

from shmkv import local_copy
from shmkv.block_arguments import Pair, batches, copy_pairs
from shmkv.cache_handle import CacheHandle
from shmkv.errors import LLMParamError
from shmkv.pull_work import PullWork
from shmkv.types import CacheDesc

Names = tuple[str, str]                     # what a call calls its source and its destination
SRC_AND_DST: Names = ("src", "dst")


class LocalWork(PullWork):
    """Without public calls. The source of a copy is counted in, so that it stays until the end."""

    def _copy_row(self, dst: CacheHandle, src: CacheHandle, dst_row: int, src_row: int, offset: int, size: int) -> None:
        with self._cluster.lock:
            source, target = self._usable(src), self._usable(dst)
            source.local.count_in()
        try:
            local_copy.copy_row(self._cluster, source, target, src_row, dst_row, offset, size)
        finally:
            source.local.leave()

    def _copy_within(self, cache: CacheHandle, info: dict[int, list[int]]) -> None:
        """In the dict's order, each copy sees the earlier ones."""
        with self._cluster.lock:
            local = self._local(cache)
            pairs = copy_pairs(info, cache.cache_desc.batch_size)
            local.count_in()
        try:
            for batch in batches(pairs):
                local_copy.copy_blocks(self._cluster, "copy_blocks", local, local, batch, disjoint=True)
        finally:
            local.leave()

    def _swap(self, src: CacheHandle, dst: CacheHandle, pairs: list[Pair], names: Names = SRC_AND_DST) -> None:
        if src.is_host == dst.is_host:
            raise LLMParamError(f"one of {names[0]} and {names[1]} must have placement HOST and one DEVICE, both have "
                                f"{src.cache_desc.placement!s}")
        with self._cluster.lock:
            source, target = self._local(src), self._local(dst)
            source.count_in()
        try:
            if pairs:
                local_copy.copy_blocks(self._cluster, "swap_blocks", source, target, pairs, disjoint=False)
        finally:
            source.leave()


def check_alike(src: CacheDesc, dst: CacheDesc, names: Names = SRC_AND_DST) -> None:
    """LLMParamError unless blocks of one cache fit the other."""
    if src.num_tensors != dst.num_tensors:
        raise LLMParamError(f"{names[0]} has {src.num_tensors} tensors, {names[1]} has {dst.num_tensors}: they must be equal")
    for tensor in range(src.num_tensors):
        ours, theirs = src.tensor_row_geometry(tensor).row_nbytes, dst.tensor_row_geometry(tensor).row_nbytes
        if ours != theirs:
            raise LLMParamError(f"blocks of tensor {tensor} have {ours} bytes in {names[0]} and {theirs} in {names[1]}: they must "
                                "be equal")
