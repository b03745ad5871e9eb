"""The prompt's side of streaming and pushes: a prefill that marks layers while it goes on, and transfers."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cluster

import shmkv

TENSORS_A_LAYER = 2


class Computed(shmkv.LayerSynchronizer):
    """All layers are there already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Prefill:
    """One method a command. Moments are nanoseconds of CLOCK_MONOTONIC, which all processes share."""

    def __init__(self, manager: shmkv.KvCacheManager, caches: dict[int, shmkv.KvCache]) -> None:
        self._manager = manager
        self._caches = caches

    @property
    def commands(self) -> dict[str, Callable[..., Any]]:
        """For `programs.serve`."""
        return {"take_back": self.take_back, "mark": self.mark, "prefill": self.prefill, "push": self.push}

    def take_back(self, cache_id: int, layers: int = 0) -> None:
        """Only the first `layers` layers are published from now on."""
        self._manager.publish(self._caches[cache_id], layers=layers)

    def _compute(self, cache: shmkv.KvCache, layer: int) -> None:
        """Write the bytes of a layer: the same as before, so that whoever compares finds them right."""
        for tensor in cache.tensors[TENSORS_A_LAYER * layer:TENSORS_A_LAYER * (layer + 1)]:
            memory = cluster.bytes_at(tensor.data_ptr, tensor.nbytes)
            memory[:] = memory.copy()

    def mark(self, cache_id: int, layer: int, pause_ms: int, *, publish: bool = True) -> int:
        """Compute a layer for so long, while who waits falls asleep, and mark it. Answers when it was marked."""
        cache = self._caches[cache_id]
        end = time.monotonic_ns() + pause_ms * 1_000_000
        while time.monotonic_ns() < end:
            self._compute(cache, layer)
        marked = time.monotonic_ns()
        if publish:
            self._manager.publish(cache, layers=layer + 1)
        return marked

    def prefill(self, cache_id: int, layer_ms: int, *, by_layer: bool) -> int:
        """Compute all layers, one in `layer_ms`, and mark each when it is complete, or all of them at the end. Answers when the
        last one was marked."""
        cache = self._caches[cache_id]
        layers = cache.cache_desc.num_tensors // TENSORS_A_LAYER
        done = self._manager.layer_publisher(cache) if by_layer else None
        begin = marked = time.monotonic_ns()
        for layer in range(layers):
            end = begin + (layer + 1) * layer_ms * 1_000_000
            while time.monotonic_ns() < end:
                self._compute(cache, layer)
            marked = time.monotonic_ns()
            if done is not None:
                done(layer)
        if done is None:
            self._manager.publish(cache)
        return marked

    def push(self, cache_id: int, cluster_id: int, addresses: list[int], number: int) -> int:
        """Push a whole cache to addresses of another cluster, so often. Answers the nanoseconds from the calls to the ends."""
        configs = [shmkv.TransferConfig(cluster_id, addresses)]
        begin = time.perf_counter_ns()
        for _ in range(number):
            task = self._manager.transfer_cache_async(self._caches[cache_id], Computed(), configs)
            status = task.synchronize()
            if status != shmkv.LLMStatusCode.LLM_SUCCESS:
                raise RuntimeError(f"push to {cluster_id}: {status}")
        return time.perf_counter_ns() - begin
