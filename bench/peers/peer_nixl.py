"""NIXL with UCX: one READ of all tensors out of another process's registered memory. Needs: nixl

As a program this file is that other process.
"""
from __future__ import annotations

import base64
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


def agent(name: str) -> Any:
    """The agent of this process."""
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def described(rows: list[ByteArray]) -> list[tuple[int, int, int]]:
    """Address, length, device of each row."""
    return [(row.ctypes.data, row.nbytes, 0) for row in rows]


class Other:
    """The process that has the bytes."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._rows: list[ByteArray] = []

    def offer(self, num_tensors: int, row_nbytes: int) -> dict[str, Any]:
        """Register the tensors; what a reader must know."""
        self._rows = [prompt.pattern(index, row_nbytes) for index in range(num_tensors)]
        self._agent = agent("source")
        self._agent.register_memory([(*row, "") for row in described(self._rows)], "DRAM")
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(), "rows": described(self._rows)}


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    pytest.importorskip("nixl._api", reason="nixl is not installed: pip install nixl", exc_type=ImportError)
    path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    other = stack.enter_context(programs.Process("peers/peer_nixl.py", env={"PYTHONPATH": path}))
    offered = other.call("offer", num_tensors=len(src), row_nbytes=src[0].nbytes)
    here = agent("reader")
    here.register_memory([(*row, "") for row in described(dst)], "DRAM")
    there = here.add_remote_agent(base64.b64decode(offered["metadata"]))
    ours = here.get_xfer_descs(described(dst), "DRAM")
    theirs = here.get_xfer_descs([tuple(row) for row in offered["rows"]], "DRAM")
    handle = here.initialize_xfer("READ", ours, theirs, there)
    stack.callback(here.release_xfer_handle, handle)

    def fetch() -> None:
        state = here.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("the transfer failed")
            state = here.check_xfer_state(handle)

    return fetch


@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_nixl(workload: Workload, race: Race) -> None:
    race.run_against("NIXL", workload, prepare)


if __name__ == "__main__":
    programs.serve({"offer": Other().offer})
