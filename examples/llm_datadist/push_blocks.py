"""Blocks pushed into scattered blocks of the other process (second generation of the API: cache-manager mode).

    shmkv run examples/llm_datadist/push_blocks.py prompt       # first terminal
    shmkv run examples/llm_datadist/push_blocks.py decoder      # second terminal
"""
from __future__ import annotations

from common import (
    DECODER_CLUSTER,
    POOL,
    PROMPT_CLUSTER,
    Arguments,
    Bytes,
    Meeting,
    drawn,
    expect,
    link,
    memory,
    run,
    start,
    unlink,
)
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole

LAYERS, TOKENS, WIDTH = 3, 16, 40
BLOCK = TOKENS * WIDTH * 4              # bytes of a block of one tensor
SOURCE, TABLE = [5, 0, 2], [8, 3, 6]


def description(blocks: int) -> CacheDesc:
    return CacheDesc(2 * LAYERS, [blocks, TOKENS, WIDTH], DataType.DT_FLOAT)


def started(role: LLMRole, cluster_id: int) -> LLMDataDist:
    return start(role, cluster_id, enable_cache_manager=True, enable_remote_cache_accessible=True, mem_pool_cfg=POOL)


def block(seed: int, number: int, tensor: int) -> Bytes:
    return drawn(seed, number, tensor, nbytes=BLOCK)


def prompt(given: Arguments) -> None:
    dist = started(LLMRole.PROMPT, PROMPT_CLUSTER)
    manager = dist.cache_manager
    cache = manager.allocate_blocks_cache(description(6))
    for number, tensor in enumerate(memory(cache.cache_desc, cache.tensor_addrs)):
        for place in range(6):
            tensor[place] = block(given.seed, place, number)
    meeting = Meeting(given)
    meeting.tell()                      # the decoder has its cache
    link(dist, DECODER_CLUSTER)
    manager.push_blocks(BlocksCacheKey(DECODER_CLUSTER, model_id=7), cache, src_blocks=SOURCE, dst_blocks=TABLE)
    manager.push_blocks(BlocksCacheKey(DECODER_CLUSTER, model_id=7), cache, src_blocks=[1, 4], dst_blocks=[0, 0],
                        src_layer_range=range(2, 3), dst_layer_range=range(1))
    meeting.tell("pushed")
    meeting.tell()                      # the decoder has compared
    unlink(dist, DECODER_CLUSTER)
    manager.deallocate_blocks_cache(cache)
    dist.finalize()


def decoder(given: Arguments) -> None:
    dist = started(LLMRole.DECODER, DECODER_CLUSTER)
    manager = dist.cache_manager
    cache = manager.allocate_blocks_cache(description(9), BlocksCacheKey(DECODER_CLUSTER, model_id=7))
    mine = memory(cache.cache_desc, cache.tensor_addrs)
    for tensor in mine:
        tensor[:] = 0xEE
    expected = [tensor.copy() for tensor in mine]
    meeting = Meeting(given)
    meeting.tell("ready")
    meeting.tell()                      # all is there
    for number, tensor in enumerate(expected):
        for source, target in zip(SOURCE, TABLE, strict=True):
            tensor[target] = block(given.seed, source, number)
    for number in range(2):
        expected[number][0] = block(given.seed, 4, 4 + number)      # of two into one place the last one stays
    expect(f"blocks {SOURCE} of the prompt in blocks {TABLE}, layer 2 of block 4 in layer 0 of block 0", mine, expected)
    meeting.tell()
    manager.deallocate_blocks_cache(cache)
    dist.finalize()


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
