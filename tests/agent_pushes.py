"""The commands of an agent that push: transfers whose layers are computed when the test says so."""
from __future__ import annotations

import threading
from typing import Any

import shmkv


class Gates(shmkv.LayerSynchronizer):
    """Layers are ready at once, but for the `slow` ones, which wait for their gate; those that fail or raise do so then."""

    def __init__(self, slow: list[int], fails: list[int], raises: list[int]) -> None:
        self.gates = {layer: threading.Event() for layer in slow}
        self.fails, self.raises = fails, raises
        self.asked: list[tuple[int, int | None]] = []
        self.is_asked = threading.Condition()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        with self.is_asked:
            self.asked.append((layer_index, timeout_in_millis))
            self.is_asked.notify_all()
        if layer_index in self.gates:
            self.gates[layer_index].wait()
        if layer_index in self.raises:
            raise RuntimeError(f"layer {layer_index} {{cannot}} be computed")
        return layer_index not in self.fails


class PushAgent:
    """Tasks are called by names that the test chose, as caches are."""

    dist: Any
    caches: dict[str, Any]

    def __init__(self) -> None:
        self.tasks: dict[str, tuple[Any, Gates]] = {}

    def addresses(self, name: str) -> list[int]:
        """Of the tensors of a cache, in this process."""
        return list(self.caches[name].per_device_tensor_addrs[0])

    def push(self, name: str, configs: list[list[Any]], task: str = "task", slow: list[int] | None = None,
             fails: list[int] | None = None, raises: list[int] | None = None, **blocks: Any) -> None:
        """Begin a transfer; a config is a list of TransferConfig's arguments."""
        gates = Gates(slow or [], fails or [], raises or [])
        wanted = [shmkv.TransferConfig(*config) for config in configs]
        made = self.dist.kv_cache_manager.transfer_cache_async(self.caches[name], gates, wanted, **blocks)
        self.tasks[task] = made, gates

    def computed(self, layer: int, task: str = "task") -> None:
        """Open the gate of a slow layer."""
        self.tasks[task][1].gates[layer].set()

    def wait_asked(self, layer: int, task: str = "task") -> None:
        """Return once the task has asked for a layer, so that the layers before it are done."""
        gates = self.tasks[task][1]
        with gates.is_asked:
            gates.is_asked.wait_for(lambda: any(asked == layer for asked, _ in gates.asked))

    def asked(self, task: str = "task") -> list[tuple[int, int | None]]:
        return self.tasks[task][1].asked

    def synchronize(self, timeout: int | None = None, task: str = "task") -> str:
        return str(self.tasks[task][0].synchronize(timeout).name)

    def results(self, timeout: int | None = None, task: str = "task") -> list[str | None]:
        return [None if result is None else result.name for result in self.tasks[task][0].get_results(timeout)]
