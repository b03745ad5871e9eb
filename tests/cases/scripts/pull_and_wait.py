"""Links to cluster 1, pulls row 0 of its cache 1 by id, says so, and waits for its stdin to end."""
from __future__ import annotations

import hashlib
import sys

import cache_bytes
from agent import cluster_info

import shmkv


def main() -> None:
    decoder = shmkv.LLMDataDist(shmkv.LLMRole.DECODER, int(sys.argv[1]))
    decoder.init(shmkv.LLMConfig().generate_options())
    decoder.link_clusters([cluster_info(1)], 20000)
    manager = decoder.kv_cache_manager
    cache = manager.allocate_cache(shmkv.CacheDesc(4, [1, 4096], shmkv.DataType.DT_INT8))
    manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), cache)
    print(hashlib.sha256(cache_bytes.read(cache).tobytes()).hexdigest(), flush=True)
    sys.stdin.read()


main()
