"""LMCache's server with its pool in shared memory: the whole cache is one chunk, looked up, mapped, copied out and released.

Needs: lmcache, written for 0.5.6, and torch. Without CUDA: pip install --no-deps lmcache==0.5.6, then what `pip check` misses, but
for awscrt, cuda-python, cufile-python, cupy-cuda13x, google-api-core and google-cloud-bigtable, which are not used here.

What a fetch asks of the server is what LMCache's adapters of serving engines ask for a request. Those then scatter the chunk over
the engine's pages with a loop of LMCache's, which takes longer than this copy of rows.
"""
from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lmcache_server
import numpy as np
import pytest
from beside import Race
from cluster import ByteArray
from workloads import HEAD_SIZE, HEADS, MEDIUM, SMALL, TOKEN_NBYTES, Workload

MODEL, INSTANCE = "bench", 1
MODULES = [*(f"lmcache.v1.multiprocess.{name}" for name in ("transport.factory", "transfer_context", "custom_types")), "torch"]
START_S, ANSWER_S = 60.0, 10.0
GIB = 0.25


class Client:
    """A worker of a serving engine, as far as LMCache knows."""

    def __init__(self, layers: int, tokens: int, stack: contextlib.ExitStack) -> None:
        # The reason of a skip is what could not be imported.
        factory, contexts, types, torch = (pytest.importorskip(name, exc_type=ImportError) for name in MODULES)
        self._key, self._tokens = types.IPCCacheServerKey, tuple(range(tokens))
        port, server = lmcache_server.start(tokens, GIB, stack)
        self._requests = factory.RequestClientFactory.create(f"tcp://{lmcache_server.HOST}:{port}")
        stack.callback(self._requests.close)
        self._wait_for(server)
        # Only the shape of these is looked at.
        pages = {f"layer {number}": torch.empty(2, 1, tokens, HEADS, HEAD_SIZE, dtype=torch.float16) for number in range(layers)}
        worker = contexts.create_transfer_context(pages, instance_id=INSTANCE, req_client=self._requests, mode="engine_driven")
        worker.register(pages, MODEL, 1, 1, ANSWER_S, layout_hints={"kv_layout": "NHD"})
        stack.callback(worker.close)
        self._transfers = worker.engine_driven_context

    def _wait_for(self, server: subprocess.Popen[bytes]) -> None:
        answer, deadline = self._requests.get_chunk_size(), time.monotonic() + START_S
        while not answer.wait(0.1):
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError("LMCache's server does not start")

    def _named(self, request: str, worker: int | None) -> Any:
        return self._key(MODEL, 1, worker, self._tokens, 0, len(self._tokens), request, num_kv_readers=1)

    def store(self, request: str, rows: list[ByteArray]) -> None:
        """Keys of all layers come first in a chunk, then their values; for the bytes it is all one."""
        key = self._named(request, 0)
        (chunk,), _ = self._transfers.prepare_store(key, INSTANCE)
        for there, row in zip(as_rows(chunk, len(rows)), rows, strict=True):
            there[:] = row
        if not self._transfers.commit_store(key, INSTANCE, []):
            raise RuntimeError("LMCache did not store the cache")
        self._requests.end_session(request).result(ANSWER_S)

    def fetch(self, request: str, rows: list[ByteArray]) -> None:
        self._requests.lookup(self._named(request, None), 1).result(ANSWER_S)
        if self._requests.wait_prefetch_status(request, ANSWER_S).result(ANSWER_S) != 1:
            raise RuntimeError("LMCache does not have the cache")
        key = self._named(request, 0)
        (chunk,) = self._transfers.prepare_retrieve(key, INSTANCE)
        for row, there in zip(rows, as_rows(chunk, len(rows)), strict=True):
            row[:] = there
        self._transfers.commit_retrieve(key, INSTANCE)
        self._requests.end_session(request)     # nobody waits for its answer


def as_rows(chunk: Any, count: int) -> ByteArray:
    """The bytes of a tensor in the pool, in so many rows."""
    rows: ByteArray = chunk.numpy().reshape(count, -1).view(np.uint8)
    return rows


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for name, value in lmcache_server.QUIET.items():
        patch.setenv(name, value)
    client = Client(len(src) // 2, src[0].nbytes // TOKEN_NBYTES, stack)
    client.store("store", src)
    requests = itertools.count()
    return lambda: client.fetch(f"fetch {next(requests)}", dst)


@pytest.mark.filterwarnings("ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning")
@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_lmcache(workload: Workload, race: Race) -> None:
    race.run_against("LMCache", workload, prepare)
