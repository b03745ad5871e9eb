"""ShmkvConnector: vLLM's KV connector, with nothing in it but the way from vLLM's calls to the two sides.

vLLM makes one object in the scheduler's process and one in each worker's; where both are the same process they share a cluster.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from shmkv.errors import LLMException, LLMStatusCode
from shmkv.integrations.vllm.block_keys import key_words
from shmkv.integrations.vllm.contract import untested
from shmkv.integrations.vllm.from_vllm import check_supported, groups_of, identity_of, prompt_of, reads_prefixes, scheduled_of
from shmkv.integrations.vllm.metrics import ShmkvMetrics, ShmkvStats
from shmkv.integrations.vllm.plans import StepPlan
from shmkv.integrations.vllm.publisher import most_blocks
from shmkv.integrations.vllm.scheduler import SchedulerSide
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import Shared, open_shared
from shmkv.integrations.vllm.vllm_log import speak_in_vllms_log
from shmkv.integrations.vllm.weights import Adapters
from shmkv.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("shmkv")


@dataclass
class ShmkvMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan, on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


class ShmkvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Blocks of the prefix cache, shared between the engines of one host through POSIX shared memory.

    Settings in ``kv_connector_extra_config``: see `ConnectorSettings`. What happens to requests whose blocks cannot be loaded after
    all is vLLM's ``kv_load_failure_policy``.

    Raises:
        LLMParamError: a setting, or an engine whose blocks cannot be moved.
        LLMException: the namespace cannot be joined.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speak_in_vllms_log()
        transfer = self._kv_transfer_config
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._identity = identity_of(vllm_config, kv_cache_config)
        self._shared: Shared | None = open_shared(self._settings, self._identity, consumes=self._consumes, produces=self._produces)
        self._counters, self._peers = self._shared.counters, self._shared.peers
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._adapters = Adapters()
        if role == KVConnectorRole.SCHEDULER:
            if sentence := untested(self._identity.engine):
                log.warning("%s", sentence)
            groups = self._identity.groups
            most = most_blocks(self._settings.capacity_bytes, groups) if self._produces else 0
            # Of a load within the batch that fails vLLM can be told by block ids alone.
            self._scheduler = SchedulerSide(self._identity.seed(), self._identity.block_size, [group.window for group in groups],
                                            self._is_found if self._consumes else None, most_blocks=most,
                                            is_async=self._settings.async_load or not self._identity.fails_by_block,
                                            counters=self._counters)
            if self._consumes and transfer.kv_load_failure_policy != "recompute":
                log.warning("kv_load_failure_policy is %r: a request whose blocks go while they are loaded is ended with an error; "
                            "with 'recompute' it is computed", transfer.kv_load_failure_policy)

    def _is_found(self, block_hash: bytes, group: int) -> bool:
        return all(self._peers.find(key_words(block_hash, shard, group)) is not None for shard in range(self._identity.num_shards))

    # -- both sides -----------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not published is one that others compute."""
        return False

    def get_kv_connector_stats(self) -> ShmkvStats | None:
        """What was counted since the last call."""
        counts = self._counters.take()
        return ShmkvStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ShmkvStats:
        """Counts that came from another process."""
        return ShmkvStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> ShmkvMetrics:
        """The same counts for Prometheus."""
        return ShmkvMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for and saved one by one."""
        return True

    def shutdown(self) -> None:
        """End loads and leave the namespace; what this engine has published goes. Twice is no error."""
        shared, self._shared = self._shared, None
        if self._worker is not None:
            self._worker.close()
        if shared is not None:
            shared.close()

    # -- the scheduler's side -------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        side = self._for_scheduler
        prompt = None if request.request_id in side else prompt_of(request, self._adapters)
        return side.match(request.request_id, prompt, request.num_tokens, num_computed_tokens, reads=reads_prefixes(request))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._for_scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return ShmkvMetadata(self._for_scheduler.plan(scheduled_of(scheduler_output)))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are copied within the forward, so vLLM may have them back at once."""
        self._for_scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool | None:
        """Remove what this engine has published, before its next step loads anything; until then nothing is found for a prompt,
        and what is being loaded has failed. Other engines have to be told themselves."""
        self._for_scheduler.forget()
        return True

    @property
    def _for_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise LLMException("a call of the scheduler's side in the worker's", status_code=LLMStatusCode.LLM_FAILED)
        return self._scheduler

    # -- the worker's side ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._shared is None:
            raise LLMException("register_kv_caches after shutdown")
        groups = groups_of(kv_caches, self._kv_cache_config)
        self._worker = WorkerSide(self._shared, groups, self._identity, self._shard(), consumes=self._consumes,
                                  produces=self._produces)

    def _shard(self) -> int:
        parallel = self._vllm_config.parallel_config
        return int(parallel.rank % parallel.tensor_parallel_size)

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        return metadata.plan if isinstance(metadata, ShmkvMetadata) else StepPlan()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.save_layer(self._plan, layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step(self._plan)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to do: blocks are copied out within the forward that fills them, and a request that waits for a load beside the
        batch keeps its blocks until it is told of the end of the load."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished = set() if self._worker is None else self._worker.take_finished()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()
