"""Steps of a life that asks the kernel whether processes may reach each other's memory, and tells it that they may."""
from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from lives import OWN_ID, Life

import shmkv
from shmkv import peer_access


@dataclass
class KernelLife(Life):
    """Of the second generation of the API, which is the one with memory that is private to a process."""

    def init_manager(self) -> None:
        os.environ.update(self.environment)
        config = shmkv.LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.mem_pool_cfg = '{"memory_size": 1048576}'
        self.dist = shmkv.LLMDataDist(shmkv.LLMRole.MIX, OWN_ID)
        self.dist.init(config.generate_options())

    def ask(self) -> None:
        """By a child, which is waited for: whether that goes well is told by nobody who does not know."""
        said = peer_access.refusal()
        if said:
            raise shmkv.LLMException(said)

    def register_private(self) -> None:
        """With the permission, which is advice to the kernel."""
        memory = np.zeros(128, np.uint8)
        manager = self.dist.cache_manager
        cache = manager.register_cache(shmkv.CacheDesc(1, [2, 64], shmkv.DataType.DT_INT8), [memory.ctypes.data])
        manager.unregister_cache(cache.cache_id)
