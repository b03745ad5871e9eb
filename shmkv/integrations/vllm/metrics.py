"""The counts of a connector in vLLM's classes: for its log, and for Prometheus."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from shmkv.integrations.vllm.counters import COUNTED, added, readable

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ShmkvStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: counts by the names of COUNTED."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return readable(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ShmkvMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter for each of COUNTED, ``vllm:shmkv_<name>``, with vLLM's labels."""

    def __init__(self, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_engine: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, text in COUNTED.items():
            counter = self._counter_cls(name=f"vllm:shmkv_{name}", documentation=f"{text}.", labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in COUNTED and count:
                self._by_engine[engine_idx][name].inc(count)
