"""Pulls a big row in one thread while the main one forks; a child pulls, or just exits. Prints one JSON line."""
from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings

import numpy as np
from agent import cluster_info

import shmkv

how, forks, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("ignore", DeprecationWarning)     # of fork with threads, which is what this is about
decoder = shmkv.LLMDataDist(shmkv.LLMRole.DECODER, 2)
config = shmkv.LLMConfig()
config.sync_kv_timeout = 20000
decoder.init(config.generate_options())
decoder.link_clusters([cluster_info(1)], 20000)
manager = decoder.kv_cache_manager
cache = manager.allocate_cache(shmkv.CacheDesc(1, [1, nbytes], shmkv.DataType.DT_INT8))
key = shmkv.CacheKeyByIdAndIndex(1, 1)
stop, pulls, wrong = threading.Event(), [0], [0]


def keep_pulling() -> None:
    array = cache.tensors[0].numpy()
    while not stop.is_set():
        array[0, :: 1 << 16] = 0
        manager.pull_cache(key, cache)
        wrong[0] += int((array[0, :: 1 << 16] != 7).sum())
        pulls[0] += 1


def child() -> None:
    """Exits with 0 if everything in it is as it should be."""
    if how == "pull":
        try:
            manager.pull_cache(key, cache)
        except shmkv.LLMException as error:
            sys.stdout = open(os.devnull, "w")      # noqa: SIM115 - lives as long as the child
            os._exit(0 if error.status_code.name == "LLM_FAILED" else 4)
        os._exit(5)
    globals().pop("cache")
    gc.collect()
    sys.exit(0)


thread = threading.Thread(target=keep_pulling)
thread.start()
while not pulls[0]:
    time.sleep(0.001)
codes, slowest = [], 0.0
for _ in range(forks):
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    slowest = max(slowest, time.monotonic() - begun)
stop.set()
thread.join()
dtype_ok = cache.tensors[0].numpy().dtype == np.int8
print(json.dumps({"codes": codes, "slowest": slowest, "pulls": pulls[0], "wrong": wrong[0], "ok": bool(dtype_ok)}),
      flush=True)
sys.stdin.read()
decoder.finalize()
