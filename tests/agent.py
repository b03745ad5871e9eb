"""The program of a Peer: reads one JSON command a line on stdin, answers one JSON line on stdout.

A command is ``[name, arguments]``, an answer ``{"value": ..., "ms": ...}`` or ``{"error": ..., "ms": ...}``.
At the end of stdin the program ends as any program does: what the library does at exit is part of every test.
"""
from __future__ import annotations

import base64
import gc
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import reference
from agent_caches import CacheAgent
from agent_keys import make_key
from agent_pushes import PushAgent

import shmkv


def cluster_info(remote_cluster_id: int) -> shmkv.LLMClusterInfo:
    """What link_clusters wants; the addresses are checked for form and never used."""
    info = shmkv.LLMClusterInfo()
    info.remote_cluster_id = remote_cluster_id
    info.append_local_ip_info("127.0.0.1", 1)
    info.append_remote_ip_info("127.0.0.1", 1)
    return info


def _links(result: tuple[Any, list[Any]]) -> list[Any]:
    overall, each = result
    return [overall.name, [status.name for status in each]]


class Agent(PushAgent, CacheAgent):
    """One method a command; caches are called by names that the test chose."""

    def __init__(self) -> None:
        PushAgent.__init__(self)
        CacheAgent.__init__(self)
        self.dist: Any = None
        self.caches: dict[str, Any] = {}

    # the process and its cluster

    def init(self, role: str, cluster_id: int, options: dict[str, Any], raw: dict[str, Any]) -> None:
        config = shmkv.LLMConfig()
        for name, value in options.items():
            setattr(config, name, value)
        self.dist = shmkv.LLMDataDist(shmkv.LLMRole[role], cluster_id)
        self.dist.init({**config.generate_options(), **raw})

    def finalize(self, **how: int) -> list[int] | None:
        left = self.dist.finalize(**how)
        return left if left is None else [key.req_id for key in left]

    def switch_role(self, role: str, options: dict[str, str] | None = None) -> None:
        self.dist.switch_role(shmkv.LLMRole[role], options)

    def execute(self, code: str) -> Any:
        """Run statements with this agent as ``agent``; what they leave in ``result`` is the answer."""
        scope: dict[str, Any] = {"agent": self, "shmkv": shmkv, "np": np}
        exec(code, scope)
        return scope.get("result")

    # caches and keys

    def allocate(self, name: str, num_tensors: int = 4, shape: tuple[int, ...] = (2, 8),
                 dtype: str = "DT_FLOAT16", batch_dim: int = 0, keys: tuple[list[Any], ...] = (),
                 kv_format: str | None = None, **more: Any) -> int:
        desc = shmkv.CacheDesc(num_tensors, list(shape), shmkv.DataType[dtype], batch_dim_index=batch_dim,
                               kv_tensor_format=kv_format)
        made = self.dist.kv_cache_manager.allocate_cache(desc, [make_key(key) for key in keys], **more)
        self.caches[name] = made
        return int(made.cache_id)

    def allocate_tensors(self, name: str, shapes: list[list[int]], dtypes: list[str], batch_dim: int = 0,
                         keys: tuple[list[Any], ...] = (), **more: Any) -> int:
        """The same for tensors that differ."""
        kinds = [shmkv.DataType[dtype] for dtype in dtypes]
        desc = shmkv.CacheDesc.of_tensors(shapes, kinds, batch_dim_index=batch_dim)
        made = self.dist.kv_cache_manager.allocate_cache(desc, [make_key(key) for key in keys], **more)
        self.caches[name] = made
        return int(made.cache_id)

    def allocate_blocks(self, name: str, num_tensors: int = 4, shape: tuple[int, ...] = (8, 16), dtype: str = "DT_INT8",
                        key: list[Any] | None = None, **more: Any) -> int:
        desc = shmkv.CacheDesc(num_tensors, list(shape), shmkv.DataType[dtype])
        made = self.dist.kv_cache_manager.allocate_blocks_cache(desc, make_key(key) if key else None, **more)
        self.caches[name] = made
        return int(made.cache_id)

    def deallocate(self, name: str) -> None:
        self.dist.kv_cache_manager.deallocate_cache(self.caches[name])

    def drop(self, name: str) -> None:
        del self.caches[name]
        gc.collect()

    def remove_key(self, key: list[Any]) -> None:
        self.dist.kv_cache_manager.remove_cache_key(make_key(key))

    def publish(self, name: str, **how: Any) -> None:
        self.dist.kv_cache_manager.publish(self.caches[name], **how)

    def bind(self, name: str, keys: list[tuple[int, list[Any]]], **how: Any) -> None:
        bound = {row: make_key(key) for row, key in keys}
        self.dist.kv_cache_manager.bind(self.caches[name], bound, **how)

    def unbind(self, name: str, rows: list[int]) -> None:
        self.dist.kv_cache_manager.unbind(self.caches[name], rows)

    def expire(self, older_than_ms: int) -> int:
        return int(self.dist.kv_cache_manager.expire(older_than_ms))

    def stats(self) -> dict[str, int]:
        return dict(self.dist.kv_cache_manager.stats())

    def collect(self) -> int:
        return int(self.dist.kv_cache_manager.collect())

    # bytes

    def fill(self, name: str, generation: int) -> None:
        cache = self.caches[name]
        cache_bytes.write(cache, reference.pattern(cache_bytes.geometry_of(cache), generation))

    def noise(self, name: str, seed: int) -> None:
        cache = self.caches[name]
        cache_bytes.write(cache, reference.noise(cache_bytes.geometry_of(cache), seed))

    def noise_tensors(self, name: str, seed: int) -> None:
        """The same for tensors that may differ: each one's seed is the number before it plus one."""
        cache = self.caches[name]
        shapes = cache_bytes.geometries_of(cache)
        cache_bytes.write(cache, [reference.noise(shape, seed + place)[0] for place, shape in enumerate(shapes)])

    def canary(self, name: str) -> None:
        cache = self.caches[name]
        cache_bytes.write(cache, [reference.canary(shape)[0] for shape in cache_bytes.geometries_of(cache)])

    def read(self, name: str) -> dict[str, Any]:
        content = cache_bytes.read(self.caches[name])
        return {"shape": content.shape, "bytes": base64.b64encode(content.tobytes()).decode()}

    def read_tensors(self, name: str) -> list[dict[str, Any]]:
        return [{"shape": content.shape, "bytes": base64.b64encode(content.tobytes()).decode()}
                for content in cache_bytes.read_tensors(self.caches[name])]

    def digest(self, name: str) -> str:
        return hashlib.sha256(b"".join(tensor.tobytes() for tensor in cache_bytes.read_tensors(self.caches[name]))).hexdigest()

    # links and pulls

    def link(self, ids: list[int], timeout: int = 20000) -> list[Any]:
        return _links(self.dist.link_clusters([cluster_info(each) for each in ids], timeout))

    def unlink(self, ids: list[int], timeout: int = 20000, force: bool = False) -> list[Any]:
        return _links(self.dist.unlink_clusters([cluster_info(each) for each in ids], timeout, force))

    def check_link(self, cluster_id: int) -> None:
        self.dist.check_link_status(cluster_id)

    def pull(self, key: list[Any], name: str, **how: Any) -> None:
        self.dist.kv_cache_manager.pull_cache(make_key(key), self.caches[name], **how)

    def pull_blocks(self, key: list[Any], name: str, src: list[int], dst: list[int], **how: Any) -> None:
        self.dist.kv_cache_manager.pull_blocks(make_key(key), self.caches[name], src, dst, **how)

    # what the library logs

    def listen(self) -> None:
        """Keep what the library says from now on, instead of showing it."""
        self.said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())     # type: ignore[method-assign]
        logging.getLogger("shmkv").addHandler(handler)

    def heard(self) -> list[str]:
        return self.said

    # several commands at once

    def batch(self, commands: list[list[Any]]) -> list[dict[str, Any]]:
        return [answer(self, name, arguments) for name, arguments in commands]

    def parallel(self, batches: list[list[list[Any]]]) -> list[list[dict[str, Any]]]:
        """Each batch on a thread of its own, all starting together."""
        answers: list[list[dict[str, Any]]] = [[] for _ in batches]
        together = threading.Barrier(len(batches))

        def run(index: int) -> None:
            together.wait()
            answers[index] = self.batch(batches[index])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


def answer(agent: Agent, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one command; every exception becomes an answer that the test judges."""
    command: Callable[..., Any] = getattr(agent, name)
    began = time.monotonic()
    try:
        said: dict[str, Any] = {"value": command(**arguments)}
    except Exception as error:
        status = error.status_code.name if isinstance(error, shmkv.LLMException) else None
        said = {"error": {"kinds": [kind.__name__ for kind in type(error).__mro__], "status": status,
                          "text": str(error), "trace": traceback.format_exc()}}
    said["ms"] = (time.monotonic() - began) * 1000
    return said


def decode(item: dict[str, Any]) -> Any:
    """JSON has no range and no HeadSlice: Peer sends {"range": [start, stop, step]} and {"heads": arguments}."""
    if set(item) == {"heads"}:
        return shmkv.HeadSlice(*item["heads"])
    return range(*item["range"]) if set(item) == {"range"} else item


def main() -> None:
    # What the library might print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    agent = Agent()
    for line in sys.stdin:
        name, arguments = json.loads(line, object_hook=decode)
        answers.write(json.dumps(answer(agent, name, arguments)) + "\n")


if __name__ == "__main__":
    main()
