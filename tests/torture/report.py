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

WRONG = ("wrong bytes", "stale bytes", "has written")
LATE_MS = 100                       # a decoder is to hear of a death within that
TOTALS = (Field.PULLS, Field.NBYTES, Field.LOOKS, Field.MISSES, Field.UNTOUCHED, Field.LOST, Field.CUT, Field.LINKS,
          Field.PUBLISHED, Field.REFUSED, Field.RESTARTS, Field.PUSHES, Field.PUSHED_BY_KEY, Field.PUSHED_NBYTES,
          Field.PARTS, Field.UNDONE, Field.CUTS_SEEN, Field.WAITED, Field.LAYERED, Field.OVERDUE)


def summary(plan: Plan, board: Board, seen: Seen, left: Left) -> dict[str, Any]:
    """All figures of a run."""
    totals = {field.name.lower(): board.total(field) for field in TOTALS}
    times = {kind.name.lower(): quantiles(board.all_samples(kind)) for kind in Sample}
    bytes_faults = sum(any(word in fault for word in WRONG) for fault in seen.faults)
    return {"plan": asdict(plan), **asdict(seen), **totals, "recoveries_ms": times, "wrong_or_stale": bytes_faults,
            "left": asdict(left), "faults": seen.faults + leaks(left)}


def leaks(left: Left) -> list[str]:
    """What is left and should not be, as faults."""
    found = [f"leak: {name} {number}" for name, number in asdict(left).items()
             if number > 0 and name not in ("ended", "files_before_gc")]
    return found if left.ended else [*found, "nobody ended by itself, so nothing was looked at for leaks"]


def quantiles(samples: Sequence[int]) -> dict[str, float]:
    """In ms; and how many were late."""
    ordered = sorted(samples)
    if not ordered:
        return {"count": 0, "late": 0}
    at = {"p50": 0.50, "p99": 0.99, "max": 1.0}
    late = sum(each > LATE_MS * 1e6 for each in ordered)
    return {"count": len(ordered), "late": late, **{name: ordered[min(len(ordered) - 1, int(part * len(ordered)))] / 1e6
                                      for name, part in at.items()}}


def show(found: dict[str, Any]) -> None:
    plan = found["plan"]
    print(f"{plan['prompts']} prompts, {plan['decoders']} decoders, {found['seconds']:.0f} s, "
          f"of these {found['one_core_s']:.0f} s on one core; seed {plan['seed']}")
    for name, number, more in [*kills(found), *pulls(found), *recoveries(found), *wrong(found)]:
        print(f"{name:<26}{number:>12,}   {more}".rstrip())
    for fault in found["faults"]:
        print(f"FAULT: {fault}")


Line = tuple[str, int, str]


def kills(found: dict[str, Any]) -> list[Line]:
    return [
        ("kills survived", found["kills"], f"{found['kills'] / found['seconds']:.1f} a second; {found['of_prompts']:,} prompts; "
                                           f"{found['at_once']} times several at once"),
        ("  holding a lock", found["holding"], f"and {found['held_by_peer']:,} prompts while a decoder held one of theirs"),
        ("  pushing", found["pushing"], f"with the link's lock; and {found['pushed_to']:,} decoders that were pushed to"),
        ("stops", found["stops"], ""),
        ("processes", found["started_apart"] + found["forked"],
         f"{found['started_apart']:,} interpreters, {found['forked']:,} forked by one; {found['restarts']:,} times finalize and "
         "init again in the same process"),
    ]


def pulls(found: dict[str, Any]) -> list[Line]:
    return [
        ("checked pulls", found["pulls"], f"{found['pulls'] / found['seconds']:,.0f} a second, {found['nbytes'] / 2**30:.1f} GiB; "
                                          f"{found['misses']:,} answered \"not there\""),
        ("  looks at what was lent", found["looks"], "views and forks, again and again while they were held"),
        ("  that could wait", found["waited"], f"for layers, for a key, for several; {found['layered']:,} layer by layer; "
                                               f"{found['overdue']:,} more had waited for a key as long as they were told to"),
        ("  failed and looked at", found["untouched"], "destinations that had to be as before"),
        ("checked pushes", found["pushes"], f"{found['pushes'] / found['seconds']:,.0f} a second, "
                                            f"{found['pushed_nbytes'] / 2**30:.1f} GiB; "
                                            f"{found['pushed_by_key']:,} to what a key named; {found['undone']:,} not done"),
        ("  unfinished ones", found["parts"], f"looked at word by word; {found['cuts_seen']:,} looks at the next memory after a "
                                              "link was cut under a push"),
        ("published", found["published"], f"rows; {found['refused']:,} times no memory"),
        ("links", found["links"], f"{found['lost']:,} ended by a death, {found['cut']:,} removed by the prompt"),
    ]


def recoveries(found: dict[str, Any]) -> list[Line]:
    named = (("death to status", "status", f"; {{late}} over {LATE_MS} ms"),
             ("  while it could run", "status_running", f"; {{late}} over {LATE_MS} ms (less stops and waits for a processor)"),
             ("death to next right pull", "again", ""))
    times = [(name, found["recoveries_ms"][kind], more) for name, kind, more in named]
    return [(name, some["count"], ("p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {max:.1f} ms" + more).format(**some))
            for name, some, more in times if some["count"]]


def wrong(found: dict[str, Any]) -> list[Line]:
    left = found["left"]
    return [
        ("wrong or stale bytes", found["wrong_or_stale"], ""),
        ("hangs", found["hangs"], ""),
        ("left at the end", left["files"], f"files, {left['nbytes']:,} bytes after gc ({left['files_before_gc']} before)"),
        ("ended by themselves", left["ended"], f"left {left['descriptors']} descriptors, {left['mappings']} mappings, "
                                               f"{left['mapped_nbytes']:,} bytes mapped, {left['caches']} caches"),
        ("peak in /dev/shm", found["peak_nbytes"] >> 20, "MiB"),
        ("faults", len(found["faults"]), ""),
    ]


def write(found: dict[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
