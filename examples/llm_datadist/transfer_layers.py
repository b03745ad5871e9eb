"""Layer by layer, pushed: while the prompt computes a layer, the one before goes to addresses in the decoder's process.

    shmkv run examples/llm_datadist/transfer_layers.py prompt   # first terminal
    shmkv run examples/llm_datadist/transfer_layers.py decoder  # second terminal
"""
from __future__ import annotations

import threading

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
from llm_datadist import CacheDesc, DataType, KvCache, LayerSynchronizer, LLMRole, LLMStatusCode, TransferConfig

LAYERS, TOKENS, WIDTH = 5, 64, 32
ROW = TOKENS * WIDTH * 2
DEADLINE_S = 20
FIRST = range(3)                     # layers of the first destination; the second one gets the others


def description(rows: int) -> CacheDesc:
    return CacheDesc(2 * LAYERS, [rows, TOKENS, WIDTH], DataType.DT_FLOAT16)


def row(seed: int, tensor: int) -> Bytes:
    return drawn(seed, tensor, nbytes=ROW)


class Computed(LayerSynchronizer):
    """Tells the transfer when a layer is there."""

    def __init__(self) -> None:
        self._events = [threading.Event() for _ in range(LAYERS)]

    def is_done(self, layer: int) -> None:
        self._events[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self._events[layer_index].wait(DEADLINE_S)


def prompt(given: Arguments) -> None:
    dist = start(LLMRole.PROMPT, PROMPT_CLUSTER, listen_ip_info="127.0.0.1:26000")
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(description(2))
    tensors = memory(cache.cache_desc, cache.per_device_tensor_addrs[0])
    meeting = Meeting(given)
    addresses = meeting.tell()          # the decoder is linked
    first, others = addresses[:2 * len(FIRST)], addresses[2 * len(FIRST):]
    configs = [TransferConfig(DECODER_CLUSTER, first, FIRST, src_batch_index=1),
               TransferConfig(DECODER_CLUSTER, others, range(FIRST.stop, LAYERS), src_batch_index=1)]
    computed = Computed()
    task = manager.transfer_cache_async(cache, computed, configs)
    compute(given.seed, tensors, computed)
    check("both transfers", task.synchronize(10_000) == LLMStatusCode.LLM_SUCCESS)
    check("have the result success", task.get_results() == [LLMStatusCode.LLM_SUCCESS] * 2)
    meeting.tell()
    meeting.tell()                      # the decoder has compared
    dist.finalize()


def compute(seed: int, tensors: list[Bytes], computed: Computed) -> None:
    """The prefill: a layer's keys and values, then the next layer's."""
    for layer in range(LAYERS):
        for number in (2 * layer, 2 * layer + 1):
            tensors[number][1] = row(seed, number)
        computed.is_done(layer)


def decoder(given: Arguments) -> None:
    dist = start(LLMRole.DECODER, DECODER_CLUSTER)
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(description(3))
    mine = memory(cache.cache_desc, cache.per_device_tensor_addrs[0])
    for tensor in mine:
        tensor[:] = 0xEE
    expected = [tensor.copy() for tensor in mine]
    meeting = Meeting(given)
    link(dist, PROMPT_CLUSTER)
    meeting.tell(row_addresses(cache, 2))
    meeting.tell()                      # all layers are there
    for number, tensor in enumerate(expected):
        tensor[2] = row(given.seed, number)
    expect("all layers in row 2, the other rows as they were", mine, expected)
    unlink(dist, PROMPT_CLUSTER)
    meeting.tell()
    dist.finalize()


def row_addresses(cache: KvCache, index: int) -> list[int]:
    """Where a row lies in each tensor, in this process."""
    return [address + index * ROW for address in cache.per_device_tensor_addrs[0]]


if __name__ == "__main__":
    run(__doc__, prompt, decoder)
