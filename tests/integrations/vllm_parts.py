"""Parts of a connector in this process, without vLLM: blocks are rows of random bytes."""
from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import numpy as np

from shmkv.integrations.vllm.block_keys import Prompt, block_hashes
from shmkv.integrations.vllm.identity import CacheIdentity, GroupLayout
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.plans import BlockPlace, Load, StepPlan, Store

NAMES = ("layer.0", "layer.1", "layer.2")
BLOCK_NBYTES = 512
GROUP = GroupLayout(window=0, cache_dtype="bfloat16", block_nbytes=BLOCK_NBYTES, num_layers=len(NAMES), num_kv_heads=2,
                    head_size=32)
IDENTITY = CacheIdentity(model="m", model_digest="d", weights="w", weight_files="f", layout="LBHNC", attention="vec",
                         engine="0.32.0", block_size=4, num_shards=1, groups=(GROUP,))


def other_identity(**changes: Any) -> CacheIdentity:
    """Fields of the identity, or of its one group."""
    of_group = {name: changes.pop(name) for name in list(changes) if name in GroupLayout.__dataclass_fields__}
    return replace(IDENTITY, groups=(replace(GROUP, **of_group),), **changes)


def random_layers(num_blocks: int, rng: np.random.Generator) -> Layers:
    """Blocks with a gap behind each, as an engine's may have."""
    return Layers({name: rng.integers(0, 256, (num_blocks, BLOCK_NBYTES + 64), np.uint8)[:, :BLOCK_NBYTES] for name in NAMES})


def hashes(count: int) -> list[bytes]:
    """Of blocks that nobody else has."""
    return block_hashes(IDENTITY.seed(), Prompt([secrets.randbelow(1 << 31) for _ in range(count * IDENTITY.block_size)]),
                        IDENTITY.block_size)


def places(block_hashes: list[bytes], block_ids: list[int]) -> tuple[BlockPlace, ...]:
    return tuple(BlockPlace(*each) for each in zip(block_hashes, block_ids, strict=True))


def store(block_hashes: list[bytes], block_ids: list[int], relied_on: tuple[int, ...] = (), request_id: str = "s") -> StepPlan:
    return StepPlan(stores=(Store(request_id, places(block_hashes, block_ids), relied_on, tuple(block_ids)),))


def load(block_hashes: list[bytes], block_ids: list[int], *, is_async: bool = False, request_id: str = "l") -> StepPlan:
    return StepPlan(loads=(Load(request_id, places(block_hashes, block_ids), is_async),))


def run_step(worker: Any, plan: StepPlan, names: tuple[str, ...] = NAMES) -> None:
    """A forward, as vLLM makes it around a connector. `names`: layers in the order of the model."""
    worker.start_loads(plan)
    for name in names:
        worker.wait_for_layer(name)
        worker.save_layer(plan, name)
    worker.end_step(plan)
