"""One life of a process with shmkv, step by step through the public calls, and what a step may come to.

A step works, or raises an LLMException, which carries a status, or answers statuses (link and unlink). Anything else is a fault.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cache_bytes
import memory
import numpy as np
import reference
from agent import cluster_info

import shmkv
from shmkv import _lookup
from shmkv.link import Links

MIB = 1 << 20
PEER_ID, OWN_ID = 1, 2
# Of the peer's caches: cache id, tensors, shape (INT8), generation of the pattern. The big one is copied by the crew as well.
SMALL = (1, 4, (2, 64), 5)
BIG = (2, 1, (1, 12 * MIB), 6)
MORE = [(3 + number, 1, (1, 64), 7 + number) for number in range(9)]    # more than the first table of mappings has room for
LINK_TIMEOUT_MS = 300
Reports = list[dict[str, Any]]
RunPositions = Callable[..., Reports]   # the fixture run_positions
MANY = ((1000, 200), (2000, 500))       # keys from, and how many: the index begins with 256 places, of which half are used


@dataclass
class Life:
    """The LLMDataDist of this process, its caches by name, what its steps came to and what was wrong."""

    role: str = "DECODER"
    environment: dict[str, str] = field(default_factory=dict)
    timeout_ms: int = 5000
    dist: Any = None
    caches: dict[str, Any] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def step(self, name: str, call: Callable[[], Any]) -> bool:
        """Did it work? An answer with statuses works when the first of them says so."""
        try:
            answer = call()
        except shmkv.LLMException as error:
            self.outcomes.append(f"{name}: {error.status_code.name}")
            return False
        except MemoryError:
            self.outcomes.append(f"{name}: MemoryError")
            if name != "view":              # where Python's own protocols ask, that is the answer
                self.faults.append(f"{name} raised MemoryError")
            return False
        except BaseException as error:
            self.faults.append(f"{name} raised {error!r}")
            return False
        status = answer[0].name if isinstance(answer, tuple) else "LLM_SUCCESS"
        self.outcomes.append(f"{name}: {status}")
        return status == "LLM_SUCCESS"

    def steps(self, *names: str) -> bool:
        """Steps one after the other, until one does not work."""
        return all(self.step(name, getattr(self, name)) for name in names)

    # -- steps --------------------------------------------------------------------------------------------------------

    def init(self) -> None:
        os.environ.update(self.environment)
        config = shmkv.LLMConfig()
        config.sync_kv_timeout = self.timeout_ms
        self.dist = shmkv.LLMDataDist(shmkv.LLMRole[self.role], OWN_ID)
        self.dist.init(config.generate_options())

    def link(self) -> Any:
        return self.dist.link_clusters([cluster_info(PEER_ID)], LINK_TIMEOUT_MS)

    def unlink(self) -> Any:
        return self.dist.unlink_clusters([cluster_info(PEER_ID)], LINK_TIMEOUT_MS)

    def finalize(self) -> None:
        if self.dist is not None:
            self.dist.finalize()

    def allocate_small(self) -> None:
        self._allocate("small", SMALL)

    def allocate_big(self) -> None:
        self._allocate("big", BIG)

    def allocate_published(self) -> None:
        """As a prompt does it: with keys, filled, then published; then a key more and the keys away."""
        manager, keys = self.dist.kv_cache_manager, [shmkv.CacheKey(OWN_ID, row, 0) for row in range(2)]
        cache = self.caches["small"] = manager.allocate_cache(_desc(SMALL), keys, publish=False)
        cache_bytes.write(cache, _expected(SMALL))
        manager.publish(cache)
        manager.bind(cache, {0: shmkv.CacheKey(OWN_ID, 7, 0)})
        manager.remove_cache_key(keys[1])
        self._compare("small", _expected(SMALL))

    def allocate_zero(self) -> None:
        """Memory that was used before, wanted as zeros."""
        cache = self.caches["small"] = self.dist.kv_cache_manager.allocate_cache(_desc(SMALL), (), zero=True)
        self._compare("small", np.zeros_like(cache_bytes.read(cache)))

    def grow(self) -> None:
        """Many rows with a key each: tables and index grow, the index twice; every key is found afterwards."""
        for begin, rows in MANY:
            desc = shmkv.CacheDesc(1, [rows, 8], shmkv.DataType.DT_INT8)
            keys = [shmkv.CacheKey(OWN_ID, begin + row, 0) for row in range(rows)]
            self.caches[f"many-{begin}"] = self.dist.kv_cache_manager.allocate_cache(desc, keys)
        found = [self.dist._cluster.caches.sources.by_key(shmkv.CacheKey(OWN_ID, begin + row, 0).words)[1]
                 for begin, rows in MANY for row in range(rows)]
        if found != [row for _, rows in MANY for row in range(rows)]:
            self.faults.append("the index lost keys while it grew")

    def shrink(self) -> None:
        for begin, rows in MANY:
            for row in range(rows):
                self.dist.kv_cache_manager.remove_cache_key(shmkv.CacheKey(OWN_ID, begin + row, 0))
            self.dist.kv_cache_manager.deallocate_cache(self.caches.pop(f"many-{begin}"))

    def deallocate(self) -> None:
        for name in list(self.caches):
            self.dist.kv_cache_manager.deallocate_cache(self.caches[name])
            del self.caches[name]
        self.dist.kv_cache_manager.collect()

    def pull_small(self) -> None:
        self.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], 1), self.caches["small"], 1)
        self._compare("small", _expected(SMALL), row=1)

    def pull_big(self) -> None:
        self.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(PEER_ID, BIG[0], 0), self.caches["big"])
        self._compare("big", _expected(BIG))

    def pull_more(self) -> None:
        """One after the other out of many segments, into the first tensor."""
        for cache in MORE:
            self.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(PEER_ID, cache[0], 0), self.caches["small"], 0,
                                                  dst_layer_range=range(1), tensor_num_per_layer=1)
            if not np.array_equal(cache_bytes.read(self.caches["small"])[:1, :, 0], _expected(cache)[:, :, 0]):
                self.faults.append(f"wrong bytes of cache {cache[0]}")

    def let_one_go(self) -> None:
        """The peer's ring says that it gave up a segment, which this process has mapped."""
        handle = self.links().handle(PEER_ID)
        assert handle is not None
        count = memory.word(handle.directory, "DirectoryHeader", 0, "DirectoryHeader", "segments_unlinked")
        ring = memory.TABLES["EndedKey"][1] + memory.TABLES["EndedKey"][0] * 64
        serial = _lookup.describe(handle.directory, memory.by_id(MORE[0][0]), 0)[4]
        memory.content(handle.directory, ring, 512 * 8).view(np.uint64)[count.value % 512] = serial
        count.value += 1

    def pull_many(self) -> None:
        key = shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], 1)
        self.dist.kv_cache_manager.pull_many([shmkv.PullRequest(key, self.caches["small"], row) for row in (0, 1)])
        self._compare("small", _expected(SMALL), row=1)

    def copy(self) -> None:
        """Within one row, so through a temporary."""
        cache = self.caches["small"]
        before = cache_bytes.read(cache)
        self.dist.kv_cache_manager.copy_cache(cache, cache, 1, 1)
        self._compare("small", before)

    def view(self) -> None:
        """All ways to a tensor's bytes."""
        cache = self.caches["small"]
        exported = np.from_dlpack(cache.tensors[0])
        if exported.tobytes() != cache.tensors[0].numpy().tobytes():
            self.faults.append("two views of a tensor differ")

    # -- what a step looks at -------------------------------------------------------------------------------------------

    def _allocate(self, name: str, cache: tuple[int, int, tuple[int, ...], int]) -> None:
        self.caches[name] = self.dist.kv_cache_manager.allocate_cache(_desc(cache))
        cache_bytes.write(self.caches[name], np.zeros_like(_expected(cache)))

    def _compare(self, name: str, wanted: reference.Bytes, row: int | None = None) -> None:
        found, rows = cache_bytes.read(self.caches[name]), slice(None) if row is None else row
        if not np.array_equal(found[:, :, rows], wanted[:, :, rows]):
            self.faults.append(f"wrong bytes in {name}")

    def links(self) -> Links:
        links: Links = self.dist._links
        return links


def _desc(cache: tuple[int, int, tuple[int, ...], int]) -> Any:
    return shmkv.CacheDesc(cache[1], list(cache[2]), shmkv.DataType.DT_INT8)


@lru_cache
def _expected(cache: tuple[int, int, tuple[int, ...], int]) -> reference.Bytes:
    return reference.pattern(reference.geometry(cache[1], list(cache[2]), 1), cache[3])


def compute_patterns() -> None:
    """Once, before any fork."""
    for cache in (SMALL, BIG, *MORE):
        _expected(cache)


def peer_commands() -> Iterable[tuple[str, dict[str, Any]]]:
    """What the healthy peer has to do before: its caches, filled."""
    for name, cache in (("small", SMALL), ("big", BIG), *((f"more {cache[0]}", cache) for cache in MORE)):
        yield "allocate", {"name": name, "num_tensors": cache[1], "shape": list(cache[2]), "dtype": "DT_INT8"}
        yield "fill", {"name": name, "generation": cache[3]}
