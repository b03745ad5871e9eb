"""Pushes of a whole cache against pulls of the same bytes and against the bare copy, all into the same cache of this process."""
from __future__ import annotations

from functools import partial

import pytest
import yardstick
from cluster import Source
from contenders import BARE, OURS, Target, same_bytes
from measure import Contender, interleave
from programs import Process
from pytest_benchmark.fixture import BenchmarkFixture
from report import Row
from session import DECODER_ID, Record, Run
from workloads import MEDIUM

import shmkv

PULL = "pull"


def pushed(prompt: Process, source: Source, addresses: list[int], number: int) -> int:
    return int(prompt.call("push", cache_id=source.cache_id, cluster_id=DECODER_ID, addresses=addresses, number=number))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [0, 16])
def test_push(manager: shmkv.KvCacheManager, prompt: Process, at: int, run: Run, record: Record,
              benchmark: BenchmarkFixture) -> None:
    """64 MiB in 32 layers whose synchronizer does not wait: from the call to the end of the task. The prompt process copies."""
    source = Source(**prompt.call("publish", num_tensors=MEDIUM.num_tensors, row_nbytes=MEDIUM.row_nbytes))
    target = Target(manager, source, MEDIUM.num_tensors, MEDIUM.row_nbytes, at)
    loop = yardstick.choose(target, run.rounds(yardstick.ROUNDS), 1)
    addresses = [target.base + dst for _, dst, _ in target.runs]
    push = Contender(OURS, partial(pushed, prompt, source, addresses), same_bytes(OURS, target.src_rows, target.rows))
    others = [target.bare(loop.kernel, loop.streaming, BARE), target.pull(PULL)]
    medians = interleave(benchmark, push, others, rounds=run.rounds(MEDIUM.rounds))
    row = Row("streaming", "push of 64 MiB", at, MEDIUM.nbytes)
    row.values = {"push/pull": medians.ratio(OURS, PULL)}
    row.notes = [f"C: {loop}", f"x{medians.ratio(OURS, PULL):.2f} of a pull of the same bytes"]
    record(row, medians, OURS)
    target.close()
    prompt.call("drop", cache_id=source.cache_id)
