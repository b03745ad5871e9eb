"""One life of a worker, and the process that forks such lives.

A worker starts in one of two ways: as an interpreter of its own (`python -m torture.zygote NUMBER`), or as a child of an
interpreter that was started apart, has imported everything and has never joined a namespace (`python -m torture.zygote`). The
second costs a fraction of the first, which is what makes thousands of kills possible; to the library they are the same: a process
that calls init.
"""
from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from pathlib import Path

from torture.arguments import Plan
from torture.board import Board
from torture.decoder import Decoder
from torture.prompt import Prompt

PR_SET_PDEATHSIG = 1
PLAN, BOARD, FAULTS = "TORTURE_PLAN", "TORTURE_BOARD", "TORTURE_FAULTS"


def die_with_parent() -> None:
    """Nobody is left over when the referee goes, whatever it dies of."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def live(plan: Plan, board: Board, number: int) -> None:
    """Until it is killed or told to end."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    kind = Prompt if number < plan.prompts else Decoder
    kind(plan, board, number, Path(os.environ[FAULTS])).run()


def serve(plan: Plan, board: Board) -> None:
    """Lines in: "fork NUMBER" answers the pid, "reap PID" the status of a child that has ended."""
    die_with_parent()
    gc.freeze()
    for line in sys.stdin:
        command, argument = line.split()
        print(fork(plan, board, int(argument)) if command == "fork" else os.waitpid(int(argument), 0)[1], flush=True)


def fork(plan: Plan, board: Board, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        os.close(devnull)
        live(plan, board, number)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(status)


def main() -> None:
    plan = Plan.from_json(os.environ[PLAN])
    board = Board(int(os.environ[BOARD]), plan)
    if len(sys.argv) > 1:
        live(plan, board, int(sys.argv[1]))
    else:
        serve(plan, board)


if __name__ == "__main__":
    main()
