"""A contiguous row of the prompt, cut into scattered blocks of the decoder (second generation of the API: cache-manager mode).

    shmkv run examples/llm_datadist/cache_to_blocks.py prompt   # first terminal
    shmkv run examples/llm_datadist/cache_to_blocks.py decoder  # second terminal

The two are linked by `link`, as members of one communication; the key is used up by the pull that brought its last layer.
"""
from __future__ import annotations

import time

from common import (
    DEADLINE_S,
    DECODER_CLUSTER,
    POOL,
    PROMPT_CLUSTER,
    Arguments,
    Bytes,
    Meeting,
    check,
    drawn,
    expect,
    memory,
    run,
    start,
)
from llm_datadist import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole, LLMStatusCode, RegisterMemStatus

LAYERS, TOKENS, WIDTH, BLOCKS = 3, 16, 40, 5
BLOCK = TOKENS * WIDTH * 2              # bytes of a block of one tensor
KEY = CacheKey(PROMPT_CLUSTER, req_id=11, model_id=2)
TABLE = [7, 2, 9, 0, 4]                 # blocks of the decoder, in the order of the tokens


def started(role: LLMRole, cluster_id: int) -> LLMDataDist:
    return start(role, cluster_id, enable_cache_manager=True, mem_pool_cfg=POOL)


def joined(dist: LLMDataDist) -> int:
    """The communication of the two, once both are there."""
    number = dist.link("the two of us", {PROMPT_CLUSTER: 0, DECODER_CLUSTER: 1}, "{}")
    deadline = time.monotonic() + DEADLINE_S
    while dist.query_register_mem_status(number) == RegisterMemStatus.PREPARING and time.monotonic() < deadline:
        time.sleep(0.01)
    check("both are there", dist.query_register_mem_status(number) == RegisterMemStatus.OK)
    return number


def row(seed: int, tensor: int) -> Bytes:
    """All tokens of the request in one tensor, a block a line."""
    return drawn(seed, tensor, nbytes=BLOCKS * BLOCK).reshape(BLOCKS, BLOCK)


def prompt(given: Arguments) -> None:
    dist = started(LLMRole.PROMPT, PROMPT_CLUSTER)
    manager = dist.cache_manager
    cache = manager.allocate_cache(CacheDesc(2 * LAYERS, [1, BLOCKS * TOKENS, WIDTH], DataType.DT_FLOAT16), [KEY])
    for number, tensor in enumerate(memory(cache.cache_desc, cache.tensor_addrs)):
        tensor[0] = row(given.seed, number).ravel()
    meeting = Meeting(given)
    meeting.tell("filled")
    number = joined(dist)
    meeting.tell()                      # the decoder has all
    dist.unlink(number)
    manager.deallocate_cache(cache)
    dist.finalize()


def decoder(given: Arguments) -> None:
    dist = started(LLMRole.DECODER, DECODER_CLUSTER)
    manager = dist.cache_manager
    cache = manager.allocate_blocks_cache(CacheDesc(2 * LAYERS, [10, TOKENS, WIDTH], DataType.DT_FLOAT16))
    mine = memory(cache.cache_desc, cache.tensor_addrs)
    for tensor in mine:
        tensor[:] = 0xEE
    expected = [tensor.copy() for tensor in mine]
    meeting = Meeting(given)
    meeting.tell()
    number = joined(dist)
    for layer in range(LAYERS):
        manager.pull_blocks(KEY, cache, src_blocks=[], dst_blocks=TABLE, src_layer_range=range(layer, layer + 1),
                            dst_layer_range=range(layer, layer + 1))
        for place in (2 * layer, 2 * layer + 1):
            expected[place][TABLE] = row(given.seed, place)
        expect(f"the row in blocks {TABLE}, up to layer {layer}", mine, expected)
    try:
        manager.pull_blocks(KEY, cache, src_blocks=[], dst_blocks=TABLE)
    except LLMException as error:
        check("the key is used up", error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    meeting.tell()
    dist.unlink(number)
    manager.deallocate_blocks_cache(cache)
    dist.finalize()


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
