"""LMDB: a value for each tensor in a memory-mapped database in /dev/shm, copied out of the reader's map. Needs: lmdb"""
from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from beside import Race
from cluster import ByteArray
from workloads import MEDIUM, SMALL, Workload


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    lmdb: Any = pytest.importorskip("lmdb", reason="lmdb is not installed: pip install lmdb")
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lmdb-"))
    database = lmdb.open(folder, map_size=4 * sum(row.nbytes for row in src) + (1 << 24), sync=False, lock=True)
    stack.callback(database.close)
    keys = [b"%d" % number for number in range(len(src))]
    with database.begin(write=True) as writing:
        for key, row in zip(keys, src, strict=True):
            writing.put(key, row.tobytes())

    def fetch() -> None:
        with database.begin(buffers=True) as reading:
            for key, row in zip(keys, dst, strict=True):
                row[:] = np.frombuffer(reading.get(key), np.uint8)

    return fetch


@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_lmdb(workload: Workload, race: Race) -> None:
    race.run_against("lmdb", workload, prepare)
