"""The commands of an agent that was initialised with enable_cache_manager: the calls of CacheManager."""
from __future__ import annotations

import ctypes
from typing import Any

from agent_keys import make_key
from agent_pushes import Gates

import shmkv


class CacheAgent:
    """Caches are called by names that the test chose, as those of the other manager are."""

    dist: Any
    caches: dict[str, Any]
    tasks: dict[str, tuple[Any, Gates]]

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}        # private memory that was registered, by the cache's name

    def v2_allocate(self, name: str, num_tensors: int = 4, shape: tuple[int, ...] = (2, 8), dtype: str = "DT_FLOAT16",
                    placement: str = "DEVICE", batch_dim: int = 0, keys: tuple[list[Any], ...] = ()) -> int:
        desc = shmkv.CacheDesc(num_tensors, list(shape), shmkv.DataType[dtype], shmkv.Placement[placement], batch_dim)
        self.caches[name] = self.dist.cache_manager.allocate_cache(desc, [make_key(key) for key in keys])
        return int(self.caches[name].cache_id)

    def v2_allocate_blocks(self, name: str, num_tensors: int = 4, shape: tuple[int, ...] = (8, 16), dtype: str = "DT_INT8",
                           placement: str = "DEVICE", key: list[Any] | None = None) -> int:
        desc = shmkv.CacheDesc(num_tensors, list(shape), shmkv.DataType[dtype], shmkv.Placement[placement])
        self.caches[name] = self.dist.cache_manager.allocate_blocks_cache(desc, make_key(key) if key else None)
        return int(self.caches[name].cache_id)

    def v2_deallocate(self, name: str) -> None:
        cache = self.caches[name]
        manager = self.dist.cache_manager
        (manager.deallocate_blocks_cache if cache.is_blocks_cache else manager.deallocate_cache)(cache)

    def v2_remove_key(self, key: list[Any]) -> None:
        self.dist.cache_manager.remove_cache_key(make_key(key))

    def v2_register(self, name: str, num_tensors: int = 4, shape: tuple[int, ...] = (2, 8), dtype: str = "DT_FLOAT16",
                    placement: str = "DEVICE", keys: tuple[list[Any], ...] = (), blocks_key: list[Any] | None = None,
                    is_blocks: bool = False, over: str | None = None, **how: Any) -> int:
        """In private memory made here, or in that of the allocated cache `over`, from its first byte on."""
        desc = shmkv.CacheDesc(num_tensors, list(shape), shmkv.DataType[dtype], shmkv.Placement[placement])
        if over is None:
            self.memory[name] = [ctypes.create_string_buffer(desc.size) for _ in range(num_tensors)]
            addresses = [ctypes.addressof(tensor) for tensor in self.memory[name]]
        else:
            addresses = list(self.caches[over].tensor_addrs[:num_tensors])
        manager = self.dist.cache_manager
        if is_blocks:
            made = manager.register_blocks_cache(desc, addresses, make_key(blocks_key) if blocks_key else None, **how)
        else:
            made = manager.register_cache(desc, addresses, [make_key(key) for key in keys], **how)
        self.caches[name] = made
        return int(made.cache_id)

    def v2_unregister(self, cache_id: int) -> None:
        self.dist.cache_manager.unregister_cache(cache_id)

    def v2_addresses(self, name: str) -> list[int]:
        return list(self.caches[name].tensor_addrs)

    def v2_pull(self, key: list[Any], name: str, **how: Any) -> None:
        self.dist.cache_manager.pull_cache(make_key(key), self.caches[name], **how)

    def v2_pull_blocks(self, key: list[Any], name: str, src: list[int], dst: list[int], **how: Any) -> None:
        self.dist.cache_manager.pull_blocks(make_key(key), self.caches[name], src, dst, **how)

    def v2_push(self, key: list[Any], name: str, **how: Any) -> None:
        self.dist.cache_manager.push_cache(make_key(key), self.caches[name], **how)

    def v2_push_blocks(self, key: list[Any], name: str, src: list[int], dst: list[int], **how: Any) -> None:
        self.dist.cache_manager.push_blocks(make_key(key), self.caches[name], src, dst, **how)

    def v2_transfer(self, name: str, configs: list[list[Any]], task: str = "task", slow: list[int] | None = None,
                    **blocks: Any) -> None:
        """Begin a transfer; a config is a list of the arguments of TransferWithCacheKeyConfig, with a key, or of TransferConfig."""
        gates = Gates(slow or [], [], [])
        wanted = [shmkv.TransferWithCacheKeyConfig(make_key(to), *more) if isinstance(to, list) else shmkv.TransferConfig(to, *more)
                  for to, *more in configs]
        self.tasks[task] = self.dist.cache_manager.transfer_cache_async(self.caches[name], gates, wanted, **blocks), gates

    def v2_link(self, name: str, members: list[list[int]]) -> int:
        return int(self.dist.link(name, dict(members), "{}"))

    def v2_unlink(self, comm_id: int) -> None:
        self.dist.unlink(comm_id)

    def v2_query(self, comm_id: int) -> str:
        return str(self.dist.query_register_mem_status(comm_id).name)
