"""Rows of a cache, pulled by request: whole, some layers of it, and in chunks.

    shmkv run examples/llm_datadist/pull_cache.py prompt        # first terminal
    shmkv run examples/llm_datadist/pull_cache.py decoder       # second terminal

The prompt process computes two requests and a prefix; the decoder takes them and compares every byte of its cache.
"""
from __future__ import annotations

from common import (
    DECODER_CLUSTER,
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
from llm_datadist import CacheDesc, CacheKey, DataType, KvCache, KvCacheManager, LLMException, LLMRole, LLMStatusCode

LAYERS, TOKENS, WIDTH = 4, 32, 64
ROW = TOKENS * WIDTH * 2                # bytes of a row of one tensor
NONE = 2**64 - 1
KEYS = [CacheKey(PROMPT_CLUSTER, req_id=1), CacheKey(PROMPT_CLUSTER, req_id=2), CacheKey(PROMPT_CLUSTER, req_id=NONE, prefix_id=9)]


def description(rows: int) -> CacheDesc:
    """K and V of all layers."""
    return CacheDesc(num_tensors=2 * LAYERS, shape=[rows, TOKENS, WIDTH], data_type=DataType.DT_FLOAT16)


def row(seed: int, request: int, tensor: int) -> Bytes:
    return drawn(seed, request, tensor, nbytes=ROW)


def prompt(given: Arguments) -> None:
    dist = start(LLMRole.PROMPT, PROMPT_CLUSTER, listen_ip_info="127.0.0.1:26000")
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(description(len(KEYS)), KEYS)
    for number, tensor in enumerate(memory(cache.cache_desc, cache.per_device_tensor_addrs[0])):
        for request in range(len(KEYS)):
            tensor[request] = row(given.seed, request, number)
    meeting = Meeting(given)
    meeting.tell("filled")
    meeting.tell()                      # the decoder has all
    for key in KEYS:
        manager.remove_cache_key(key)   # no error for one that was pulled
    manager.deallocate_cache(cache)
    dist.finalize()


def decoder(given: Arguments) -> None:
    dist = start(LLMRole.DECODER, DECODER_CLUSTER)
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(description(4))
    mine = memory(cache.cache_desc, cache.per_device_tensor_addrs[0])
    for tensor in mine:
        tensor[:] = 0xEE
    expected = [tensor.copy() for tensor in mine]
    meeting = Meeting(given)
    meeting.tell()
    link(dist, PROMPT_CLUSTER)
    whole(given.seed, manager, cache, expected)
    expect("request 1 in row 2, the other rows as they were", mine, expected)
    layers(given.seed, manager, cache, expected)
    expect("layers 0 and 1 of request 2 in layers 2 and 3 of row 0", mine, expected)
    chunks(given.seed, manager, cache, expected)
    expect("the prefix in row 3, in chunks that go to other places", mine, expected)
    unlink(dist, PROMPT_CLUSTER)
    meeting.tell()
    manager.deallocate_cache(cache)
    dist.finalize()


def whole(seed: int, manager: KvCacheManager, cache: KvCache, expected: list[Bytes]) -> None:
    """The first pull uses the key up, the second one says so."""
    manager.pull_cache(KEYS[0], cache, batch_index=2)
    for number, tensor in enumerate(expected):
        tensor[2] = row(seed, 0, number)
    try:
        manager.pull_cache(KEYS[0], cache, batch_index=2)
    except LLMException as error:
        check("request 1 can be pulled once", error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    else:
        check("request 1 can be pulled once", False)


def layers(seed: int, manager: KvCacheManager, cache: KvCache, expected: list[Bytes]) -> None:
    """A part of the layers leaves the key for the others."""
    manager.pull_cache(KEYS[1], cache, 0, src_layer_range=range(2), dst_layer_range=range(2, 4))
    for number in range(4):
        expected[4 + number][0] = row(seed, 1, number)


def chunks(seed: int, manager: KvCacheManager, cache: KvCache, expected: list[Bytes]) -> None:
    """Offsets are bytes of a row, on either side."""
    half = ROW // 2
    manager.pull_cache(KEYS[2], cache, 3, size=half, src_cache_offset=half, dst_cache_offset=0)
    manager.pull_cache(KEYS[2], cache, 3, size=half - 6, src_cache_offset=2, dst_cache_offset=half + 4)
    for number, tensor in enumerate(expected):
        source = row(seed, 2, number)
        tensor[3, :half] = source[half:]
        tensor[3, half + 4:ROW - 2] = source[2:half - 4]


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
