"""The prompt process: publishes caches and answers commands. Started as ``prompt.py CLUSTER_ID``."""
from __future__ import annotations

import os
import socket
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import cluster
import numpy as np
import programs
from prefill import Prefill

import shmkv

NO_ID = 2**64 - 1


def pattern(index: int, nbytes: int) -> cluster.ByteArray:
    """Bytes of tensor `index`: of chance, but the same in every run."""
    chance = np.random.default_rng(index % 7).integers(0, 256, min(nbytes, 1 << 20), dtype=np.uint8)
    made: cluster.ByteArray = np.resize(chance, nbytes) + np.uint8(index & 0xFF)
    return made


class Prompt:
    """One method a command."""

    def __init__(self, cluster_id: int) -> None:
        self._id = cluster_id
        self._dist = cluster.join(shmkv.LLMRole.PROMPT, cluster_id)
        self._manager = self._dist.kv_cache_manager
        self._caches: dict[int, shmkv.KvCache] = {}
        self._crowd: list[shmkv.KvCache] = []
        self._copies: dict[str, SharedMemory] = {}
        self._cycled: shmkv.KvCache | None = None
        self.prefill = Prefill(self._manager, self._caches)

    # -- sources ----------------------------------------------------------------------------------------------------

    def publish(self, num_tensors: int, row_nbytes: int, rows: int = 1, prefix_id: int = NO_ID) -> dict[str, object]:
        """A filled cache with rows of fp16; `prefix_id` names its row 0. Answers a cluster.Source."""
        desc = shmkv.CacheDesc(num_tensors, [rows, row_nbytes // 2], shmkv.DataType.DT_FLOAT16)
        keys = [] if prefix_id == NO_ID else [shmkv.CacheKey(self._id, NO_ID, 0, prefix_id)]
        return self._fill(self._manager.allocate_cache(desc, keys, publish=False))

    def publish_blocks(self, num_tensors: int, block_nbytes: int, pool: int, model_id: int) -> dict[str, object]:
        """A filled blocks cache, named by `model_id`. Answers a cluster.Source."""
        desc = shmkv.CacheDesc(num_tensors, [pool, block_nbytes // 2], shmkv.DataType.DT_FLOAT16)
        key = shmkv.BlocksCacheKey(self._id, model_id)
        return self._fill(self._manager.allocate_blocks_cache(desc, key, publish=False))

    def _fill(self, cache: shmkv.KvCache) -> dict[str, object]:
        for index, tensor in enumerate(cache.tensors):
            cluster.bytes_at(tensor.data_ptr, tensor.nbytes)[:] = pattern(index, tensor.nbytes)
        self._manager.publish(cache)
        self._caches[cache.cache_id] = cache
        return self._described(cache)

    def _described(self, cache: shmkv.KvCache) -> dict[str, object]:
        addresses = [tensor.data_ptr for tensor in cache.tensors]
        places = [cluster.file_of(address) for address in addresses]
        return cluster.Source(self._id, cache.cache_id, os.getpid(), places[0][0], [offset for _, offset in places],
                              addresses).to_json()

    def drop(self, cache_id: int) -> int:
        """Free a cache and give its memory back if nobody holds it."""
        self._manager.deallocate_cache(self._caches.pop(cache_id))
        return self._manager.collect()

    def crowd(self, caches: int, rows: int) -> int:
        """`caches` small caches whose `rows` rows have a key each. Answers how many keys that makes."""
        desc = shmkv.CacheDesc(1, [rows, 8], shmkv.DataType.DT_INT8)
        for number in range(caches):
            first = (number + 1) << 32
            keys = [shmkv.CacheKey(self._id, NO_ID, 0, first + row) for row in range(rows)]
            self._crowd.append(self._manager.allocate_cache(desc, keys))
        return caches * rows

    # -- the same bytes by other ways -------------------------------------------------------------------------------

    def share(self, cache_id: int) -> str:
        """A copy of the cache's bytes, tensor after tensor, in multiprocessing.shared_memory. Answers its name."""
        tensors = self._caches[cache_id].tensors
        copy = SharedMemory(create=True, size=sum(tensor.nbytes for tensor in tensors))
        assert copy.buf is not None
        bytes_in_copy = np.frombuffer(copy.buf, np.uint8)
        begin = 0
        for tensor in tensors:
            bytes_in_copy[begin:begin + tensor.nbytes] = cluster.bytes_at(tensor.data_ptr, tensor.nbytes)
            begin += tensor.nbytes
        del bytes_in_copy
        self._copies[copy.name] = copy
        return copy.name

    def unshare(self, name: str) -> None:
        copy = self._copies.pop(name)
        copy.close()
        copy.unlink()

    def listen(self, cache_id: int, path: str, blocks: list[int], block_nbytes: int) -> None:
        """Send the cache, or these blocks of each tensor, over a unix socket, once for each byte that arrives there."""
        tensors = [cluster.bytes_at(tensor.data_ptr, tensor.nbytes) for tensor in self._caches[cache_id].tensors]
        rows = [tensor.reshape(-1, block_nbytes)[block].data for tensor in tensors for block in blocks] if blocks else \
            [tensor.data for tensor in tensors]
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        threading.Thread(target=self._send, args=(listener, rows), daemon=True).start()

    @staticmethod
    def _send(listener: socket.socket, rows: list[memoryview]) -> None:
        with listener, listener.accept()[0] as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            while connection.recv(1):
                for row in rows:
                    connection.sendall(row)

    # -- cycles -----------------------------------------------------------------------------------------------------

    def cycle_begin(self, num_tensors: int, row_nbytes: int, req_id: int) -> int:
        """Free the last cache of the series, allocate and publish the next one. Answers the nanoseconds that took."""
        desc = shmkv.CacheDesc(num_tensors, [1, row_nbytes // 2], shmkv.DataType.DT_FLOAT16)
        key = shmkv.CacheKey(self._id, req_id, 0)
        begin = time.perf_counter_ns()
        self.cycle_end()
        self._cycled = self._manager.allocate_cache(desc, [key], publish=False)
        self._manager.publish(self._cycled)
        return time.perf_counter_ns() - begin

    def cycle_again(self, num_tensors: int, row_nbytes: int, req_id: int, number: int) -> int:
        """The same so often, back to back, after one that is not counted; the key is removed where a decoder would consume it."""
        spent = []
        for _ in range(number + 1):
            spent.append(self.cycle_begin(num_tensors, row_nbytes, req_id))
            self._manager.remove_cache_key(shmkv.CacheKey(self._id, req_id, 0))
        return sum(spent[1:])

    def cycle_end(self) -> None:
        if self._cycled is not None:
            self._manager.deallocate_cache(self._cycled)
            self._cycled = None

    def cycle_source(self) -> dict[str, object]:
        """Where the cache of the cycle lies now: the same place each time, once memory is recycled."""
        assert self._cycled is not None
        return self._described(self._cycled)

    # -- the process ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for name in list(self._copies):
            self.unshare(name)
        self._dist.finalize()


def main() -> None:
    prompt = Prompt(int(sys.argv[1]))
    try:
        programs.serve({
            "publish": prompt.publish, "publish_blocks": prompt.publish_blocks, "drop": prompt.drop, "crowd": prompt.crowd,
            "share": prompt.share, "unshare": prompt.unshare, "listen": prompt.listen, "cycle_begin": prompt.cycle_begin,
            "cycle_again": prompt.cycle_again, "cycle_end": prompt.cycle_end, "cycle_source": prompt.cycle_source,
            "faults": cluster.faults, **prompt.prefill.commands,
        })
    finally:
        prompt.close()


if __name__ == "__main__":
    main()
