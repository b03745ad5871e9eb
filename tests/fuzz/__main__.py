"""python -m fuzz [--inputs N] [--jobs J] [--seed S] [--only N] [--flips] [--live SECONDS] [--json FILE]: print counts, exit 1 on
any fault."""
from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from . import run


def report(seed: int, counts: dict[str, Any]) -> str:
    """The counts as a person reads them."""
    inputs = counts["inputs"]
    answers = ", ".join(f"{status}: {times}" for status, times in sorted(counts["answers"].items(), key=lambda one: -one[1]))
    return "\n".join([
        f"seed {seed}: {inputs} inputs in {counts['seconds']:.1f} s, {inputs / counts['seconds']:.0f} inputs/s "
        f"({inputs / counts['cpu_seconds']:.0f} a second of processor time)",
        f"pass magic, version, fingerprint and lengths: {counts['good_headers']} ({100 * counts['good_headers'] / inputs:.1f} %)",
        f"reach a copy: {counts['copies']} ({100 * counts['copies'] / inputs:.1f} %)",
        f"of the owner's paths: {counts['owner_inputs']}; calls refused with an exception: {counts['refusals']}",
        f"segments mapped at the end of an episode: {counts['mapped']}, between pages that fault: {counts['guarded']}",
        f"words changed right after a load, or by the other process: {counts['flips']}",
        f"pushes done: {counts['pushes']}; turns of waits that ended with nothing there: {counts['waits']}",
        f"answers of {counts['pulls']} pulls, pushes and turns of waits: {answers}",
        "ended well: no signal, no sanitizer's report, no hang, no byte of a destination outside of what was asked for",
    ])


def outcome_of(wanted: argparse.Namespace) -> run.Outcome:
    """Run what was asked for."""
    if wanted.live:
        return run.live(wanted.seed, wanted.live)
    if wanted.only is not None:
        return run.run(wanted.seed, wanted.only, wanted.only + 1, flipping=wanted.flips)
    return run.run_shared(wanted.seed, wanted.inputs, wanted.jobs, flipping=wanted.flips)


def end_in_order(number: int, _: object) -> None:
    """Of SIGINT and SIGTERM: workers end, too, and nothing is left behind. While threads watch them, no exception: an interrupted
    join would take its thread for ended, and what that one has to remove would stay."""
    if not run.stop_all():
        sys.exit(128 + number)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_in_order)
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that share the inputs")
    options.add_argument("--only", type=int, help="make this input again, from the beginning of its episode")
    options.add_argument("--flips", action="store_true", help="change each word of shared memory now and then after it was loaded")
    options.add_argument("--live", type=float, default=0.0, help="instead of inputs: calls while another process rewrites tables")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the counts there, too")
    wanted = options.parse_args()
    outcome = outcome_of(wanted)
    if outcome.counts is not None:
        print(report(wanted.seed, outcome.counts))
        if wanted.json:
            wanted.json.write_text(json.dumps(outcome.counts) + "\n")
    if outcome.fault:
        print(outcome.fault, file=sys.stderr)
    return 1 if outcome.fault else 0


if __name__ == "__main__":
    sys.exit(main())
