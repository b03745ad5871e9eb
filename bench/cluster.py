"""What every program of the bench does with the library: join, link, describe a cache and where its bytes lie."""
from __future__ import annotations

import ctypes
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import shmkv
from shmkv._mapping import Region

TIMEOUT_MS = 20_000
ByteArray = npt.NDArray[np.uint8]


def join(role: shmkv.LLMRole, cluster_id: int) -> shmkv.LLMDataDist:
    """Initialise this process's cluster."""
    config = shmkv.LLMConfig()
    config.sync_kv_timeout = TIMEOUT_MS
    dist = shmkv.LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist


def link(dist: shmkv.LLMDataDist, *cluster_ids: int) -> None:
    """Link to prompt clusters. RuntimeError unless all came off."""
    status, each = dist.link_clusters(_infos(cluster_ids), TIMEOUT_MS)
    if status != shmkv.LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link to {cluster_ids}: {status}, {each}")


def unlink(dist: shmkv.LLMDataDist, *cluster_ids: int) -> None:
    """End links. RuntimeError unless all came off."""
    status, each = dist.unlink_clusters(_infos(cluster_ids), TIMEOUT_MS)
    if status != shmkv.LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"unlink from {cluster_ids}: {status}, {each}")


def _infos(cluster_ids: tuple[int, ...]) -> list[shmkv.LLMClusterInfo]:
    """Addresses are asked for and never used."""
    infos = []
    for cluster_id in cluster_ids:
        info = shmkv.LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_local_ip_info("127.0.0.1", 1)
        info.append_remote_ip_info("127.0.0.1", 1)
        infos.append(info)
    return infos


@dataclass(frozen=True)
class Source:
    """A published cache of another process: how to name it, and where its tensors lie for whoever goes past the library."""

    cluster_id: int
    cache_id: int
    pid: int
    path: str               # of the segment
    offsets: list[int]      # of the tensors in the segment
    addresses: list[int]    # of the tensors in the owner's process

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> shmkv.CacheKeyByIdAndIndex:
        """By id, so that nothing is consumed."""
        return shmkv.CacheKeyByIdAndIndex(self.cluster_id, self.cache_id, 0)


def file_of(address: int) -> tuple[str, int]:
    """(path, offset) of the mapped file behind an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        if begin <= address < end:
            return fields[5], address - begin + int(fields[2], 16)
    raise LookupError(f"nothing is mapped at {address:#x}")


def bytes_at(address: int, nbytes: int) -> ByteArray:
    """Memory of this process as an array; whoever asks keeps it mapped."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


class Attached:
    """A segment of another process, mapped and warm: every page has its entry in this process's page table."""

    def __init__(self, path: str, *, warm: bool = True) -> None:
        self.region = Region.attach(path)
        self.base = self.region.base
        if warm:
            int(bytes_at(self.base, self.region.nbytes)[::4096].sum())


def faults() -> tuple[int, int]:
    """(minor, major) page faults of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_majflt
