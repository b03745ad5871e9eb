"""Links to cluster 1, says so, reads a line, then waits for the link's lock in the place that its argument names."""
from __future__ import annotations

import atexit
import sys
import threading

from agent import cluster_info

import shmkv


def pull() -> None:
    try:
        manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), cache)
        print("done", flush=True)
    except shmkv.LLMException as error:
        print(error.status_code.name, flush=True)


class PullsAtItsEnd:
    def __del__(self) -> None:
        pull()


config = shmkv.LLMConfig()
config.sync_kv_timeout = 100
decoder = shmkv.LLMDataDist(shmkv.LLMRole.DECODER, 2)
decoder.init(config.generate_options())
decoder.link_clusters([cluster_info(1)], 20000)
manager = decoder.kv_cache_manager
cache = manager.allocate_cache(shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_FLOAT16))
print("linked", flush=True)
sys.stdin.readline()
place = sys.argv[1]
if place == "call":
    pull()
elif place == "destructor":
    dying = PullsAtItsEnd()
    del dying
elif place == "finalize":
    decoder.finalize()
    print("finalized", flush=True)
elif place == "atexit":
    atexit.register(pull)
elif place == "thread":
    thread = threading.Thread(target=pull)
    thread.start()
    thread.join()
elif place == "end":
    kept_until_the_modules_go = PullsAtItsEnd()
