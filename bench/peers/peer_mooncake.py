"""Mooncake's transfer engine over TCP: one batch read of all tensors out of another process. Needs: mooncake-transfer-engine

As a program this file is that other process.
"""
from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import prompt
import pytest
from beside import Race
from cluster import ByteArray
from workloads import MEDIUM, SMALL, Workload

FOLDERS = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
HOST = "127.0.0.1"


def engine() -> Any:
    """An engine that needs no metadata server."""
    made: Any = importlib.import_module("mooncake.engine").TransferEngine()
    if made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the transfer engine does not start")
    return made


def register(made: Any, rows: list[ByteArray]) -> None:
    for row in rows:
        if made.register_memory(row.ctypes.data, row.nbytes) != 0:
            raise RuntimeError(f"{row.nbytes} bytes cannot be registered")


class Other:
    """The process that has the bytes."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._rows: list[ByteArray] = []

    def offer(self, num_tensors: int, row_nbytes: int) -> dict[str, Any]:
        """Register the tensors; what a reader must know."""
        self._rows = [prompt.pattern(index, row_nbytes) for index in range(num_tensors)]
        self._engine = engine()
        register(self._engine, self._rows)
        return {"name": f"{HOST}:{self._engine.get_rpc_port()}", "addresses": [row.ctypes.data for row in self._rows]}


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    pytest.importorskip("mooncake.engine", exc_type=ImportError,
                        reason="mooncake-transfer-engine or the library libibverbs, which it loads, is not installed")
    path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    other = stack.enter_context(programs.Process("peers/peer_mooncake.py", env={"PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR"}))
    offered = other.call("offer", num_tensors=len(src), row_nbytes=src[0].nbytes)
    here = engine()
    register(here, dst)
    name, theirs = offered["name"], offered["addresses"]
    ours, lengths = [row.ctypes.data for row in dst], [row.nbytes for row in dst]

    def fetch() -> None:
        if here.batch_transfer_sync_read(name, ours, theirs, lengths) != 0:
            raise RuntimeError("the transfer failed")

    return fetch


@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_mooncake(workload: Workload, race: Race) -> None:
    race.run_against("Mooncake", workload, prepare)


if __name__ == "__main__":
    programs.serve({"offer": Other().offer})
