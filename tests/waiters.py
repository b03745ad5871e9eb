"""Who is counted in at the words of a cluster's directory, read in /dev/shm whatever its process does."""
from __future__ import annotations

from memory import wait_until, word
from peer import SHM, Namespace

from shmkv._mapping import Region


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
