"""Many decoder processes that are linked and do nothing: ``crowd.py FIRST_ID COUNT LIMIT:PROMPT_ID...``.

Child i links to every prompt whose limit is above i. They are forked from one process that has no cluster, which saves their
start. Says "linked" when all are; ends when its stdin does.
"""
from __future__ import annotations

import os
import sys

import cluster
import programs

import shmkv


def stay(cluster_id: int, prompt_ids: list[int], said: int, until: int) -> None:
    """One child: link, tell, wait for the end of `until`, leave."""
    dist = cluster.join(shmkv.LLMRole.DECODER, cluster_id)
    cluster.link(dist, *prompt_ids)
    os.write(said, b".")
    os.read(until, 1)
    dist.finalize()


def fork_all(first_id: int, count: int, prompts: list[tuple[int, int]], said: int, until: tuple[int, int]) -> list[int]:
    """Process ids of the children."""
    children = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(until[1])
                stay(first_id + number, [prompt for limit, prompt in prompts if number < limit], said, until[0])
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    return children


def main() -> None:
    first_id, count = int(sys.argv[1]), int(sys.argv[2])
    prompts = [(int(limit), int(prompt)) for limit, prompt in (pair.split(":") for pair in sys.argv[3:])]
    said, until = os.pipe(), os.pipe()
    children = fork_all(first_id, count, prompts, said[1], until)
    os.close(said[1])
    linked = 0
    while linked < count:
        piece = os.read(said[0], count)
        if not piece:
            break
        linked += len(piece)
    programs.serve({"linked": lambda: linked})
    os.close(until[1])
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
