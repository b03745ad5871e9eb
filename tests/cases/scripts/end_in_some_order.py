"""Threads pull from cluster 1 without a break while the program ends in the way that its argument names.

Prints what each call at the end was told.
"""
from __future__ import annotations

import atexit
import os
import sys
import threading

how = sys.argv[1]


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def pull_and_say(when: str) -> None:
    try:
        manager.pull_cache(key, cache)
        say(f"{when}: done")
    except shmkv.LLMException as error:
        say(f"{when}: {error.status_code.name}")


if how.startswith("handlers"):
    atexit.register(lambda: pull_and_say("before the import"))

from agent import cluster_info  # noqa: E402

import shmkv  # noqa: E402

if how.startswith("handlers"):
    atexit.register(lambda: pull_and_say("after the import"))
config = shmkv.LLMConfig()
config.sync_kv_timeout = 20000
decoder = shmkv.LLMDataDist(shmkv.LLMRole.DECODER, 2)
decoder.init(config.generate_options())
decoder.link_clusters([cluster_info(1)], 20000)
manager = decoder.kv_cache_manager
cache = manager.allocate_cache(shmkv.CacheDesc(1, [4, 4 << 20], shmkv.DataType.DT_INT8))
key = shmkv.CacheKeyByIdAndIndex(1, 1)
manager.pull_cache(key, cache)
begun = threading.Semaphore(0)


class FinalizesAtItsEnd:
    """Kept in a module, so that it goes when modules go."""

    def __del__(self) -> None:
        decoder.finalize()


class PullsAtItsEnd:
    def __del__(self) -> None:
        pull_and_say("at the end")


def keep_pulling(row: int, until_refused: bool) -> None:
    begun.release()
    while True:
        try:
            manager.pull_cache(key, cache, row)
        except shmkv.LLMException:
            if until_refused:
                return


def pulling(count: int, daemon: bool) -> list[threading.Thread]:
    threads = [threading.Thread(target=keep_pulling, args=(row, not daemon), daemon=daemon) for row in range(count)]
    for thread in threads:
        thread.start()
        begun.acquire()
    return threads


if how == "daemons":
    pulling(4, daemon=True)
elif how == "daemons, exit":
    pulling(4, daemon=True)
    sys.exit(3)
elif how == "daemons, os._exit":
    pulling(4, daemon=True)
    os._exit(4)
elif how == "daemons, uncaught":
    pulling(4, daemon=True)
    sys.excepthook = lambda *_: None
    raise LookupError
elif how == "finalize, then threads end":
    pulling(4, daemon=False)
    decoder.finalize()
elif how == "exit in a thread":
    thread = threading.Thread(target=sys.exit, args=(5,))
    thread.start()
    thread.join()
elif how == "finalize in a destructor":
    FinalizesAtItsEnd()
    pull_and_say("afterwards")
elif how == "finalize when modules go":
    sys.modules["kept"] = FinalizesAtItsEnd()        # type: ignore[assignment]
elif how == "pull when modules go":
    sys.modules["kept"] = PullsAtItsEnd()            # type: ignore[assignment]
elif how == "modules go first":
    for name in [name for name in sys.modules if name.startswith("shmkv")]:
        del sys.modules[name]
elif how == "views only":
    views = [tensor.numpy() for tensor in cache.tensors]
    del cache, manager, decoder
elif how == "handlers, os._exit":
    atexit.register(os._exit, 6)
