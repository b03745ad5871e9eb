"""torch tensors as destinations of pulls: the prompt fills shared memory through DLPack, the decoder's tensors stay where they are.

Both are this file run as a program; the test compares what they print.
"""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peer import Namespace

pytestmark = [pytest.mark.llm, pytest.mark.timeout(300)]
NEEDED = "needs torch: make test-llm installs it"
WATCHDOG_S = 120
DTYPES = {"bfloat16": "DT_BF16", "float16": "DT_FLOAT16", "float8_e4m3fn": "DT_FLOAT8_E4M3FN", "float8_e5m2": "DT_FLOAT8_E5M2",
          "int8": "DT_INT8"}
# Layers, rows or blocks, heads, tokens of a row or block, dim.
LAYERS, ROWS, HEADS, TOKENS, DIM = 3, 4, 6, 5, 8
CASES = ("vllm", "vllm by row", "transformers", "transformers heads", "local")


# -- both programs --------------------------------------------------------------------------------------------------------

def joined(role: str, cluster_id: int) -> Any:
    import shmkv

    dist = shmkv.LLMDataDist(shmkv.LLMRole[role], cluster_id)
    config = shmkv.LLMConfig()
    config.sync_kv_timeout = 20000
    dist.init(config.generate_options())
    return dist


def bits(torch: Any, shape: tuple[int, ...], seed: int, dtype: Any) -> Any:
    """Random bits as that type: NaNs with their payloads, -0.0 and all else."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype)


def raw_view(torch: Any, tensor: Any) -> Any:
    """Its bytes: torch copies and compares float8 by these alone."""
    return tensor.view(torch.uint8)


def content(torch: Any, dtype: Any, shape: tuple[int, ...]) -> list[Any]:
    """What the prompt's tensors hold: K and V of each layer."""
    return [bits(torch, shape, number, dtype) for number in range(2 * LAYERS)]


BLOCKS_SHAPE, ROWS_SHAPE = (ROWS, TOKENS, HEADS, DIM), (ROWS, HEADS, TOKENS, DIM)


def prompt() -> None:
    """Caches 1 (rows of (heads, tokens, dim)) and 2 (blocks of (tokens, heads, dim)) of each type, until the end of stdin."""
    import torch

    import shmkv

    dist = joined("PROMPT", 1)
    manager, kept = dist.kv_cache_manager, []
    for number, (name, kind) in enumerate(DTYPES.items()):
        dtype = getattr(torch, name)
        rows = manager.allocate_cache(shmkv.CacheDesc(2 * LAYERS, list(ROWS_SHAPE), shmkv.DataType[kind]), publish=False)
        blocks = manager.allocate_blocks_cache(shmkv.CacheDesc(2 * LAYERS, list(BLOCKS_SHAPE), shmkv.DataType[kind]),
                                               shmkv.BlocksCacheKey(1, number), publish=False)
        for cache, shape in ((rows, ROWS_SHAPE), (blocks, BLOCKS_SHAPE)):
            for view, wanted in zip(cache.tensors, content(torch, dtype, shape), strict=True):
                tensor = torch.from_dlpack(view)
                assert tensor.dtype == dtype
                raw_view(torch, tensor).copy_(raw_view(torch, wanted))
            manager.publish(cache)
        kept += [rows, blocks]
    print(json.dumps({kind: kept[2 * number].cache_id for number, kind in enumerate(DTYPES.values())}), flush=True)
    sys.stdin.read()
    dist.finalize()


def decoder(ids: dict[str, int]) -> None:
    """All cases for all types: prints a line for each, with what was wrong."""
    import torch
    from agent import cluster_info

    import shmkv

    dist = joined("DECODER", 2)
    assert dist.link_clusters([cluster_info(1)], 20000)[0] == shmkv.LLMStatusCode.LLM_SUCCESS
    for number, (name, kind) in enumerate(DTYPES.items()):
        case = Case(torch, dist.kv_cache_manager, getattr(torch, name), shmkv.DataType[kind], ids[kind], number)
        for what in CASES:
            print(json.dumps([name, what, getattr(case, what.replace(" ", "_"))()]), flush=True)
    dist.finalize()


class Case:
    """One element type. Each method is a layout: it answers what was wrong."""

    def __init__(self, torch: Any, manager: Any, dtype: Any, kind: Any, cache_id: int, model_id: int) -> None:
        self.torch, self.manager, self.dtype, self.kind = torch, manager, dtype, kind
        self.cache_id, self.model_id = cache_id, model_id
        self.blocks, self.rows = content(torch, dtype, BLOCKS_SHAPE), content(torch, dtype, ROWS_SHAPE)

    def empty(self, *shape: int) -> Any:
        return self.torch.full((*shape[:-1], shape[-1] * self.dtype.itemsize), 0x5A, dtype=self.torch.uint8).view(self.dtype)

    def differ(self, pairs: list[tuple[Any, Any]], tensors: list[Any], addresses: list[int]) -> list[str]:
        """Of (found, wanted) pairs those that differ, and tensors that were moved."""
        wrong = [f"pair {place}" for place, (found, wanted) in enumerate(pairs)
                 if not self.torch.equal(raw_view(self.torch, found), raw_view(self.torch, wanted))]
        return wrong + [f"tensor {place} was moved" for place, tensor in enumerate(tensors)
                        if tensor.data_ptr() != addresses[place]]

    def registered(self, shape: tuple[int, ...], tensors: list[Any], *, blocks: bool = False, host: bool = False) -> Any:
        import shmkv

        placement = shmkv.Placement.HOST if host else shmkv.Placement.DEVICE
        call = self.manager.register_blocks_cache if blocks else self.manager.register_cache
        cache = call(shmkv.CacheDesc(2 * LAYERS, list(shape), self.kind, placement), tensors)
        assert cache.per_device_tensor_addrs == [[tensor.data_ptr() for tensor in tensors]], "the tensors themselves"
        return cache

    def paged(self, blocks: int) -> tuple[list[Any], list[int], Any]:
        """[blocks, 2, tokens, heads, dim] a layer, given by its keys and its values."""
        layers = [self.empty(blocks, 2, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
        views = [layer[:, which] for layer in layers for which in (0, 1)]
        cache = self.registered((blocks, TOKENS, HEADS, DIM), views, blocks=True)
        return layers, [layer.data_ptr() for layer in layers], cache

    def vllm(self) -> list[str]:
        """Blocks into scattered blocks."""
        import shmkv

        layers, addresses, cache = self.paged(10)
        twins = [layer.clone() for layer in layers]
        src, dst = [2, 0, 3], [7, 9, 1]
        self.manager.pull_blocks(shmkv.BlocksCacheKey(1, self.model_id), cache, src, dst)
        for number, twin in enumerate(twins):
            for which in (0, 1):
                raw_view(self.torch, twin)[dst, which] = raw_view(self.torch, self.blocks[2 * number + which])[src]
        self.manager.unregister_cache(cache)
        return self.differ(list(zip(layers, twins, strict=True)), layers, addresses)

    def vllm_by_row(self) -> list[str]:
        """A contiguous row, cut into blocks."""
        import shmkv

        layers, addresses, cache = self.paged(10)
        twins = [layer.clone() for layer in layers]
        row = TOKENS * HEADS * DIM
        self.manager.pull_blocks(shmkv.CacheKeyByIdAndIndex(1, self.cache_id, 2), cache, [], [5])
        for number, twin in enumerate(twins):
            for which in (0, 1):
                chunk = raw_view(self.torch, self.rows[2 * number + which])[2].reshape(-1)[:row * self.dtype.itemsize]
                raw_view(self.torch, twin)[5, which] = chunk.reshape(TOKENS, HEADS, -1)
        self.manager.unregister_cache(cache)
        return self.differ(list(zip(layers, twins, strict=True)), layers, addresses)

    def transformers(self) -> list[str]:
        """K and V of a layer, each (batch, heads, tokens, dim)."""
        import shmkv

        tensors = [self.empty(2, HEADS, TOKENS, DIM) for _ in range(2 * LAYERS)]
        twins, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        cache = self.registered((2, HEADS, TOKENS, DIM), tensors)
        self.manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, self.cache_id, 3), cache, 1)
        for twin, sent in zip(twins, self.rows, strict=True):
            raw_view(self.torch, twin)[1] = raw_view(self.torch, sent)[3]
        self.manager.unregister_cache(cache)
        return self.differ(list(zip(tensors, twins, strict=True)), tensors, addresses)

    def transformers_heads(self) -> list[str]:
        """Rank 1 of 3: two of six heads."""
        import shmkv

        tensors = [self.empty(2, 2, TOKENS, DIM) for _ in range(2 * LAYERS)]
        twins, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        cache = self.registered((2, 2, TOKENS, DIM), tensors)
        heads = shmkv.HeadSlice(1, src_heads=HEADS, src_head_range=range(2, 4))
        self.manager.prepare_pull(cache, batch_index=0, heads=heads)(shmkv.CacheKeyByIdAndIndex(1, self.cache_id, 1))
        for twin, sent in zip(twins, self.rows, strict=True):
            raw_view(self.torch, twin)[0] = raw_view(self.torch, sent)[1, 2:4]
        self.manager.unregister_cache(cache)
        return self.differ(list(zip(tensors, twins, strict=True)), tensors, addresses)

    def local(self) -> list[str]:
        """copy_blocks within paged tensors, swap_blocks out of and into tensors with placement HOST."""
        layers, addresses, cache = self.paged(6)
        for number, layer in enumerate(layers):
            raw_view(self.torch, layer).copy_(raw_view(self.torch, bits(self.torch, tuple(layer.shape), 50 + number, self.dtype)))
        twins, private = [layer.clone() for layer in layers], [self.empty(2, TOKENS, HEADS, DIM) for _ in range(2 * LAYERS)]
        host = self.registered((2, TOKENS, HEADS, DIM), private, blocks=True, host=True)
        self.manager.copy_blocks(cache, {0: [3, 4]})
        self.manager.swap_blocks(cache, host, {5: 1})
        self.manager.swap_blocks(host, cache, {1: 2})
        for twin in twins:
            view = raw_view(self.torch, twin)
            view[3], view[4], view[2] = view[0], view[0], view[5]
        pairs = [(private[2 * number + which][1], twins[number][5, which]) for number in range(LAYERS) for which in (0, 1)]
        self.manager.unregister_cache(cache)
        self.manager.unregister_cache(host)
        return self.differ([*zip(layers, twins, strict=True), *pairs], layers, addresses)


# -- the test -------------------------------------------------------------------------------------------------------------

def test_torch_tensors_are_pulled_into(namespace: Namespace) -> None:
    pytest.importorskip("torch", reason=NEEDED)
    environment = namespace.environment({"PYTHONPATH": ":".join(filter(None, [str(Path(__file__).parents[1]), *sys.path[1:]]))})
    with subprocess.Popen([sys.executable, __file__, "prompt"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                          text=True) as publisher:
        try:
            assert publisher.stdout is not None
            ids = publisher.stdout.readline()
            done = subprocess.run([sys.executable, __file__, "decoder", ids], capture_output=True, text=True, env=environment,
                                  timeout=WATCHDOG_S)
            assert (done.returncode, done.stderr) == (0, "")
            publisher.communicate("", timeout=WATCHDOG_S)
        finally:
            publisher.kill()
    assert publisher.returncode == 0
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer[:2] for answer in answers] == [[name, what] for name in DTYPES for what in CASES]
    assert [answer for answer in answers if answer[2]] == [], "bit for bit, and no tensor was moved"


if __name__ == "__main__":
    decoder(json.loads(sys.argv[2])) if sys.argv[1] == "decoder" else prompt()
