"""Rows pushed into a cache of the other process, by its id (second generation of the API: cache-manager mode).

    shmkv run examples/llm_datadist/push_cache.py prompt        # first terminal
    shmkv run examples/llm_datadist/push_cache.py decoder       # second terminal

The decoder has no part in it but to have the cache, and to be told when the bytes are there.
"""
from __future__ import annotations

from common import (
    DECODER_CLUSTER,
    POOL,
    PROMPT_CLUSTER,
    Arguments,
    Bytes,
    Meeting,
    check,
    drawn,
    expect,
    link,
    memory,
    run,
    start,
    unlink,
)
from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMDataDist, LLMException, LLMRole, LLMStatusCode

LAYERS, TOKENS, WIDTH = 4, 48, 32
ROW = TOKENS * WIDTH * 2                # bytes of a row of one tensor


def description(rows: int) -> CacheDesc:
    return CacheDesc(2 * LAYERS, [rows, TOKENS, WIDTH], DataType.DT_FLOAT16)


def started(role: LLMRole, cluster_id: int) -> LLMDataDist:
    return start(role, cluster_id, enable_cache_manager=True, enable_remote_cache_accessible=True, mem_pool_cfg=POOL)


def row(seed: int, number: int, tensor: int) -> Bytes:
    return drawn(seed, number, tensor, nbytes=ROW)


def prompt(given: Arguments) -> None:
    dist = started(LLMRole.PROMPT, PROMPT_CLUSTER)
    manager = dist.cache_manager
    cache = manager.allocate_cache(description(2))
    for number, tensor in enumerate(memory(cache.cache_desc, cache.tensor_addrs)):
        tensor[0], tensor[1] = row(given.seed, 0, number), row(given.seed, 1, number)
    meeting = Meeting(given)
    cache_id = meeting.tell()           # the decoder has its cache
    link(dist, DECODER_CLUSTER)
    manager.push_cache(CacheKeyByIdAndIndex(DECODER_CLUSTER, cache_id, batch_index=2), cache, src_batch_index=1)
    manager.push_cache(CacheKeyByIdAndIndex(DECODER_CLUSTER, cache_id, batch_index=0), cache, src_batch_index=0,
                       src_layer_range=range(1, 3), dst_layer_range=range(2, 4))
    try:
        manager.push_cache(CacheKeyByIdAndIndex(DECODER_CLUSTER, cache_id + 1, batch_index=0), cache)
    except LLMException as error:
        check("there is no other cache", error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    meeting.tell("pushed")
    meeting.tell()                      # the decoder has compared
    unlink(dist, DECODER_CLUSTER)
    manager.deallocate_cache(cache)
    dist.finalize()


def decoder(given: Arguments) -> None:
    dist = started(LLMRole.DECODER, DECODER_CLUSTER)
    manager = dist.cache_manager
    cache = manager.allocate_cache(description(3))
    mine = memory(cache.cache_desc, cache.tensor_addrs)
    for tensor in mine:
        tensor[:] = 0xEE
    expected = [tensor.copy() for tensor in mine]
    meeting = Meeting(given)
    meeting.tell(cache.cache_id)
    meeting.tell()                      # all is there
    for number, tensor in enumerate(expected):
        tensor[2] = row(given.seed, 1, number)
    for number in range(4):
        expected[4 + number][0] = row(given.seed, 0, 2 + number)
    expect("row 1 in row 2, layers 1 and 2 of row 0 in layers 2 and 3 of row 0, the rest as it was", mine, expected)
    meeting.tell()
    manager.deallocate_cache(cache)
    dist.finalize()


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
