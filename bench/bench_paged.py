"""The paged workload: 64 scattered blocks of each tensor into 64 others, in one call."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import contenders as ways
import numpy as np
import pytest
import yardstick
from cluster import ByteArray, Source
from contenders import BareCopy
from measure import Contender, interleave
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row
from session import PROMPT_ID, Record, Run
from workloads import DESTINATIONS, PAGED, Runs

import shmkv

MODEL_ID = 1
BLOCK_NBYTES = PAGED.row_nbytes
SRC_BLOCKS, DST_BLOCKS = PAGED.scattered("source"), PAGED.scattered("destination")


def paged_runs(src_starts: list[int], dst_starts: list[int]) -> Runs:
    """Tensor after tensor, block after block: 4,096 runs of 32 KiB."""
    return [(src + from_block * BLOCK_NBYTES, dst + to_block * BLOCK_NBYTES, BLOCK_NBYTES)
            for src, dst in zip(src_starts, dst_starts, strict=True)
            for from_block, to_block in zip(SRC_BLOCKS, DST_BLOCKS, strict=True)]


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

    def pull(self) -> Contender:
        key = shmkv.BlocksCacheKey(PROMPT_ID, MODEL_ID)
        return self.contender(ways.OURS, partial(self._manager.pull_blocks, key, self.cache, SRC_BLOCKS, DST_BLOCKS))

    def close(self) -> None:
        self._manager.unregister_cache(self.cache)


@pytest.fixture(scope="module")
def source(prompt: Process) -> Iterator[Source]:
    made = Source(**prompt.call("publish_blocks", num_tensors=PAGED.num_tensors, block_nbytes=BLOCK_NBYTES, pool=PAGED.pool,
                                model_id=MODEL_ID))
    yield made
    prompt.call("drop", cache_id=made.cache_id)


def blocks_of(tensors: list[ByteArray], blocks: list[int]) -> list[ByteArray]:
    """These blocks of each tensor, in the order of the runs."""
    return [tensor.reshape(PAGED.pool, BLOCK_NBYTES)[block] for tensor in tensors for block in blocks]


def private_ways(shared: ways.Shared, target: Blocks) -> Iterator[Contender]:
    """numpy and torch, one assignment for each block, into the same memory."""
    pools = list(shared.whole[:PAGED.cache_nbytes].reshape(PAGED.num_tensors, -1))
    shared.rows, dst = blocks_of(pools, SRC_BLOCKS), blocks_of(target.tensors, DST_BLOCKS)
    yield shared.numpy(dst)
    torch = ways.import_torch()
    if torch is not None:
        yield shared.torch(torch, dst, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", DESTINATIONS)
def test_paged(source: Source, manager: shmkv.KvCacheManager, prompt: Process, run: Run, record: Record,
               benchmark: BenchmarkFixture, at: int) -> None:
    with contextlib.closing(Blocks(manager, source, at)) as target, \
            contextlib.closing(ways.Shared(prompt, source, PAGED.num_tensors, PAGED.pool * BLOCK_NBYTES)) as shared, \
            contextlib.ExitStack() as stack:
        ours = target.pull()
        loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), PAGED.number)
        others = [target.bare(loop.kernel, loop.streaming), target.bare_two(loop.kernel, loop.streaming, stack)]
        others += private_ways(shared, target)
        medians = interleave(benchmark, ours, others, rounds=run.rounds(PAGED.rounds))
    row = Row("workloads", PAGED.name, at, PAGED.nbytes, notes=[f"C: {loop}"])
    record(row, medians, ways.OURS)
