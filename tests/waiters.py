"""Waits of other processes: their calls, and who is counted in at the words of a directory, read in /dev/shm."""
from __future__ import annotations

from typing import Any

from memory import wait_until, word
from peer import SHM, Namespace, Peer, req

from shmkv._mapping import Region

T_MS = 20000
MANAGER = "manager = agent.dist.kv_cache_manager\n"


def _header(region: Region, name: str) -> int:
    return int(word(region, "", 0, "DirectoryHeader", name).value)


def _directory(namespace: Namespace, cluster_id: int) -> Region:
    for name in namespace.names():
        if name.startswith(f"{namespace.name}.d."):
            region = Region.attach(str(SHM / name))
            if _header(region, "cluster_id") == cluster_id:
                return region
    raise AssertionError(f"cluster {cluster_id} has no directory in {namespace.names()}")


def waiters(namespace: Namespace, cluster_id: int = 1) -> int:
    """How many are counted in at the keys and rows of a cluster."""
    region = _directory(namespace, cluster_id)
    rows = range(_header(region, "rows_reserved"))
    return _header(region, "key_waiters") + sum(
        int(word(region, "RowRecord", number, "RowRecord", "progress_waiters").value) for number in rows)


def memory_waiters(namespace: Namespace, cluster_id: int = 1) -> int:
    """Does the owner wait for memory?"""
    return _header(_directory(namespace, cluster_id), "memory_waiters")


def until_waiting(namespace: Namespace, count: int = 1, cluster_id: int = 1) -> None:
    wait_until(lambda: waiters(namespace, cluster_id) == count, f"{count} wait")


def key_code(key: list[Any]) -> str:
    kind, *values = key
    name = {"key": "CacheKey", "id": "CacheKeyByIdAndIndex", "blocks": "BlocksCacheKey"}[kind]
    return f"shmkv.{name}({', '.join(map(str, values))})"


def send_wait(d: Peer, key: list[Any], timeout_ms: int = T_MS) -> None:
    d.send("execute", code=f"{MANAGER}manager.wait_for_key({key_code(key)}, {timeout_ms})")


def send_pull(d: Peer, key: list[Any], name: str = "kv", **how: Any) -> None:
    d.send("pull", key=key, name=name, wait=True, **how)


def publish(p: Peer, number: int, *, publish: bool = True) -> None:
    """A cache whose row 0 has the key `number` and its pattern."""
    p.call("allocate", name=f"kv{number}", keys=[req(1, number)], publish=False)
    p.call("fill", name=f"kv{number}", generation=number)
    if publish:
        p.call("publish", name=f"kv{number}")
