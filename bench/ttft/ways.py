"""The ways that a prompt's cache gets from the engine that computed it to the one that goes on, and what each of them needs."""
from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import lmcache_server

POOL_BYTES = 2 << 30                    # whatever is kept between the engines: no prompt of a run is evicted
BLOCK_TOKENS = 128                      # vLLM's default on CPUs


class Way:
    """Two engines that have nothing to do with each other; the others derive from this."""

    title = "two, each computes"
    packages: tuple[str, ...] = ()      # distributions beside vLLM
    roles: tuple[str, ...] = ("kv_producer", "kv_consumer")
    loads = True                        # whether the last engine has to find the prompt's blocks
    polls = False                       # whether its engines are busy when nobody asks them
    hands_over = False                  # whether the connector wants a word of the proxy with each request

    def missing(self) -> str | None:
        """Why this way cannot be measured here."""
        for package in self.packages:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return f"{package} is not installed"
        return None

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Start what the engines find when they start; the stack ends it."""

    def connector(self, role: str) -> dict[str, Any] | None:
        """What vLLM's KVTransferConfig is made of. A load that fails is an error of the request everywhere, and never computed."""
        return None

    def environment(self) -> dict[str, str]:
        """Of the next engine that starts."""
        return {}


class Recompute(Way):
    loads = False


class One(Way):
    title = "one engine"
    roles = ("kv_both",)
    loads = False


class Shmkv(Way):
    title = "two, ShmkvConnector"

    def connector(self, role: str) -> dict[str, Any]:
        return {"kv_role": role, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"capacity_bytes": POOL_BYTES}}


class LMCache(Way):
    """LMCache's server with its pool in shared memory, and the connector of vLLM for it."""

    title = "two, LMCacheMPConnector"
    packages = ("lmcache",)
    _port = 0

    def begin(self, stack: contextlib.ExitStack) -> None:
        self._port, _ = lmcache_server.start(BLOCK_TOKENS, POOL_BYTES / 2**30, stack)

    def connector(self, role: str) -> dict[str, Any]:
        place = {"host": f"tcp://{lmcache_server.HOST}", "port": self._port, "mp_transfer_mode": "engine_driven"}
        return {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": "lmcache_connector", "kv_role": role,
                "kv_connector_extra_config": {f"lmcache.mp.{name}": value for name, value in place.items()}}

    def environment(self) -> dict[str, str]:
        return lmcache_server.QUIET


class Nixl(Way):
    """NIXL with UCX, which reads out of the first engine's own memory."""

    title = "two, NixlConnector"
    packages = ("nixl", "nixl-cu12")
    polls = True
    hands_over = True

    def connector(self, role: str) -> dict[str, Any]:
        return {"kv_connector": "NixlConnector", "kv_connector_module_path": None, "kv_role": role, "kv_buffer_device": "cpu"}

    def environment(self) -> dict[str, str]:
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": lmcache_server.HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(lmcache_server.free_port())}


class Example(Way):
    """vLLM's own connector by files in a folder, here in /dev/shm."""

    title = "two, ExampleConnector"
    _folder = Path(f"/dev/shm/ttft-example-{os.getpid()}")

    def begin(self, stack: contextlib.ExitStack) -> None:
        self._folder.mkdir()
        stack.callback(shutil.rmtree, self._folder)

    def connector(self, role: str) -> dict[str, Any]:
        return {"kv_connector": "ExampleConnector", "kv_connector_module_path": None, "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": str(self._folder)}}


WAYS: dict[str, Way] = {"one": One(), "recompute": Recompute(), "shmkv": Shmkv(), "lmcache": LMCache(), "nixl": Nixl(),
                        "example": Example()}
