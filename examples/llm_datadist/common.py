"""What the programs of this folder share: arguments, memory behind addresses, what a model would have computed, a place to meet.

Nothing here or in them names shmkv: they are written for llm_datadist and run by `shmkv run`.
"""
from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import numpy.typing as npt
from llm_datadist import CacheDesc, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

PROMPT_CLUSTER, DECODER_CLUSTER = 1, 2
DEADLINE_S = 20.0
POOL = '{"memory_size": 16777216}'       # bytes; cache-manager mode allocates out of a pool
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Arguments:
    """How a program was called."""

    role: str
    meet: str
    seed: int


def run(document: str | None, prompt: Callable[[Arguments], None], decoder: Callable[[Arguments], None]) -> None:
    """Be one of the two processes, as the first argument says."""
    parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    parser.add_argument("role", choices=["prompt", "decoder"])
    parser.add_argument("--meet", default="example", help="a name that both processes are given, to find each other")
    parser.add_argument("--seed", type=int, default=1, help="of the bytes that the prompt makes and the decoder expects")
    given = Arguments(**vars(parser.parse_args()))
    (prompt if given.role == "prompt" else decoder)(given)


# -- llm_datadist ------------------------------------------------------------------------------------------------------

def start(role: LLMRole, cluster_id: int, **options: Any) -> LLMDataDist:
    """An initialised cluster of this process; `options` are attributes of LLMConfig."""
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = 10_000         # ms
    for name, value in options.items():
        setattr(config, name, value)
    dist = LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist


def peer(cluster_id: int) -> LLMClusterInfo:
    """The other cluster, as link and unlink want it. On one host the addresses are not used."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 26000)
    info.append_remote_ip_info("127.0.0.1", 26000)
    return info


def link(dist: LLMDataDist, cluster_id: int) -> None:
    """Link to the other cluster, or end."""
    status, _ = dist.link_clusters([peer(cluster_id)], timeout=10_000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"no link to cluster {cluster_id}: {status}")


def unlink(dist: LLMDataDist, cluster_id: int) -> None:
    """And the end of it."""
    status, _ = dist.unlink_clusters([peer(cluster_id)], timeout=10_000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"cluster {cluster_id} could not be unlinked: {status}")


# -- bytes -------------------------------------------------------------------------------------------------------------

def memory(desc: CacheDesc, addresses: Sequence[int]) -> list[Bytes]:
    """The memory of a cache's tensors, [rows, bytes of a row] each, by the addresses that the API gives."""
    return [np.ctypeslib.as_array((ctypes.c_uint8 * desc.size).from_address(address)).reshape(desc.batch_size, -1)
            for address in addresses]


def drawn(seed: int, *what: int, nbytes: int) -> Bytes:
    """What a model would have computed: always the same bytes for the same seed and numbers."""
    return np.random.default_rng([seed, *what]).integers(0, 256, nbytes, np.uint8)


def expect(what: str, found: Sequence[Bytes], expected: Sequence[Bytes]) -> None:
    """Compare every byte; the program ends with 1 at the first difference."""
    for number, (there, wanted) in enumerate(zip(found, expected, strict=True)):
        if not np.array_equal(there, wanted):
            place = np.flatnonzero(there.ravel() != wanted.ravel())[0]
            raise SystemExit(f"WRONG: {what}: tensor {number} differs from byte {place} on")
    print(f"ok: {what}: {sum(there.size for there in found)} bytes are right", flush=True)


def check(what: str, holds: bool) -> None:
    """Say what was seen; the program ends with 1 at the first thing that is not so."""
    if not holds:
        raise SystemExit(f"WRONG: {what}")
    print(f"ok: {what}", flush=True)


# -- meeting -----------------------------------------------------------------------------------------------------------

class Meeting:
    """Where the two processes wait for each other, as programs over several hosts do by MPI or torch.distributed."""

    def __init__(self, given: Arguments) -> None:
        address = f"\0llm_datadist-{os.getuid()}-{given.meet}"
        self._connection = _accept(address) if given.role == "prompt" else _connect(address)

    def tell(self, value: Any = None) -> Any:
        """Give the other process a value and get its own; whoever comes first waits."""
        try:
            self._connection.send(value)
            if self._connection.poll(DEADLINE_S):
                return self._connection.recv()
        except (EOFError, OSError) as error:
            raise SystemExit("the other process has ended") from error
        raise SystemExit("the other process says nothing")


def _accept(address: str) -> Connection:
    with Listener(address, "AF_UNIX") as listener:
        # Listener has no deadline of its own.
        listener._listener._socket.settimeout(DEADLINE_S)       # type: ignore[attr-defined]
        try:
            return listener.accept()
        except TimeoutError as error:
            raise SystemExit(f"no decoder process came within {DEADLINE_S:.0f} s: start it in another terminal") from error


def _connect(address: str) -> Connection:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return Client(address, "AF_UNIX")
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"no prompt process came within {DEADLINE_S:.0f} s: start it in another terminal") from error
            time.sleep(0.01)            # nobody there yet
