"""The copy loops against each other, libc's memcpy among them: is the yardstick of the other files the best there is?"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yardstick
from arena import Arena, opened
from measure import interleave
from report import Row
from session import Record, Run
from workloads import DESTINATIONS, MEDIUM, SMALL, Workload


@pytest.fixture(scope="module", params=[SMALL, MEDIUM], ids=lambda workload: workload.name.split()[0])
def arena(request: pytest.FixtureRequest, manager: Any, prompt: Any) -> Iterator[Arena]:
    with opened(manager, prompt, request.param) as made:
        yield made


@pytest.mark.parametrize("at", DESTINATIONS)
def test_loops(arena: Arena, at: int, run: Run, record: Record, benchmark: Any) -> None:
    """Our choice for this size first, all others after it."""
    workload: Workload = arena.workload
    with arena.target(at) as target:
        chosen = yardstick.library_choice(workload.nbytes)
        others = [loop for loop in yardstick.loops() if loop != chosen]
        medians = interleave(benchmark, target.bare(chosen.kernel, chosen.streaming, str(chosen)),
                             [target.bare(loop.kernel, loop.streaming, str(loop)) for loop in others],
                             rounds=run.rounds(workload.rounds), number=workload.number)
    best = yardstick.fastest(medians)
    row = Row("loops", f"loop for {workload.name}", at, workload.nbytes, values={"ours/best": medians.ratio(str(chosen), best)})
    row.notes = [f"{chosen}", f"{medians.ratio(best, str(chosen)):.2f} of the best ({best})",
                 f"memcpy x{medians.ratio('memcpy, ordinary', str(chosen)):.2f}"]
    record(row, medians, str(chosen))
