"""Paged attention over shmkv: one process prefills, another has its keys and values in blocks of its own numpy memory.

    python examples/paged.py

The program is the decoder; it starts itself once more as the prefill process. Request 7 comes as one contiguous row and is put into
scattered blocks; request 8 goes from blocks to blocks. Then a block is copied before it is written to (two answers to one prompt
share the others), and a request is swapped out into private memory and back into other blocks. Each step is compared with numpy.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

PREFILL, DECODER = 1, 2
LAYERS, HEADS, DIM = 4, 8, 64
TOKENS = 16                             # of a block
LENGTHS = {7: 4 * TOKENS, 8: 3 * TOKENS}
BLOCKS, HOST_BLOCKS = 32, 8
Array = npt.NDArray[np.float16]


def content(request: int, layer: int, which: int) -> Array:
    """What a model would have computed: the keys (which 0) or the values (1) of all tokens of a request in one layer."""
    drawn = np.random.default_rng([request, layer, which]).standard_normal((LENGTHS[request], HEADS, DIM))
    return drawn.astype(np.float16)


def description(*shape: int, placement: Placement = Placement.DEVICE) -> CacheDesc:
    """Keys and values of all layers, each tensor of this shape."""
    return CacheDesc(2 * LAYERS, list(shape), DataType.DT_FLOAT16, placement)


def start(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """An initialised cluster of this process."""
    config = LLMConfig()
    config.sync_kv_timeout = 10_000     # ms
    dist = LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist


# -- the prefill process --------------------------------------------------------------------------------------------------

def prefill() -> None:
    """Publishes both requests, says where the second one's blocks are, and stays until its stdin ends."""
    dist = start(LLMRole.PROMPT, PREFILL)
    manager = dist.kv_cache_manager
    row = manager.allocate_cache(description(1, LENGTHS[7], HEADS, DIM), [CacheKey(PREFILL, req_id=7)], publish=False)
    paged = manager.allocate_blocks_cache(description(BLOCKS, TOKENS, HEADS, DIM), BlocksCacheKey(PREFILL), publish=False)
    table = [5, 20, 6]
    for number in range(2 * LAYERS):
        row.tensors[number].numpy()[0] = content(7, *divmod(number, 2))
        paged.tensors[number].numpy()[table] = content(8, *divmod(number, 2)).reshape(-1, TOKENS, HEADS, DIM)
    manager.publish(row)
    manager.publish(paged, rows=table)
    print(json.dumps(table), flush=True)
    sys.stdin.read()
    dist.finalize()


# -- the decoder ----------------------------------------------------------------------------------------------------------

class Decoder:
    """Blocks in memory of this process: [blocks, 2, tokens, heads, dim] a layer, keys and values interleaved."""

    def __init__(self, manager: KvCacheManager) -> None:
        self.manager = manager
        self.layers = [np.zeros((BLOCKS, 2, TOKENS, HEADS, DIM), np.float16) for _ in range(LAYERS)]
        self.cache = manager.register_blocks_cache(description(BLOCKS, TOKENS, HEADS, DIM),
                                                   [layer[:, which] for layer in self.layers for which in (0, 1)])
        self.tables: dict[int, list[int]] = {}

    def has(self, request: int, table: Sequence[int]) -> bool:
        """Do these blocks hold the request, bit for bit?"""
        return all(np.array_equal(layer[table, which].reshape(-1, HEADS, DIM), content(request, number, which))
                   for number, layer in enumerate(self.layers) for which in (0, 1))

    def pull_row(self, request: int, table: list[int]) -> None:
        """A contiguous row of the prefill process, cut into blocks."""
        self.manager.pull_blocks(CacheKey(PREFILL, req_id=request), self.cache, [], table)
        self.tables[request] = table

    def pull_blocks(self, request: int, source: list[int], table: list[int]) -> None:
        self.manager.pull_blocks(BlocksCacheKey(PREFILL), self.cache, source, table)
        self.tables[request] = table

    def fork(self, request: int, free: int) -> list[int]:
        """A second answer to the same prompt: it shares all blocks but the last one, which it writes to."""
        *shared, last = self.tables[request]
        self.manager.copy_blocks(self.cache, {last: [free]})
        for layer in self.layers:
            layer[free, :, -1] = 0.5            # its own next token
        return [*shared, free]

    def swap_out(self, request: int, host: KvCache) -> None:
        """The request leaves its blocks, which somebody else may overwrite."""
        table = self.tables[request]
        self.manager.swap_blocks(self.cache, host, {block: place for place, block in enumerate(table)})
        for layer in self.layers:
            layer[table] = 0

    def swap_in(self, request: int, host: KvCache, table: list[int]) -> None:
        self.manager.swap_blocks(host, self.cache, dict(enumerate(table)))
        self.tables[request] = table


def check(what: str, holds: bool) -> None:
    """Say what was seen; the program ends with 1 at the first thing that is not so."""
    print(f"{'ok' if holds else 'WRONG'}: {what}", flush=True)
    if not holds:
        sys.exit(1)


def decode(manager: KvCacheManager, source: list[int]) -> None:
    """All steps; `source` are the blocks of request 8 in the prefill process."""
    decoder = Decoder(manager)
    address = decoder.layers[0].ctypes.data
    decoder.pull_row(7, [9, 3, 14, 6])
    check("request 7, a contiguous row, lies in the scattered blocks 9, 3, 14 and 6", decoder.has(7, [9, 3, 14, 6]))
    decoder.pull_blocks(8, source, [30, 1, 12])
    check(f"request 8, blocks {source} of the prefill process, lies in blocks 30, 1 and 12", decoder.has(8, [30, 1, 12]))
    table = decoder.fork(7, 21)
    check(f"a second answer to request 7 has blocks {table}; the first one's are as they were",
          decoder.has(7, decoder.tables[7]) and not decoder.has(7, table))
    private = np.zeros((2 * LAYERS, HOST_BLOCKS, TOKENS, HEADS, DIM), np.float16)
    host = manager.register_blocks_cache(description(HOST_BLOCKS, TOKENS, HEADS, DIM, placement=Placement.HOST), private)
    decoder.swap_out(7, host)
    check("request 7 is swapped out", not decoder.has(7, decoder.tables[7]))
    decoder.swap_in(7, host, [0, 31, 2, 17])
    check("and back, into blocks 0, 31, 2 and 17", decoder.has(7, [0, 31, 2, 17]))
    check("request 8 is where it was", decoder.has(8, [30, 1, 12]))
    check("all of it in the arrays that this process made", decoder.layers[0].ctypes.data == address)
    manager.unregister_cache(host)
    manager.unregister_cache(decoder.cache)


def link(dist: LLMDataDist) -> None:
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 26000)       # asked for by the API, not used on one host
    peer.append_remote_ip_info("127.0.0.1", 26000)
    status, _ = dist.link_clusters([peer], timeout=10_000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"no link to the prefill process: {status}")


def main() -> None:
    os.environ.setdefault("SHMKV_NAMESPACE", f"paged-{os.getpid()}")
    with subprocess.Popen([sys.executable, __file__, "prefill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        source = json.loads(other.stdout.readline())
        dist = start(LLMRole.DECODER, DECODER)
        try:
            link(dist)
            decode(dist.kv_cache_manager, source)
        finally:
            dist.finalize()
            other.communicate("")
    if other.returncode != 0:
        raise SystemExit(f"the prefill process ended with {other.returncode}")
    print("both processes ended")


if __name__ == "__main__":
    prefill() if sys.argv[1:] == ["prefill"] else main()
