"""What the scheduler's side tells the worker's side, step by step: plain values that can be pickled."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BlockPlace(NamedTuple):
    """A block of a prompt in the layers of one KV cache group: its hash, and where it lies in vLLM's tensors."""

    block_hash: bytes
    block_id: int
    group: int = 0


@dataclass(frozen=True)
class Load:
    """Blocks that a request wants from others. With `is_async` the request waits beside the batch until it is told."""

    request_id: str
    blocks: tuple[BlockPlace, ...]
    is_async: bool


@dataclass(frozen=True)
class Store:
    """Blocks of a request that this step fills, or that were full before and may be missing in shared memory.

    `relied_on`: ids of the blocks that the step only reads; `computed`: of those that it writes to.
    """

    request_id: str
    blocks: tuple[BlockPlace, ...]
    relied_on: tuple[int, ...]
    computed: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step. `forget`: first remove everything that this process has published, and give up loads that are under way."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    forget: bool = False


@dataclass
class ScheduledRequest:
    """A request of a step, in the words of vLLM's scheduler. `block_ids`, a list a group: all of them with `replaces`, else those
    that are new; `computed`: tokens before the step; `scheduled`: tokens of the step."""

    request_id: str
    block_ids: tuple[Sequence[int], ...]
    replaces: bool = False
    computed: int = 0
    scheduled: int = 0
