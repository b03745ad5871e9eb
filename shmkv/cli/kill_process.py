"""The processes of `shmkv demo --kill`: `python -m shmkv.cli.kill_process prompt|decoder <cluster id> <plan>`.

As those of the plain demo: a JSON command a line on stdin, answers in JSON lines on stdout. Times are CLOCK_MONOTONIC, which all
processes of a host share.
"""
from __future__ import annotations

import math
import select
import sys
import time

import numpy as np

from shmkv import CacheDesc, CacheKey, LLMDataDist, LLMException, LLMRole
from shmkv.cli.demo_plan import DTYPES, PROMPT_ID, Pattern, Plan
from shmkv.cli.demo_process import commands, link_to_prompt, main, prompt_info, say, start_cluster, tensor_bytes

LOST_TIMEOUT_S = 10.0
PIECE_NBYTES = 16


def run_prompt(plan: Plan, cluster_id: int) -> None:
    """Fill and publish the requests that it is told, until the end of stdin or worse."""
    dist = start_cluster(LLMRole.PROMPT, cluster_id)
    pattern = Pattern(plan)
    try:
        say("ready")
        for command in commands():
            request = command["request"]
            cache = dist.kv_cache_manager.allocate_cache(plan.desc(), [CacheKey(PROMPT_ID, request, 0)], publish=False)
            for number, target in enumerate(tensor_bytes(cache)):
                target[:] = pattern.tensor(request, number)
            dist.kv_cache_manager.publish(cache)
            dist.kv_cache_manager.deallocate_cache(cache)
            say("filled")
    finally:
        dist.finalize()


class Decoder:
    """Pulls, and tells what came of it; an error is an answer like others here.

    Its cache holds two requests, interleaved in small pieces: so a pull takes several times as long as the kernel needs to take a
    killed process apart, and there is a middle to be hit.
    """

    def __init__(self, plan: Plan, dist: LLMDataDist) -> None:
        self._plan = plan
        self._dist = dist
        self._manager = dist.kv_cache_manager
        self._pattern = Pattern(plan)
        kind = DTYPES[plan.dtype]
        piece = math.gcd(plan.tensor_nbytes, PIECE_NBYTES) // kind.nbytes
        shape = [plan.tensor_nbytes // kind.nbytes // piece, 2, piece]
        self._cache = self._manager.allocate_cache(CacheDesc(plan.num_tensors, shape, kind, batch_dim_index=1))
        self._lost_ns: list[int] = []
        self._lost_fd = self._manager.link_lost_fd()
        self._manager.on_link_lost(lambda *_: self._lost_ns.append(time.monotonic_ns()))

    def link(self) -> None:
        """For the first time, or again after the peer was lost."""
        self._dist.unlink_clusters([prompt_info()])
        self._lost_ns.clear()
        link_to_prompt(self._dist)
        say("linked")

    def pull(self, request: int) -> None:
        """One pull: its status, and from when to when it was."""
        status, text = "LLM_SUCCESS", ""
        began = time.monotonic_ns()
        try:
            self._manager.pull_cache(CacheKey(PROMPT_ID, request, 0), self._cache)
        except LLMException as error:
            status, text = error.status_code.name, str(error)
        say("pulled", status=status, text=text, began_ns=began, ended_ns=time.monotonic_ns())

    def arrived(self, request: int) -> None:
        """How many tensors have, byte for byte, what they must."""
        right = sum(np.array_equal(np.ascontiguousarray(view.numpy()[:, 0]).reshape(-1).view(np.uint8),
                                   self._pattern.tensor(request, number))
                    for number, view in enumerate(self._cache.tensors))
        say("arrived", tensors=int(right))

    def lost(self) -> None:
        """Wait for the descriptor that tells of lost links, then for the callback, which comes at the same time."""
        select.select([self._lost_fd], [], [], LOST_TIMEOUT_S)
        deadline = time.monotonic() + LOST_TIMEOUT_S
        while not self._lost_ns and time.monotonic() < deadline:
            time.sleep(0.001)
        say("lost", links=self._manager.lost_links(), when_ns=self._lost_ns[:1])


def run_decoder(plan: Plan, cluster_id: int) -> None:
    """Until the end of stdin."""
    dist = start_cluster(LLMRole.DECODER, cluster_id)
    try:
        decoder = Decoder(plan, dist)
        say("ready")
        for command in commands():
            getattr(decoder, command.pop("do"))(**command)
    finally:
        dist.finalize()


if __name__ == "__main__":
    sys.exit(main({"prompt": run_prompt, "decoder": run_decoder}))
