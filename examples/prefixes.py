"""A shared prefix over shmkv, without copying it: views, forks, and prefixes that stay for whoever asks again.

    python examples/prefixes.py

The program is the decoder; it starts itself once more as the prefill process, which keeps prefixes by their keys alone and bounds
their memory. The decoder looks at a prefix where it is, forks it for two branches of one answer, and sees the least recently used
prefix go while the one that it holds stays.
"""
from __future__ import annotations

import os
import subprocess
import sys

from shmkv import (
    CacheDesc,
    CacheKey,
    DataType,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

PREFILL, DECODER = 1, 2
LAYERS, TOKENS, WIDTH = 4, 64, 128
DESC = CacheDesc(2 * LAYERS, [1, TOKENS, WIDTH], DataType.DT_FLOAT16)
NO_REQUEST = 2**64 - 1


def key(number: int) -> CacheKey:
    """The key of a prefix, which no pull uses up."""
    return CacheKey(PREFILL, req_id=NO_REQUEST, prefix_id=number)


def start(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """An initialised cluster of this process."""
    config = LLMConfig()
    config.sync_kv_timeout = 10_000     # ms
    dist = LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist


# -- the prefill process --------------------------------------------------------------------------------------------------

def keep(manager: KvCacheManager, number: int) -> None:
    """Fill a prefix and give its cache up: from now on its key alone keeps it."""
    cache = manager.allocate_cache(DESC, [key(number)], publish=False)
    for tensor in cache.tensors:
        tensor.numpy()[:] = number
    manager.publish(cache)
    manager.deallocate_cache(cache)


def prefill() -> None:
    """Keeps prefixes 1, 2 and 3; on the next line of stdin there is room for two only."""
    dist = start(LLMRole.PROMPT, PREFILL)
    manager = dist.kv_cache_manager
    for number in (1, 2, 3):
        keep(manager, number)
    room = 2 * manager.stats()["cache_bytes"] // 3
    print("kept", flush=True)
    sys.stdin.readline()
    manager.set_prefix_capacity(room)
    print([number for number in (1, 2, 3) if manager.contains(key(number))], flush=True)
    sys.stdin.readline()
    dist.finalize()


# -- the decoder ----------------------------------------------------------------------------------------------------------

def check(what: str, holds: bool) -> None:
    """Say what was seen; the program ends with 1 at the first thing that is not so."""
    print(f"{'ok' if holds else 'WRONG'}: {what}", flush=True)
    if not holds:
        sys.exit(1)


def look(manager: KvCacheManager) -> None:
    """A view: the memory itself, read-only, kept until the block ends."""
    with manager.view_cache(key(1), cache_desc=DESC) as view:
        layer = view.tensors[0].numpy()
        check("prefix 1 is read where it is", layer.shape == (TOKENS, WIDTH) and bool((layer == 1).all()))
        check("nothing can be written through a view", not layer.flags.writeable)
    with manager.view_cache(key(1), src_layer_range=range(2, 3), size=WIDTH * 2) as token:
        check("one token of one layer", [tensor.nbytes for tensor in token.tensors] == [WIDTH * 2] * 2)


def branch(manager: KvCacheManager) -> None:
    """Two forks of one prefix, each with a last token of its own."""
    one, other = manager.fork_cache(key(1), DESC), manager.fork_cache(key(1), DESC)
    one.tensors[0].numpy()[0, -1] = 10
    other.tensors[0].numpy()[0, -1] = 20
    ends = [int(fork.tensors[0].numpy()[0, -1, 0]) for fork in (one, other)]
    check("two branches share all but what they wrote", ends == [10, 20] and int(one.tensors[0].numpy()[0, 0, 0]) == 1)
    target = manager.allocate_cache(DESC)
    manager.copy_cache(target, one)
    check("a fork is a source of copies", int(target.tensors[0].numpy()[0, -1, 0]) == 10)
    for cache in (one, other, target):
        manager.deallocate_cache(cache)


def link(dist: LLMDataDist) -> None:
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 26000)       # asked for by the API, not used on one host
    peer.append_remote_ip_info("127.0.0.1", 26000)
    status, _ = dist.link_clusters([peer], timeout=10_000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"no link to the prefill process: {status}")


def decode(manager: KvCacheManager, other: subprocess.Popen[str]) -> None:
    """All steps; `other` is the prefill process."""
    assert other.stdin is not None
    assert other.stdout is not None
    look(manager)
    branch(manager)
    with manager.view_cache(key(2)) as held:            # the oldest use by now, but lent
        manager.pull_cache(key(1), manager.allocate_cache(DESC))
        print(file=other.stdin, flush=True)
        left = other.stdout.readline().strip()
        check(f"with room for two, prefixes {left} are left: 3 was never used, 1 was, 2 is held", left == "[1, 2]")
        check("what is held is still there", bool((held.tensors[-1].numpy() == 2).all()))
    try:
        manager.view_cache(key(3))
    except LLMException as error:
        check("prefix 3 is not there any more", error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


def main() -> None:
    os.environ.setdefault("SHMKV_NAMESPACE", f"prefixes-{os.getpid()}")
    with subprocess.Popen([sys.executable, __file__, "prefill"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        dist = start(LLMRole.DECODER, DECODER)
        try:
            link(dist)
            decode(dist.kv_cache_manager, other)
        finally:
            dist.finalize()
            other.communicate("")
    check("both processes ended", other.returncode == 0)


if __name__ == "__main__":
    prefill() if sys.argv[1:] == ["prefill"] else main()
