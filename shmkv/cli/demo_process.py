"""The processes of a demo: `python -m shmkv.cli.demo_process prompt|decoder <cluster id> <plan>`.

Reads a JSON command a line from stdin and answers in JSON lines on stdout; ends at the end of stdin, so that nothing is left when
whoever started it dies.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from shmkv import CacheKey, KvCache, LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode, _copy, segment
from shmkv.cli.demo_plan import PROMPT_ID, Bytes, Pattern, Plan, block_name
from shmkv.config import Settings

LINK_TIMEOUT_MS = 10000
PULL_TIMEOUT_MS = 20000
Message = dict[str, Any]


def say(event: str, **more: Any) -> None:
    """Answer a line."""
    print(json.dumps({"event": event, **more}), flush=True)


def commands() -> Iterator[Message]:
    """Commands until the end of stdin."""
    for line in sys.stdin:
        yield json.loads(line)


@contextmanager
def _untracked() -> Iterator[None]:
    """Keep the standard library's resource tracker out: it would unlink the block of another process, and complain of it.
    SharedMemory has an argument for this only since Python 3.13."""
    register = resource_tracker.register
    resource_tracker.register = lambda name, rtype: None
    try:
        yield
    finally:
        resource_tracker.register = register


class Block:
    """One request in the standard library's shared memory, as [tensor, row, byte]: what a user would write by hand."""

    def __init__(self, name: str, plan: Plan, *, create: bool) -> None:
        self.name = name
        with _untracked():
            self._memory = SharedMemory(name, create=create, size=plan.request_nbytes)
        shape = (plan.num_tensors, 1, plan.tensor_nbytes)
        self.tensors: Bytes = np.ndarray(shape, np.uint8, buffer=self._memory.buf)

    def close(self) -> None:
        """Unmap; no array of it is alive then."""
        del self.tensors
        self._memory.close()


def tensor_bytes(cache: KvCache) -> list[Bytes]:
    """The bytes of each tensor of a cache, zero-copy."""
    return [view.numpy().reshape(-1).view(np.uint8) for view in cache.tensors]


def start_cluster(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """Join the namespace."""
    config = LLMConfig()
    config.sync_kv_timeout = PULL_TIMEOUT_MS
    dist = LLMDataDist(role, cluster_id)
    dist.init(config.generate_options())
    return dist


# -- the prompt --------------------------------------------------------------------------------------------------------

class Prompt:
    """Fills requests, publishes them, and forgets them: the key alone keeps a request until it was pulled."""

    def __init__(self, plan: Plan, dist: LLMDataDist, blocks: list[Block]) -> None:
        self._plan = plan
        self._manager = dist.kv_cache_manager
        self._blocks = blocks
        self._pattern = Pattern(plan)
        self._segments: set[int] = set()

    def fill(self, request: int, slot: int) -> None:
        """The safe way: not pullable, fill, publish. The caches of requests that were pulled give their memory for it."""
        cache = self._manager.allocate_cache(self._plan.desc(), [CacheKey(PROMPT_ID, request, 0)], publish=False)
        self._segments.add(cache.per_device_tensor_addrs[0][0])
        self._write(cache, request, self._blocks[slot])
        self._manager.publish(cache)
        if request == self._plan.corrupt:
            tensor_bytes(cache)[self._plan.num_tensors // 2][self._plan.tensor_nbytes // 2] ^= 1
        self._manager.deallocate_cache(cache)
        say("filled", request=request, slot=slot, segments=len(self._segments))

    def _write(self, cache: KvCache, request: int, block: Block) -> None:
        for number, target in enumerate(tensor_bytes(cache)):
            content = self._pattern.tensor(request, number)
            target[:] = content
            block.tensors[number, 0] = content


def run_prompt(plan: Plan, cluster_id: int) -> None:
    """Until the end of stdin."""
    dist = start_cluster(LLMRole.PROMPT, cluster_id)
    namespace = Settings.from_options({}).namespace
    blocks: list[Block] = []
    try:
        for slot in range(plan.slots):
            blocks.append(Block(block_name(namespace, slot), plan, create=True))
        prompt = Prompt(plan, dist, blocks)
        say("ready")
        for command in commands():
            prompt.fill(command["request"], command["slot"])
    finally:
        for block in blocks:
            block.close()
            segment.unlink(block.name)
        dist.finalize()


# -- the decoders ------------------------------------------------------------------------------------------------------

class Decoder:
    """Pulls requests, copies the same bytes by numpy as well, and compares every byte of both."""

    def __init__(self, plan: Plan, dist: LLMDataDist) -> None:
        self._plan = plan
        self._manager = dist.kv_cache_manager
        self._pattern = Pattern(plan)
        self._cache = self._manager.allocate_cache(plan.desc())
        self._private: Bytes = np.full((plan.num_tensors, 1, plan.tensor_nbytes), 0xFF, np.uint8)
        self._blocks: dict[str, Block] = {}

    def pull(self, request: int, slot: int) -> None:
        """Both ways, in turns the one or the other first; then look at the bytes, while nobody counts the time."""
        block = self._block(block_name(Settings.from_options({}).namespace, slot))
        key = CacheKey(PROMPT_ID, request, 0)
        ways: dict[str, Callable[[], None]] = {
            "pull_ns": lambda: self._manager.pull_cache(key, self._cache),
            "numpy_ns": lambda: self._copy_by_numpy(block),
        }
        order = list(ways) if request % 2 == 0 else list(reversed(ways))
        took = {way: _timed(ways[way]) for way in order}
        say("copied", request=request, **took)
        say("checked", request=request, wrong=self._wrong_bytes(request))

    def _block(self, name: str) -> Block:
        if name not in self._blocks:
            self._blocks[name] = Block(name, self._plan, create=False)
        return self._blocks[name]

    def _copy_by_numpy(self, block: Block) -> None:
        for number in range(self._plan.num_tensors):
            self._private[number, 0] = block.tensors[number, 0]

    def _wrong_bytes(self, request: int) -> str:
        """"" if all bytes of both copies are those of the request, else how many are not, and where the first one is."""
        for way, tensors in (("pulled", tensor_bytes(self._cache)), ("copied by numpy", self._private[:, 0])):
            for number, found in enumerate(tensors):
                wanted = self._pattern.tensor(request, number)
                if not np.array_equal(found, wanted):
                    wrong = np.flatnonzero(found != wanted)
                    return f"{len(wrong)} of the bytes {way} wrong in tensor {number}, the first one at byte {wrong[0]}"
        return ""

    def close(self) -> None:
        for block in self._blocks.values():
            block.close()


def _timed(call: Callable[[], None]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def prompt_info() -> LLMClusterInfo:
    """The prompt process as links are made to it; the addresses are asked for and not used."""
    info = LLMClusterInfo()
    info.remote_cluster_id = PROMPT_ID
    info.append_local_ip_info("127.0.0.1", 1)
    info.append_remote_ip_info("127.0.0.1", 1)
    return info


def link_to_prompt(dist: LLMDataDist) -> None:
    """Link to the prompt process, which may still be starting."""
    status, _ = dist.link_clusters([prompt_info()], LINK_TIMEOUT_MS)
    if status is not LLMStatusCode.LLM_SUCCESS:
        raise LLMException(f"cannot link to the prompt process: {status}", status_code=status)


def run_decoder(plan: Plan, cluster_id: int) -> None:
    """Until the end of stdin."""
    dist = start_cluster(LLMRole.DECODER, cluster_id)
    try:
        link_to_prompt(dist)
        decoder = Decoder(plan, dist)
        say("ready", kernel=_copy.current()["kernel"])
        for command in commands():
            decoder.pull(command["request"], command["slot"])
        decoder.close()
    finally:
        dist.finalize()


def main(roles: dict[str, Callable[[Plan, int], None]]) -> int:
    """Run the role that the arguments name; an error of the library is told as an event."""
    role, cluster_id, plan = sys.argv[1:4]
    try:
        roles[role](Plan.from_json(plan), int(cluster_id))
    except (LLMException, OSError) as error:
        say("error", text=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main({"prompt": run_prompt, "decoder": run_decoder}))
