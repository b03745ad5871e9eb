"""Allocates two caches, links, pulls once, keeps everything in globals and in a cycle, and ends as told by its argument."""
from __future__ import annotations

import atexit
import os
import sys


def at_the_end() -> None:
    """Registered before the import, so it runs after the library's own handler."""
    if "touch" in sys.argv:
        for cache in caches:
            _ = (cache.tensors, cache.per_device_tensor_addrs, repr(cache))
            try:
                manager.deallocate_cache(cache)
            except shmkv.LLMException as error:
                print(error.status_code.name, flush=True)
        decoder.finalize()
    if "leave" in sys.argv:
        os._exit(0)


atexit.register(at_the_end)

import numpy as np  # noqa: E402
from agent import cluster_info  # noqa: E402

import shmkv  # noqa: E402

decoder = shmkv.LLMDataDist(shmkv.LLMRole.DECODER, 2)
decoder.init(shmkv.LLMConfig().generate_options())
decoder.link_clusters([cluster_info(1)], 20000)
manager = decoder.kv_cache_manager
caches = [manager.allocate_cache(shmkv.CacheDesc(4, [2, 64], shmkv.DataType.DT_INT8)) for _ in range(2)]
arrays = [np.asarray(tensor) for cache in caches for tensor in cache.tensors]
manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), caches[0])
cycle: list[object] = [decoder, manager, caches, arrays]
cycle.append(cycle)
print("pulled", flush=True)
if "exit" in sys.argv:
    sys.exit(3)
if "raise" in sys.argv:
    raise LookupError("the program's own error")
