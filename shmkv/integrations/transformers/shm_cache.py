"""ShmCache: a transformers Cache in a cache of shmkv."""
from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from shmkv.checks import check_list_int64, check_positive, check_type, check_uint32
from shmkv.errors import LLMParamError
from shmkv.integrations.transformers.header import Header
from shmkv.integrations.transformers.layers import ShmLayer, ShmSlidingLayer
from shmkv.integrations.transformers.layouts import ModelLayout
from shmkv.integrations.transformers.probe import layout_of
from shmkv.keys import CacheKey
from shmkv.kv_cache import KvCache
from shmkv.kv_cache_manager import KvCacheManager

CLOSED = "the cache is closed"
HANDED_OVER = "the cache was handed over, and others may be reading it: resume() takes it back"


class ShmCache(Cache):  # type: ignore[misc]
    """Room for `rows` sequences of up to `tokens` tokens of `model`, in shared memory of `manager`.

    A forward that is given it writes keys and values there, in place and once: ``model(ids, **{cache_argument(model): cache})``, or
    `generate`. In a prompt process `handoff` then lets others have a row; in a decoder `receive` makes one of these.

    Use it in a ``with`` block, or `close` it: the memory is the cache's until then, or until nobody refers to it. `model_id`: see
    `layout_of`. `wait_ms`: see `KvCacheManager.allocate_cache`.

    Raises:
        LLMParamError: `tokens` or `rows` below 1; a model whose layers cannot be handed over, the layer named.
        LLMException: no memory.
    """

    def __init__(self, model: Any, manager: KvCacheManager, tokens: int, rows: int = 1, *, model_id: str | None = None,
                 wait_ms: int | None = None) -> None:
        check_type("manager", manager, KvCacheManager)
        check_positive("tokens", check_uint32("tokens", tokens))
        check_positive("rows", check_uint32("rows", rows))
        layout = layout_of(model, model_id)
        # Zeroed where a short row stands beside a longer one: recycled memory may hold NaN, and what the mask hides is multiplied
        # by 0, not left out.
        memory = manager.allocate_cache(layout.describe(rows, tokens), publish=False, zero=rows > 1, wait_ms=wait_ms)
        self._set_up(layout, manager, memory, tokens)

    @classmethod
    def over(cls, layout: ModelLayout, manager: KvCacheManager, memory: KvCache, room: int) -> ShmCache:
        """Around a cache that is there already, of what `layout` describes; it belongs to what is returned."""
        cache = cls.__new__(cls)
        cache._set_up(layout, manager, memory, room)
        return cache

    def _set_up(self, layout: ModelLayout, manager: KvCacheManager, memory: KvCache, room: int) -> None:
        tensors = [torch.from_dlpack(tensor) for tensor in memory.tensors[1:]]
        layers = []
        for number, (layer, (keys, values)) in enumerate(zip(layout.layers, layout.places(), strict=True)):
            pair = tensors[keys - 1], tensors[values - 1]
            layers.append(ShmSlidingLayer(number, *pair, layer.window) if layer.window else ShmLayer(number, *pair))
        super().__init__(layers=layers)
        self.layout, self.manager, self.memory, self.room = layout, manager, memory, room
        self.rows = len(layers[0].filled)
        self._handed_over: set[int] = set()

    # -- what it holds ----------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """Filled tokens of each row. LLMParamError where layers hold unequal numbers: a forward did not come to its end."""
        first: list[int] = self.layers[0].filled
        for layer in self.layers[1:]:
            if layer.filled != first:
                raise LLMParamError(f"layer 0 holds {first} tokens and layer {layer.number} {layer.filled}: a forward failed on "
                                    "the way; set_lengths() says what is complete")
        return list(first)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Say how many tokens of each row count: after a forward of a batch padded on the right, or to take tokens back."""
        check_list_int64("lengths", lengths)
        self.check_writable()
        if len(lengths) != self.rows or not all(0 <= length <= self.room for length in lengths):
            raise LLMParamError(f"argument 'lengths' must have {self.rows} numbers from 0 to {self.room}, got {list(lengths)}")
        for layer in self.layers:
            layer.filled = list(lengths)

    def nbytes(self, tokens: int) -> int:
        """Bytes that so many tokens of one row are, in all layers."""
        return tokens * self.layout.token_nbytes

    def header(self, row: int = 0) -> bytes:
        """The bytes of a row's header."""
        return bytes(self.memory.tensors[0].numpy()[row])

    # -- who has it -------------------------------------------------------------------------------------------------

    @property
    def handed_over(self) -> frozenset[int]:
        """Rows that others may be reading."""
        return frozenset(self._handed_over)

    def publish_row(self, row: int, key: CacheKey, key_ttl_ms: int | None = None) -> Header:
        """What `handoff` does with a row: write its header and bind `key` to it. Nothing is written any more from then on."""
        self._check_not_closed()
        if check_uint32("row", row) >= self.rows or row in self._handed_over:
            what = f"below {self.rows}" if row >= self.rows else "one that was not handed over yet"
            raise LLMParamError(f"argument 'row' must be {what}, got {row}")
        length = self.lengths[row]
        if length == 0:
            raise LLMParamError(f"row {row} holds no token: there is nothing to hand over")
        header = Header.new(self.layout, self.room, length)
        self.memory.tensors[0].numpy()[row] = np.frombuffer(header.pack(), np.uint8)
        self.manager.bind(self.memory, {row: key}, key_ttl_ms=key_ttl_ms)
        self._handed_over.add(row)
        self._set_closed(HANDED_OVER)
        return header

    def resume(self) -> None:
        """Take the rows back that were handed over with ``keep=True``, and go on behind their tokens. Keys that nobody used end, a
        pull that is in a row fails, and forks that others made keep what they have."""
        self._check_not_closed()
        self.manager.unbind(self.memory, sorted(self._handed_over))
        self._handed_over.clear()
        self._set_closed(None)

    def close(self) -> None:
        """Give the memory back: keys that were handed over keep it until they are used. Twice is no error."""
        if self.layers[0].closed == CLOSED:
            return
        self._set_closed(CLOSED)
        nothing = torch.empty((self.rows, 0, 0, 0))
        for layer in self.layers:       # a segment that somebody holds a tensor of is never used again
            layer.keys = layer.values = nothing
        if self.manager.is_initialized():
            self.manager.deallocate_cache(self.memory)

    def __enter__(self) -> ShmCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _set_closed(self, why: str | None) -> None:
        for layer in self.layers:
            layer.closed = why

    def _check_not_closed(self) -> None:
        if self.layers[0].closed == CLOSED:
            raise LLMParamError(CLOSED)

    def check_writable(self) -> None:
        """LLMParamError while the cache is closed or handed over."""
        if self.layers[0].closed is not None:
            raise LLMParamError(self.layers[0].closed)
