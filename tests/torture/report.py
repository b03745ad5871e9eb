"""What a run came to: printed, and written as JSON if asked for."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torture.arguments import Plan
from torture.board import Board, Field, Sample
from torture.ending import Left
from torture.referee import Seen

WRONG = ("wrong bytes", "stale bytes")


def summary(plan: Plan, board: Board, seen: Seen, left: Left) -> dict[str, Any]:
    """All figures of a run."""
    totals = {field.name.lower(): board.total(field) for field in (
        Field.PULLS, Field.NBYTES, Field.MISSES, Field.UNTOUCHED, Field.LOST, Field.CUT, Field.LINKS, Field.PUBLISHED, Field.REFUSED,
        Field.RESTARTS)}
    recoveries = {kind.name.lower(): quantiles(board.all_samples(kind)) for kind in Sample}
    wrong = sum(any(word in fault for word in WRONG) for fault in seen.faults)
    return {"plan": asdict(plan), **asdict(seen), **totals, "recoveries_ms": recoveries, "wrong_or_stale": wrong, "left": asdict(left),
            "faults": seen.faults + leaks(left)}


def leaks(left: Left) -> list[str]:
    """What is left and should not be, as faults."""
    found = [f"leak: {name} {number}" for name, number in asdict(left).items()
             if number > 0 and name not in ("ended", "files_before_gc")]
    return found if left.ended else [*found, "nobody ended by itself, so nothing was looked at for leaks"]


def quantiles(samples: Sequence[int]) -> dict[str, float]:
    """In ms."""
    ordered = sorted(samples)
    if not ordered:
        return {"count": 0}
    at = {"p50": 0.50, "p99": 0.99, "max": 1.0}
    return {"count": len(ordered), **{name: ordered[min(len(ordered) - 1, int(part * len(ordered)))] / 1e6
                                      for name, part in at.items()}}


def show(found: dict[str, Any]) -> None:
    seconds = found["seconds"]
    plan = found["plan"]
    print(f"{plan['prompts']} prompts, {plan['decoders']} decoders, {seconds:.0f} s, of these {found['one_core_s']:.0f} s on one core; "
          f"seed {plan['seed']}")
    print(f"kills survived           {found['kills']:>12,}   {found['kills'] / seconds:.1f} a second; {found['of_prompts']:,} prompts; "
          f"{found['at_once']} times several at once")
    print(f"  holding a lock         {found['holding']:>12,}   and {found['held_by_peer']:,} prompts while a decoder held one of theirs")
    print(f"stops                    {found['stops']:>12,}")
    print(f"processes                {found['started_apart'] + found['forked']:>12,}   {found['started_apart']:,} interpreters, "
          f"{found['forked']:,} forked by one; {found['restarts']:,} times finalize and init again")
    print(f"checked pulls            {found['pulls']:>12,}   {found['pulls'] / seconds:,.0f} a second, {found['nbytes'] / 2**30:.1f} GiB; "
          f"{found['misses']:,} answered \"not there\"")
    print(f"  failed and looked at   {found['untouched']:>12,}   destinations that had to be as before")
    print(f"published                {found['published']:>12,}   rows; {found['refused']:,} times no memory")
    print(f"links                    {found['links']:>12,}   {found['lost']:,} ended by a death, {found['cut']:,} removed by the prompt")
    for name, text in (("status", "death to status"), ("again", "death to next right pull")):
        some = found["recoveries_ms"][name]
        if some["count"]:
            print(f"{text:<24} {some['count']:>12,}   p50 {some['p50']:.2f} ms, p99 {some['p99']:.2f} ms, max {some['max']:.1f} ms")
    print(f"wrong or stale bytes     {found['wrong_or_stale']:>12,}")
    print(f"hangs                    {found['hangs']:>12,}")
    left = found["left"]
    print(f"left at the end          {left['files']:>12,}   files, {left['nbytes']:,} bytes after gc ({left['files_before_gc']} before); "
          f"of {left['ended']} that ended: {left['descriptors']} descriptors, {left['mappings']} mappings, {left['mapped_nbytes']} bytes "
          f"mapped, {left['caches']} caches")
    print(f"peak in /dev/shm         {found['peak_nbytes'] / 2**20:>12,.0f}   MiB")
    print(f"faults                   {len(found['faults']):>12,}")
    for fault in found["faults"]:
        print(f"FAULT: {fault}")


def write(found: dict[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
