"""Ray: one array for the whole cache in the object store, got as a view and copied out. Needs: ray"""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from beside import Race
from cluster import ByteArray
from workloads import MEDIUM, SMALL, Workload


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    ray: Any = pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    stack.callback(ray.shutdown)
    reference = ray.put(np.stack(src))

    def fetch() -> None:
        for row, there in zip(dst, ray.get(reference), strict=True):
            row[:] = there

    return fetch


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_ray(workload: Workload, race: Race) -> None:
    race.run_against("ray", workload, prepare)
