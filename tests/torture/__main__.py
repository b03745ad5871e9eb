"""`python -m torture`: one run, its report, exit 1 on a fault."""
from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import builds

from torture import ending, report
from torture.arguments import Plan, parse
from torture.board import Board
from torture.processes import TESTS
from torture.referee import Referee
from torture.seeded import VARIABLES, build_with

SECOND = "TORTURE_STARTED_AGAIN"


def use_build(folder: Path, plan: Plan) -> None:
    """Start again with the library of another build, unless it is in use already."""
    import shmkv

    if Path(str(shmkv.__file__)).is_relative_to(folder):
        return
    assert SECOND not in os.environ, f"{shmkv.__file__} is in use instead of {folder}"
    environment = {**os.environ, **VARIABLES.get(plan.seeded, {}), **builds.environment("plain", folder), SECOND: "1"}
    os.chdir(TESTS)                     # `python -m` looks into the current folder first, and the ordinary build may stand there
    log = ["--json", plan.log] if plan.log else []
    os.execve(sys.executable, [sys.executable, "-m", "torture", *sys.argv[1:], *log], environment)


def run(plan: Plan) -> int:
    with tempfile.TemporaryDirectory(prefix="torture-") as workdir:
        board = Board.make(plan)
        referee = Referee(plan, board, Path(workdir))
        try:
            seen = referee.run()
            left = ending.end(referee)
        except BaseException:
            ending.give_up(referee)
            raise
        found = report.summary(plan, board, seen, left)
        report.show(found)
        if plan.log:
            report.write(found, plan.log)
    return 1 if found["faults"] else 0


def end_in_order(number: int, _: object) -> None:
    """Of SIGTERM: as for SIGINT, nothing is left behind."""
    sys.exit(128 + number)


def main() -> None:
    plan = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, end_in_order)
    if plan.seeded:
        use_build(build_with(plan.seeded), plan)
    sys.exit(run(plan))


if __name__ == "__main__":
    main()
