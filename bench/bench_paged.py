"""The paged workload: 64 scattered blocks of each tensor into 64 others, in one call."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

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


class Blocks(BareCopy):
    """A blocks cache of this process as the destination."""

    def __init__(self, manager: shmkv.KvCacheManager, source: Source) -> None:
        desc = shmkv.CacheDesc(PAGED.num_tensors, [PAGED.pool, BLOCK_NBYTES // 2], shmkv.DataType.DT_FLOAT16)
        self._manager = manager
        self.cache = manager.allocate_blocks_cache(desc)
        starts = [tensor.data_ptr for tensor in self.cache.tensors]
        super().__init__(source, starts[0], paged_runs(source.offsets, [start - starts[0] for start in starts]))

    def pull(self) -> Contender:
        key = shmkv.BlocksCacheKey(PROMPT_ID, MODEL_ID)
        pull: Any = partial(self._manager.pull_blocks, key, self.cache, SRC_BLOCKS, DST_BLOCKS)
        try:
            pull()
        except shmkv.LLMException as error:
            if error.status_code != shmkv.LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                raise
            pytest.skip("needs pull_blocks, which this version does not have")
        return self.contender(ways.OURS, pull)

    def close(self) -> None:
        self._manager.deallocate_cache(self.cache)


@pytest.fixture(scope="module")
def source(prompt: Process) -> Iterator[Source]:
    made = Source(**prompt.call("publish_blocks", num_tensors=PAGED.num_tensors, block_nbytes=BLOCK_NBYTES, pool=PAGED.pool,
                                model_id=MODEL_ID))
    yield made
    prompt.call("drop", cache_id=made.cache_id)


def blocks_of(memory: ByteArray) -> tuple[list[ByteArray], list[ByteArray]]:
    """The source's and the destination's blocks of a pool in the order of the runs, as if it were the one or the other."""
    tensors = memory.reshape(PAGED.num_tensors, PAGED.pool, BLOCK_NBYTES)
    return ([tensors[t, block] for t in range(PAGED.num_tensors) for block in SRC_BLOCKS],
            [tensors[t, block] for t in range(PAGED.num_tensors) for block in DST_BLOCKS])


def private_ways(shared: ways.Shared) -> Iterator[Contender]:
    """numpy and torch, one assignment for each block, into private memory of the same shape."""
    memory = np.ones(PAGED.cache_nbytes, np.uint8)
    shared.rows, (_, dst) = blocks_of(shared.whole)[0], blocks_of(memory)
    yield shared.numpy(dst)
    torch = ways.import_torch()
    if torch is not None:
        yield shared.torch(torch, dst, 1)


@pytest.mark.timeout(300)
def test_paged(source: Source, manager: shmkv.KvCacheManager, prompt: Process, run: Run, record: Record,
               benchmark: BenchmarkFixture) -> None:
    with contextlib.closing(Blocks(manager, source)) as target, \
            contextlib.closing(ways.Shared(prompt, source, PAGED.num_tensors, PAGED.pool * BLOCK_NBYTES)) as shared, \
            contextlib.ExitStack() as stack:
        ours = target.pull()
        loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), PAGED.number)
        others = [target.bare(loop.kernel, loop.streaming), target.bare_two(loop.kernel, loop.streaming, stack)]
        others += private_ways(shared)
        medians = interleave(benchmark, ours, others, rounds=run.rounds(PAGED.rounds))
    row = Row("workloads", PAGED.name, 0, PAGED.nbytes, notes=[f"C: {loop}"])
    record(row, medians, ways.OURS)
