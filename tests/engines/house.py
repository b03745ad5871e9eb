"""A namespace of engines, and what is to be seen of it from outside."""
from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from engine import Engine

from shmkv.cli.ls import Report, look

SHM = Path("/dev/shm")
HEADER = 4096                                   # of a segment, before its blocks
# A machine that is busy with something else must not make loads fail.
TIMEOUT_MS = 20_000
POLL_S = 0.05


class House:
    """A namespace, the engines in it, and a folder for their models and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = f"engines-{secrets.token_hex(4)}"
        self.engines: list[Engine] = []

    def start(self, name: str, model: Path, role: str | None, *, policy: str = "recompute", extra: dict[str, object] | None = None,
              **options: object) -> Engine:
        """Begin to start an engine; role None: without a connector."""
        connector = None if role is None else {"kv_role": role, "kv_load_failure_policy": policy,
                                               "kv_connector_extra_config": {"timeout_ms": TIMEOUT_MS, **(extra or {})}}
        engine = Engine(self.folder, name, model, self.namespace, connector, **options)
        self.engines.append(engine)
        return engine

    def report(self) -> Report:
        """What `shmkv ls` sees."""
        return look(self.namespace)

    def leases(self) -> int:
        """Of all links of all clusters."""
        return sum(link[side]["leases"] for cluster in self.report().clusters for link in cluster.links
                   for side in ("initiator", "acceptor"))

    def scribble(self, cluster_id: int) -> None:
        """Numbers between about -4 and 4, as bfloat16, over all blocks that a cluster has published. Its card stays."""
        incarnation = next(each.incarnation for each in self.report().clusters if each.cluster_id == cluster_id)
        noise = np.random.default_rng(0)
        for path in SHM.glob(f"{self.namespace}.c.{incarnation}.*"):
            if path.stat().st_size > 2 * HEADER:
                blocks = np.memmap(path, np.uint16, "r+", HEADER)
                blocks[:] = noise.normal(0, 1, blocks.shape).astype(np.float32).view(np.uint32) >> 16

    def wait_until(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        """Fails when it is not so in time."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"not so after {seconds} s"
            time.sleep(POLL_S)
