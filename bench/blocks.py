"""The destination of the paged workload: 64 scattered blocks of each tensor, out of 64 others."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import contenders as ways
import numpy as np
from cluster import ByteArray, Source
from contenders import BareCopy
from measure import Contender
from workloads import PAGED, Runs

import shmkv

MODEL_ID = 1
BLOCK_NBYTES = PAGED.row_nbytes
SRC_BLOCKS, DST_BLOCKS = PAGED.scattered("source"), PAGED.scattered("destination")


def paged_runs(src_starts: list[int], dst_starts: list[int]) -> Runs:
    """Tensor after tensor, block after block: 4,096 runs of 32 KiB."""
    return [(src + from_block * BLOCK_NBYTES, dst + to_block * BLOCK_NBYTES, BLOCK_NBYTES)
            for src, dst in zip(src_starts, dst_starts, strict=True)
            for from_block, to_block in zip(SRC_BLOCKS, DST_BLOCKS, strict=True)]


def blocks_of(tensors: list[ByteArray], blocks: list[int]) -> list[ByteArray]:
    """These blocks of each tensor, in the order of the runs."""
    return [tensor.reshape(PAGED.pool, BLOCK_NBYTES)[block] for tensor in tensors for block in blocks]


class Blocks(BareCopy):
    """Memory of this process alone, registered as a blocks cache, whose tensors begin at one byte of their page."""

    def __init__(self, manager: shmkv.KvCacheManager, source: Source, at: int) -> None:
        desc = shmkv.CacheDesc(PAGED.num_tensors, [PAGED.pool, BLOCK_NBYTES // 2], shmkv.DataType.DT_FLOAT16)
        self._manager = manager
        self.tensors = ways.Private(PAGED.cache_nbytes).rows(PAGED.num_tensors, PAGED.pool * BLOCK_NBYTES, at)
        pools = [tensor.view(np.float16).reshape(PAGED.pool, -1) for tensor in self.tensors]
        self.cache = manager.register_blocks_cache(desc, pools)
        (starts,) = self.cache.per_device_tensor_addrs
        super().__init__(source, starts[0], paged_runs(source.offsets, [start - starts[0] for start in starts]))

    def pull_call(self) -> Callable[[], None]:
        key = shmkv.BlocksCacheKey(self.source.cluster_id, MODEL_ID)
        return partial(self._manager.pull_blocks, key, self.cache, SRC_BLOCKS, DST_BLOCKS)

    def pull(self) -> Contender:
        return self.contender(ways.OURS, self.pull_call())

    def close(self) -> None:
        self._manager.unregister_cache(self.cache)
