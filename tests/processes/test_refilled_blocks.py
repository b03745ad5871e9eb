"""An owner that fills its blocks again and again while others pull them: whatever is pulled is of one filling, in all tensors."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from peer import Peer, StartPeer, blocks
from reference import SUCCESS

pytestmark = pytest.mark.timeout(300)
BLOCKS: dict[str, Any] = {"num_tensors": 3, "shape": (6, 1 << 18), "dtype": "DT_INT8"}

# Each filling of a block has a number of its own, below 100, in all of its bytes.
REFILL = """
manager, cache = agent.dist.kv_cache_manager, agent.caches["kv"]
tensors = [tensor.numpy() for tensor in cache.tensors]
for number in range({count}):
    block = number % 6
    manager.unbind(cache, [block])
    for tensor in tensors:
        tensor[block] = number % 97 + 1
    if {named} and number % 4 == 0:
        manager.bind(cache, {{block: shmkv.CacheKey(1, number)}}, publish=number % 8 == 0)
    manager.publish(cache, rows=[block])
"""
PULL = """
manager, cache = agent.dist.kv_cache_manager, agent.caches["kv"]
tensors = [tensor.numpy() for tensor in cache.tensors]
said, mixed = {{}}, []
for number in range({count}):
    wanted = [number % 6, (number * 5 + 1) % 6, (number + 3) % 6]
    try:
        manager.pull_blocks(shmkv.BlocksCacheKey(1), cache, wanted, [0, 1, 2])
        name = "LLM_SUCCESS"
    except shmkv.LLMException as error:
        name = error.status_code.name
    said[name] = said.get(name, 0) + 1
    if name == "LLM_SUCCESS":
        seen = [sorted({{int(end) for each in tensors for end in (each[place].min(), each[place].max())}}) for place in range(3)]
        mixed += [(number, each) for each in seen if len(each) > 1]
result = said, mixed
"""


@pytest.mark.parametrize("named", [False, True], ids=["without keys", "with keys now and then"])
def test_pulled_blocks_are_of_one_filling(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int], named: bool) -> None:
    p = prompt(1)
    p.call("allocate_blocks", name="kv", key=blocks(1), **BLOCKS)
    ds: list[Peer] = [decoder(2), decoder(3, env={"SHMKV_COPY": "pread"})]
    for d in ds:
        d.call("allocate_blocks", name="kv", **BLOCKS)
    p.send("execute", code=REFILL.format(count=rounds(2000), named=named))
    for d in ds:
        d.send("execute", code=PULL.format(count=rounds(400)))
    for peer in (*ds, p):
        answer = peer.receive()
        assert answer.outcome == SUCCESS, answer.trace
        if peer is not p:
            said, mixed = answer.value
            assert mixed == [], "blocks with bytes of two fillings that were called a success"
            assert set(said) <= {SUCCESS, "LLM_KV_CACHE_NOT_EXIST"}
    for d in ds:
        assert d.outcome("pull_blocks", key=blocks(1), name="kv", src=[0, 1, 2, 3, 4, 5], dst=[5, 4, 3, 2, 1, 0]) == SUCCESS
        assert (d.read("kv")[:, :, ::-1] == p.read("kv")).all()
