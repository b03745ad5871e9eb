"""Blocks of a paged cache: pulled into scattered blocks, copied before they are written to, swapped out and in again.

    shmkv run examples/llm_datadist/pull_blocks.py prompt       # first terminal
    shmkv run examples/llm_datadist/pull_blocks.py decoder      # second terminal
"""
from __future__ import annotations

import numpy as np
from common import DECODER_CLUSTER, PROMPT_CLUSTER, Arguments, Bytes, Meeting, drawn, expect, link, memory, run, start, unlink
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, KvCache, LLMRole, Placement

LAYERS, TOKENS, HEADS, DIM = 3, 16, 2, 32
BLOCK = TOKENS * HEADS * DIM * 4        # bytes of a block of one tensor
SOURCE, TABLE = [7, 0, 3, 4], [2, 9, 5, 1]


def description(blocks: int, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(2 * LAYERS, [blocks, TOKENS, HEADS, DIM], DataType.DT_FLOAT, placement)


def block(seed: int, number: int, tensor: int) -> Bytes:
    return drawn(seed, number, tensor, nbytes=BLOCK)


def prompt(given: Arguments) -> None:
    dist = start(LLMRole.PROMPT, PROMPT_CLUSTER, listen_ip_info="127.0.0.1:26000")
    manager = dist.kv_cache_manager
    cache = manager.allocate_blocks_cache(description(8), BlocksCacheKey(PROMPT_CLUSTER, model_id=0))
    for number, tensor in enumerate(memory(cache.cache_desc, cache.per_device_tensor_addrs[0])):
        for place in range(8):
            tensor[place] = block(given.seed, place, number)
    meeting = Meeting(given)
    meeting.tell("filled")
    meeting.tell()                      # the decoder has all
    manager.deallocate_cache(cache)
    dist.finalize()


def decoder(given: Arguments) -> None:
    dist = start(LLMRole.DECODER, DECODER_CLUSTER)
    manager = dist.kv_cache_manager
    cache = manager.allocate_blocks_cache(description(12))
    mine = memory(cache.cache_desc, cache.per_device_tensor_addrs[0])
    for tensor in mine:
        tensor[:] = 0xEE
    expected = [tensor.copy() for tensor in mine]
    meeting = Meeting(given)
    meeting.tell()
    link(dist, PROMPT_CLUSTER)

    manager.pull_blocks(BlocksCacheKey(PROMPT_CLUSTER, model_id=0), cache, SOURCE, TABLE)
    for number, tensor in enumerate(expected):
        for source, target in zip(SOURCE, TABLE, strict=True):
            tensor[target] = block(given.seed, source, number)
    expect(f"blocks {SOURCE} of the prompt in blocks {TABLE}, the others as they were", mine, expected)

    manager.pull_blocks(BlocksCacheKey(PROMPT_CLUSTER), cache, [6], [11], src_layer_range=range(2, 3), dst_layer_range=range(1))
    for number in range(2):
        expected[number][11] = block(given.seed, 6, 4 + number)
    expect("layer 2 of block 6 in layer 0 of block 11", mine, expected)

    manager.copy_blocks(cache, {TABLE[0]: [0, 10], 10: [8]})
    for tensor in expected:
        tensor[[0, 10, 8]] = tensor[TABLE[0]]
    expect(f"block {TABLE[0]} in blocks 0, 10 and 8 as well", mine, expected)

    host, private = host_cache()
    manager.swap_blocks(cache, host, {place: slot for slot, place in enumerate(TABLE)})
    expect("swapped out: private memory", private, [tensor[TABLE] for tensor in expected])
    for tensor in (*mine, *expected):
        tensor[TABLE] = 0
    manager.swap_blocks(host, cache, {0: 3, 2: 7})
    for number, tensor in enumerate(expected):
        tensor[3], tensor[7] = block(given.seed, SOURCE[0], number), block(given.seed, SOURCE[2], number)
    expect("swapped in again, into blocks 3 and 7", mine, expected)

    unlink(dist, PROMPT_CLUSTER)
    meeting.tell()
    manager.deallocate_cache(cache)
    dist.finalize()


def host_cache() -> tuple[KvCache, list[Bytes]]:
    """A cache of four blocks in memory of this process."""
    private = [np.zeros((4, BLOCK), np.uint8) for _ in range(2 * LAYERS)]
    return KvCache.create_cpu_cache(description(4, Placement.HOST), [tensor.ctypes.data for tensor in private]), private


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
