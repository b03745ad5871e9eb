"""`shmkv demo`: one prompt process hands requests to decoder processes; every byte is checked, every pull is timed.

The yardstick runs along: numpy slices over `multiprocessing.shared_memory`, on the same bytes, in turns with the pulls.
"""
from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shmkv import segment
from shmkv.cli import console
from shmkv.cli.demo_plan import Plan
from shmkv.cli.demo_run import Figures, Run
from shmkv.errors import LLMException

DEFAULT_TOKENS = 512
FEWEST_TOKENS = 16
INTERRUPTED = 130
COMPARABLE_NBYTES = 1 << 20


def show(*, layers: int, heads: int, head_dim: int, tokens: int | None, dtype: str, requests: int, decoders: int, corrupt: int,
         json: bool) -> int:
    """Run the demo and print its figures. Returns the exit status: 1 if a byte was wrong, 130 after Ctrl-C."""
    plan = Plan(layers, heads, head_dim, tokens or DEFAULT_TOKENS, dtype, requests, decoders, corrupt)
    plan = _fitted(plan, may_shrink=tokens is None)
    out = console.out()
    if not json:
        _print_plan(out, plan, tokens or DEFAULT_TOKENS)
    begin = time.perf_counter()
    try:
        figures = _run(plan, quiet=json)
    except KeyboardInterrupt:
        console.error_line("interrupted; nothing is left in /dev/shm")
        return INTERRUPTED
    result = _result(plan, figures, time.perf_counter() - begin)
    if json:
        console.print_json(result)
    else:
        _print_result(out, plan, result)
    for request, wrong in sorted(figures.wrong.items()):
        console.error_line(f"request {request}: {wrong}")
    return 1 if figures.wrong else 0


# -- room --------------------------------------------------------------------------------------------------------------

def _fits(plan: Plan) -> bool:
    limit = segment.memory_limit_left()
    return plan.shared_nbytes <= segment.free_nbytes() and (limit is None or plan.shared_nbytes + plan.private_nbytes <= limit)


def _fitted(plan: Plan, *, may_shrink: bool) -> Plan:
    """The plan, with fewer tokens if it has to and may be smaller. LLMException if it does not fit."""
    while not _fits(plan) and may_shrink and plan.tokens > FEWEST_TOKENS:
        plan = replace(plan, tokens=plan.tokens // 2)
    if not _fits(plan):
        limit = segment.memory_limit_left()
        below = "" if limit is None else f", the memory limit leaves {console.size(limit)}"
        raise LLMException(f"the demo needs {console.size(plan.shared_nbytes)} of {segment.SHM_DIR} and "
                           f"{console.size(plan.private_nbytes)} of other memory; {segment.SHM_DIR} has "
                           f"{console.size(segment.free_nbytes())} free{below}: choose fewer --tokens, --layers or --decoders")
    return plan


# -- running -----------------------------------------------------------------------------------------------------------

def _run(plan: Plan, *, quiet: bool) -> Figures:
    progress = Progress(TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                        console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())
    with progress:
        task = progress.add_task("requests", total=plan.requests)
        return Run(plan, lambda done: progress.update(task, completed=done)).execute()


def _way(samples: list[int], nbytes: int) -> dict[str, float]:
    """Figures of one way to copy: the median, and what follows from it."""
    median_ns = statistics.median(samples)
    return {"median_ms": median_ns / 1e6, "fastest_ms": min(samples) / 1e6, "pulls_per_second": 1e9 / median_ns,
            "gb_per_second": nbytes / median_ns}


def _result(plan: Plan, figures: Figures, seconds: float) -> dict[str, Any]:
    pull, numpy = _way(figures.pull_ns, plan.request_nbytes), _way(figures.numpy_ns, plan.request_nbytes)
    return {
        **asdict(plan), "bytes_per_request": plan.request_nbytes, "bytes": plan.request_nbytes * plan.requests,
        "segments": figures.segments, "seconds": seconds, "kernel": figures.kernel, "pull": pull, "numpy": numpy,
        "times_as_fast": numpy["median_ms"] / pull["median_ms"],
        "wrong": {str(request): text for request, text in sorted(figures.wrong.items())},
    }


# -- printing ----------------------------------------------------------------------------------------------------------

def _print_plan(out: Console, plan: Plan, asked_tokens: int) -> None:
    processes = f"1 prompt and {plan.decoders} decoder process{'es' if plan.decoders > 1 else ''}"
    if plan.tokens < asked_tokens:
        out.print(f"{segment.SHM_DIR} or the memory limit is small: {plan.tokens} tokens a request instead of {asked_tokens}")
    out.print(f"{processes}, {plan.requests} requests of {console.size(plan.request_nbytes)}: {plan.layers} layers, "
              f"{plan.heads} heads x {plan.head_dim}, {plan.tokens} tokens, {plan.dtype}")


def _print_result(out: Console, plan: Plan, result: dict[str, Any]) -> None:
    table = Table("", "requests", "bytes", "median", "pulls/s", "GB/s", title="copies into a decoder's own cache",
                  title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, way in (("shmkv pull_cache", result["pull"]), ("numpy slices", result["numpy"])):
        table.add_row(name, str(plan.requests), console.size(result["bytes"]), f"{way['median_ms']:.3f} ms",
                      f"{way['pulls_per_second']:.1f}", f"{way['gb_per_second']:.2f}")
    out.print(table)
    out.print("numpy slices: the same bytes, in turns, out of multiprocessing.shared_memory into a private array")
    # Of a small request the timing of one call is most of what is measured.
    ratio = f"shmkv is {result['times_as_fast']:.2f} times as fast; " if plan.request_nbytes >= COMPARABLE_NBYTES else ""
    out.print(f"{ratio}all {plan.requests} requests went through {result['segments']} segments; copy kernel {result['kernel']}; "
              f"{result['seconds']:.1f} s in all, with filling and checking")
    if not result["wrong"]:
        out.print(f"every byte of {plan.requests} requests is right", style="green")
