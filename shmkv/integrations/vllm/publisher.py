"""Publishes blocks: copies each layer into shared memory when it has been computed, and lets readers in when a step ended well.

The blocks of a step go into caches of a few rows each, so that old ones can go without the new. A cache that is complete is
deallocated: from then on its keys keep it, within the capacity of the prefix cache.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmkv._layout import SEGMENT_DATA
from shmkv.cache_desc import TENSOR_ALIGNMENT
from shmkv.errors import LLMException, LLMParamError
from shmkv.integrations.vllm.block_keys import CARD_WORDS, cache_key, key_words
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.endpoint import Endpoint
from shmkv.integrations.vllm.identity import GroupLayout
from shmkv.integrations.vllm.layers import Bytes, Layers
from shmkv.integrations.vllm.plans import BlockPlace, Store
from shmkv.integrations.vllm.taint import Taint
from shmkv.kv_cache import KvCache
from shmkv.types import CacheDesc, DataType

ROWS_OF_A_CACHE = 8
LOG_EVERY_S = 10.0

log = logging.getLogger("shmkv")


@dataclass
class _Batch:
    """Rows that are being filled, all of one request and one group. `tensors`: the cache's memory, one array a layer."""

    store: Store
    group: int
    cache: KvCache
    block_ids: npt.NDArray[np.intp]
    tensors: list[Bytes]
    layers: int = 0


class Publisher:
    """`groups`: the layers of each KV cache group; `shard`: the tensor-parallel rank of this process."""

    def __init__(self, endpoint: Endpoint, groups: Sequence[Layers], shard: int, counters: Counters) -> None:
        self._endpoint = endpoint
        self._groups = groups
        self._shard = shard
        self._counters = counters
        self._batches: list[_Batch] = []
        self._card: KvCache | None = None
        self._logged = -LOG_EVERY_S

    # -- the card -----------------------------------------------------------------------------------------------------

    def show_card(self, card: bytes) -> None:
        """Say what this engine's blocks are, before the first of them."""
        self._card = self._endpoint.manager.allocate_cache(CacheDesc(1, [1, len(card)], DataType.DT_UINT8))
        self._card.tensors[0].numpy()[0] = np.frombuffer(card, np.uint8)
        self._endpoint.manager.bind(self._card, {0: cache_key(self._endpoint.cluster_id, CARD_WORDS)})

    def forget(self) -> None:
        """Remove all blocks that were published so far."""
        manager = self._endpoint.manager
        manager.expire(0)
        if self._card is not None:
            manager.bind(self._card, {0: cache_key(self._endpoint.cluster_id, CARD_WORDS)})

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin(self, stores: Sequence[Store]) -> None:
        """Make room for the blocks that this cluster does not have yet. Those that find none are left out."""
        taken: set[tuple[int, int]] = set()
        for store in stores:
            wanted: list[list[BlockPlace]] = [[] for _ in self._groups]
            for place in store.blocks:
                words = self._words(place)
                if words not in taken and not self._endpoint.contains(self._endpoint.cluster_id, words):
                    taken.add(words)
                    wanted[place.group].append(place)
            # The groups in turn: of what finds no room, or goes first, they lose the same blocks.
            for begin in range(0, max(map(len, wanted)), ROWS_OF_A_CACHE):
                for group, places in enumerate(wanted):
                    if rows := places[begin:begin + ROWS_OF_A_CACHE]:
                        self._allocate(store, group, rows)

    def _words(self, place: BlockPlace) -> tuple[int, int]:
        return key_words(place.block_hash, self._shard, place.group)

    def _allocate(self, store: Store, group: int, places: list[BlockPlace]) -> None:
        keys = [cache_key(self._endpoint.cluster_id, self._words(place)) for place in places]
        try:
            cache = self._endpoint.manager.allocate_cache(self._groups[group].desc(len(places)), keys, publish=False,
                                                          key_ttl_ms=self._endpoint.settings.key_ttl_ms)
        except (LLMParamError, LLMException) as error:
            self._leave_out(len(places), error)
            return
        block_ids = np.array([place.block_id for place in places], np.intp)
        self._batches.append(_Batch(store, group, cache, block_ids, [each.numpy() for each in cache.tensors]))

    def _leave_out(self, blocks: int, error: LLMException) -> None:
        self._counters.add(dropped_blocks=blocks)
        if time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            log.warning("blocks are not published: %s", error)

    def save(self, group: int, layer: int) -> None:
        """A layer of a group, of all blocks of the step, is there."""
        begun_ns = time.perf_counter_ns()
        for batch in self._batches:
            if batch.group == group and batch.layers == layer:          # else one before it is missing
                self._save(batch, layer)
        if self._batches:
            self._counters.add(publish_ns=time.perf_counter_ns() - begun_ns)

    def _save(self, batch: _Batch, layer: int) -> None:
        # "clip" because the default copies through a buffer; the numbers are the engine's own.
        layers = self._groups[batch.group]
        np.take(layers.arrays[layer], batch.block_ids, axis=0, out=batch.tensors[layer], mode="clip")
        try:
            if layer + 1 < len(layers.names):               # the last one is published by the end of the step
                self._endpoint.manager.publish(batch.cache, layers=layer + 1, tensor_num_per_layer=1)
        except LLMException as error:
            log.warning("blocks of request %s are not published: %s", batch.store.request_id, error)
            return
        batch.layers = layer + 1

    def end(self, spoilt: Sequence[Store]) -> None:
        """The step is over: let readers in where all layers came and nothing that it was computed from is amiss."""
        batches, self._batches = self._batches, []
        # In this order the beginnings of prompts are the newest, without which nobody can use the rest.
        for batch in reversed(batches):
            if batch.layers < len(self._groups[batch.group].names) or any(batch.store is store for store in spoilt):
                self._drop(batch)
            else:
                self._let_in(batch)

    def _let_in(self, batch: _Batch) -> None:
        rows = len(batch.block_ids)
        try:
            self._endpoint.manager.publish(batch.cache)
            self._endpoint.manager.deallocate_cache(batch.cache)
        except LLMException as error:
            self._leave_out(rows, error)
            return
        self._counters.add(published_blocks=rows, published_bytes=rows * self._groups[batch.group].row_nbytes)

    def _drop(self, batch: _Batch) -> None:
        self._counters.add(dropped_blocks=len(batch.block_ids))
        try:
            self._endpoint.manager.unbind(batch.cache, range(len(batch.block_ids)))
            self._endpoint.manager.deallocate_cache(batch.cache)
        except LLMException as error:
            log.warning("blocks of request %s could not be removed: %s", batch.store.request_id, error)


def most_blocks(capacity_bytes: int, groups: Sequence[GroupLayout]) -> int:
    """How many blocks of a prompt, each in all groups, caches hold that together are within a capacity; each cache has a page of
    its own before its rows."""
    header = SEGMENT_DATA * len(groups)
    row_nbytes = sum(-(-group.block_nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT * group.num_layers for group in groups)
    full, rest = divmod(capacity_bytes, header + ROWS_OF_A_CACHE * row_nbytes)
    return full * ROWS_OF_A_CACHE + max(0, rest - header) // row_nbytes


def spoilt_stores(taint: Taint, stores: Sequence[Store]) -> list[Store]:
    """Those of a step that nobody may read."""
    return [store for store in stores if taint.spoils(store)]
