"""The worker's side: loads and stores of one step after the other, around the forward of the engine."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv.integrations.vllm.identity import CacheIdentity
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.loader import Loader, LoadJob
from shmkv.integrations.vllm.plans import Load, StepPlan
from shmkv.integrations.vllm.publisher import Publisher, spoilt_stores
from shmkv.integrations.vllm.sharing import Shared
from shmkv.integrations.vllm.taint import Taint


class WorkerSide:
    """Calls come from the engine's thread, in the order of a step: `start_loads`, then for each layer `wait_for_layer` and
    `save_layer`, then `end_step`; where nothing is loaded within the forward, `start_loads` may come after the layers."""

    def __init__(self, shared: Shared, groups: Sequence[Layers], identity: CacheIdentity, shard: int, *, consumes: bool,
                 produces: bool) -> None:
        endpoint, counters = shared.endpoint, shared.counters
        self._places = {name: (group, layer) for group, layers in enumerate(groups) for layer, name in enumerate(layers.names)}
        self._turns = {name: turn for turn, name in enumerate(self._places)}
        self._fails_by_block = identity.fails_by_block
        self._taint = Taint()
        self._step: StepPlan | None = None
        self._forgot: StepPlan | None = None
        self._job: LoadJob | None = None
        self._beside: list[LoadJob] = []
        self._outdated: list[LoadJob] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._publisher = Publisher(endpoint, groups, shard, counters) if produces else None
        self._within_step = self._beside_steps = None
        if consumes:
            into = [endpoint.manager.register_cache(layers.desc(layers.num_blocks), layers.arrays) for layers in groups]
            self._within_step, self._beside_steps = (Loader(endpoint, groups, into, shard, shared.peers.find, counters)
                                                     for _ in range(2))
        if self._publisher is not None:
            self._publisher.show_card(identity.card())

    # -- loads --------------------------------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Start what this step wants from others."""
        self._forget(plan)
        if self._within_step is None or self._beside_steps is None:
            return
        within = [load for load in plan.loads if not load.is_async]
        if within:
            self._job = self._within_step.begin(within)
        self._beside += [self._beside_steps.begin([load]) for load in plan.loads if load.is_async]

    def wait_for_layer(self, name: str) -> None:
        """Until a layer of what this step wants is there, or known not to come."""
        if self._job is not None and name in self._turns:
            self._job.wait(self._turns[name])

    # -- stores -------------------------------------------------------------------------------------------------------

    def save_layer(self, plan: StepPlan, name: str) -> None:
        """The forward has written a layer."""
        if self._publisher is None or name not in self._places:
            return
        self._begin(plan, self._publisher)
        self._publisher.save(*self._places[name])

    def _begin(self, plan: StepPlan, publisher: Publisher) -> None:
        """Before the first layer of a step, which may come before `start_loads`."""
        if self._step is plan:
            return
        self._step = plan
        self._forget(plan)
        publisher.begin(plan.stores)

    def _forget(self, plan: StepPlan) -> None:
        """Once a step that says so, before its loads and its stores, whichever are first. What earlier steps are loading was
        published before as well."""
        if not plan.forget or self._forgot is plan:
            return
        self._forgot = plan
        self._outdated = list(self._beside)
        if self._publisher is not None:
            self._publisher.forget()

    def end_step(self, plan: StepPlan) -> None:
        """After the last layer: nothing of this step is under way any more but loads beside it."""
        if self._job is not None:
            self._job.wait()
            self._settle(self._job)
            self._job = None
        self._settle_beside()
        if self._publisher is not None:
            self._begin(plan, self._publisher)
            self._publisher.end(spoilt_stores(self._taint, plan.stores))
        self._step = self._forgot = None

    def _settle_beside(self) -> None:
        for job in [job for job in self._beside if job.is_over]:
            self._beside.remove(job)
            self._settle(job)
            if job in self._outdated:
                self._outdated.remove(job)
            self._finished.update(load.request_id for load in job.loads)

    def _settle(self, job: LoadJob) -> None:
        for load in job.loads:
            block_ids = _block_ids(load)
            if load in job.failed or job in self._outdated:
                self._taint.failed(block_ids)
                if self._fails_by_block:
                    self._failed_blocks.update(block_ids)
                else:
                    self._failed_requests.add(load.request_id)
            else:
                self._taint.loaded(block_ids)

    # -- what the engine asks ---------------------------------------------------------------------------------------------

    def take_finished(self) -> set[str]:
        """Requests whose load beside the batch has ended since the last call, well or not."""
        self._settle_beside()
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Blocks that have to be computed, of loads that ended since the last call, where that says enough."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Where it does not: requests that have to be computed from the beginning."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def close(self) -> None:
        """Let loads end, so that nothing is written into the engine's memory any more."""
        for loader in (self._within_step, self._beside_steps):
            if loader is not None:
                loader.close()


def _block_ids(load: Load) -> list[int]:
    return [place.block_id for place in load.blocks]
