"""Steps of a life that looks at rows where they are, and forks them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from lives import OWN_ID, PEER_ID, SMALL, Life, _expected

import shmkv

ROW = 1


@dataclass
class LendLife(Life):
    """Whatever fails, no lease of it is left."""

    def look(self) -> None:
        self._look(shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], ROW), _expected(SMALL)[:, :, ROW])

    def look_at_own(self) -> None:
        self._look(self._own_key(), np.zeros_like(_expected(SMALL)[:, :, ROW]))

    def view(self) -> None:
        """All ways to a lent tensor's bytes."""
        with self.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], ROW)) as view:
            tensor = view.tensors[0]
            found = [np.from_dlpack(tensor, copy=True), np.asarray(tensor), np.frombuffer(tensor.raw, np.uint8)]
        if any(each.tobytes() != _expected(SMALL)[0, :, ROW].tobytes() for each in found):
            self.faults.append("two views of a tensor differ")

    def fork(self) -> None:
        self._fork("fork", shmkv.CacheKeyByIdAndIndex(PEER_ID, SMALL[0], ROW), _expected(SMALL)[:, :, ROW])

    def fork_own(self) -> None:
        self._fork("own fork", self._own_key(), np.zeros_like(_expected(SMALL)[:, :, ROW]))
        self._drop("own fork")

    def drop_fork(self) -> None:
        self._drop("fork")
        handle = self.links().handle(PEER_ID)
        if handle is None or handle.leases:
            self.faults.append("a lease is left of a fork that is gone")

    def _look(self, key: Any, wanted: Any) -> None:
        try:
            with self.dist.kv_cache_manager.view_cache(key) as view:
                if any(not np.array_equal(found.numpy().view(np.uint8), each.reshape(-1))
                       for found, each in zip(view.tensors, wanted, strict=True)):
                    self.faults.append("wrong bytes in a view")
        finally:
            self._no_lease()

    def _fork(self, name: str, key: Any, wanted: Any) -> None:
        try:
            self.caches[name] = self.dist.kv_cache_manager.fork_cache(key)
        except shmkv.LLMException:
            self._no_lease()
            raise
        for found, each in zip(self.caches[name].tensors, wanted, strict=True):
            array = found.numpy().view(np.uint8)
            if not np.array_equal(array[0], each.reshape(-1)):
                self.faults.append("wrong bytes in a fork")
            array += 1

    def _drop(self, name: str) -> None:
        self.dist.kv_cache_manager.deallocate_cache(self.caches.pop(name))

    def _no_lease(self) -> None:
        handle = self.links().handle(PEER_ID)
        if handle is None or handle.leases:
            self.faults.append("a lease is left")

    def _own_key(self) -> Any:
        return shmkv.CacheKeyByIdAndIndex(OWN_ID, self.caches["small"].cache_id, ROW)
