"""The paged workload: 64 scattered blocks of each tensor into 64 others, in one call."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import contenders as ways
import pytest
import yardstick
from blocks import BLOCK_NBYTES, DST_BLOCKS, MODEL_ID, SRC_BLOCKS, Blocks, blocks_of
from cluster import Source
from measure import Contender, interleave
from on_two import Helper
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row, time_text
from session import Record, Run
from workloads import DESTINATIONS, PAGED

import shmkv


@pytest.fixture(scope="module")
def source(prompt: Process) -> Iterator[Source]:
    made = Source(**prompt.call("publish_blocks", num_tensors=PAGED.num_tensors, block_nbytes=BLOCK_NBYTES, pool=PAGED.pool,
                                model_id=MODEL_ID))
    yield made
    prompt.call("drop", cache_id=made.cache_id)


@pytest.fixture(scope="module")
def shared(source: Source, prompt: Process) -> Iterator[ways.Shared]:
    """The same pools in multiprocessing.shared_memory; its rows are the blocks, in the order of the runs."""
    with contextlib.closing(ways.Shared(prompt, source, PAGED.num_tensors, PAGED.pool * BLOCK_NBYTES)) as made:
        made.rows = blocks_of(made.rows, SRC_BLOCKS)
        yield made


def private_ways(prompt: Process, source: Source, shared: ways.Shared, target: Blocks,
                 stack: contextlib.ExitStack) -> Iterator[Contender]:
    """What a user would write, block after block, into the same memory."""
    dst = blocks_of(target.tensors, DST_BLOCKS)
    yield shared.numpy(dst)
    torch = ways.import_torch()
    if torch is not None:
        yield shared.torch(torch, dst, 1)
        yield shared.torch(torch, dst, 2)
    addresses = [address + block * BLOCK_NBYTES for address in source.addresses for block in SRC_BLOCKS]
    yield ways.readv(source.pid, addresses, shared.rows, dst)
    yield ways.unix_socket(prompt, source, shared.rows, dst, stack, blocks=SRC_BLOCKS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", DESTINATIONS)
def test_paged(source: Source, shared: ways.Shared, manager: shmkv.KvCacheManager, prompt: Process, two_threads: Helper, run: Run,
               record: Record, benchmark: BenchmarkFixture, at: int) -> None:
    with contextlib.closing(Blocks(manager, source, at)) as target, contextlib.ExitStack() as stack:
        stack.callback(two_threads.process.call, "forget")
        loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), PAGED.number)
        others = [target.bare(loop.kernel, loop.streaming), *private_ways(prompt, source, shared, target, stack)]
        others += two_threads.contenders("target_blocks", source=source.to_json(), at=at, kernel=loop.kernel,
                                         streaming=loop.streaming)
        medians = interleave(benchmark, target.pull(), others, rounds=run.rounds(PAGED.rounds))
    row = Row("workloads", PAGED.name, at, PAGED.nbytes, notes=[f"C: {loop}"])
    if ways.OURS_TWO_WOKEN in medians:
        row.notes.append(f"2 threads that have slept: {time_text(medians[ways.OURS_TWO_WOKEN])}")
    record(row, medians, ways.OURS)
