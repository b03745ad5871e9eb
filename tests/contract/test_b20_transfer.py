"""Contract, appendix B, item 20, and the table of events of a transfer."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer

pytestmark = pytest.mark.timeout(60)
OK, INVALID, FAILED = "LLM_SUCCESS", "LLM_PARAM_INVALID", "LLM_FAILED"
ROW = 16                        # bytes of a row of [2, 8] FLOAT16; a tensor has 32, and the next one begins 64 bytes on


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    source, target = prompt(), decoder()
    source.call("allocate", name="src")
    source.call("noise", name="src", seed=7)
    source.call("listen")
    target.call("allocate", name="dst")
    target.call("canary", name="dst")
    return source, target


def push(source: Peer, addresses: list[int], **more: Any) -> list[str | None]:
    """Layer 0 to two addresses: the results."""
    source.call("push", name="src", configs=[[2, addresses, range(1)]], **more)
    return list(source.call("results"))


@pytest.mark.parametrize(("first", "second", "result"), [
    (0, 0, OK), (ROW, ROW, OK), (0, ROW, OK), (3, 5, OK),
    (-1, 0, INVALID), (0, -1, INVALID),             # in front of the tensor: the segment's header, the gap behind the tensor before
    (ROW + 1, 0, INVALID), (0, ROW + 1, INVALID),   # one byte beyond its end
    (32, 0, INVALID), (0, 47, INVALID),             # in the gap behind it
    (0, 64, OK),                                    # the next tensor's
])
def test_b20_addresses_to_the_byte(pair: tuple[Peer, Peer], first: int, second: int, result: str) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    assert push(source, [base[0] + first, base[1] + second]) == [result]
    found, wanted = target.read("dst"), source.read("src")
    if result != OK:
        assert (found == 0x5A).all()
        return
    memory = np.full((5, 64), 0x5A, np.uint8).reshape(-1)
    memory[first:first + ROW] = wanted[0, 0, 0]
    memory[64 + second:64 + second + ROW] = wanted[1, 0, 0]
    np.testing.assert_array_equal(found.reshape(4, 32), memory.reshape(5, 64)[:4, :32])


@pytest.mark.parametrize("address", [0, 1, 64, 2**47, 2**63, 2**64 - 1])
def test_b20_addresses_that_nobody_has(pair: tuple[Peer, Peer], address: int) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    assert push(source, [base[0], address]) == [INVALID]
    assert (target.read("dst") == 0x5A).all()           # the first address was good, and was not written to all the same


def test_an_address_of_a_later_layer_stops_the_config_before_its_first_byte(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    source.call("push", name="src", configs=[[2, [*base[:3], 64]]])
    assert source.call("results") == [INVALID]
    assert (target.read("dst") == 0x5A).all()


def test_b20_address_of_a_freed_cache(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    target.call("deallocate", name="dst")
    assert push(source, base[:2]) == [INVALID]
    assert any("lies in no tensor of a living cache" in said for said in source.call("heard"))


def test_memory_that_the_decoder_registered_is_not_reached(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    code = """
agent.memory = np.full((2, 2, 8), 0x5A, np.uint8)
agent.dist.kv_cache_manager.register_cache(shmkv.CacheDesc(2, [2, 8], shmkv.DataType.DT_INT8), list(agent.memory))
result = [each.ctypes.data for each in agent.memory]
"""
    assert push(source, target.call("execute", code=code)) == [INVALID]
    heard = source.call("heard")
    assert any("allocated or registered by address" in said for said in heard), heard
    assert target.call("execute", code="result = bool((agent.memory == 0x5A).all())")


def test_b20_two_configs_to_one_cluster_have_results_of_their_own(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    source.call("push", name="src", configs=[[2, base[:2], range(1)], [2, [base[2], 64], range(1, 2)], [2, base]])
    assert source.call("results") == [OK, INVALID, None]
    source.call("push", name="src", configs=[[2, base[:2], range(1)], [2, base[2:], range(1, 2), 1]])
    assert source.call("results") == [OK, OK]
    found, wanted = target.read("dst"), source.read("src")
    np.testing.assert_array_equal(found[:2, :, 0], wanted[:2, :, 0])
    np.testing.assert_array_equal(found[2:, :, 0], wanted[2:, :, 1])


def test_b20_synchronizer_that_raises(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    source.call("push", name="src", raises=[1], configs=[[2, base[:2], range(1)], [2, base], [2, base[2:], range(1, 2)]])
    assert source.call("synchronize") == FAILED
    assert source.call("results") == [OK, FAILED, FAILED]
    assert any("its synchronizer raised" in said for said in source.call("heard"))


def test_b20_synchronizer_that_raises_leaves_what_it_was_not_for(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    source.call("push", name="src", raises=[0], configs=[[2, base[:2], range(1)], [2, base[2:], range(1, 2)]])
    assert source.call("results") == [FAILED, None]


def test_layers_that_no_config_has_are_not_asked_for(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("push", name="src", configs=[[2, target.call("addresses", name="dst")[2:], range(1, 2)]])
    assert source.call("results") == [OK]
    assert source.call("asked") == [[1, None]]


@pytest.mark.parametrize(("source_blocks", "target_blocks", "nbytes", "result"), [
    ([2], [0], None, INVALID), ([0], [2], None, INVALID), ([0, 1], [0, 2**32 - 1], None, INVALID), ([0], [2**63], None, INVALID),
    ([0], [0], 15, INVALID), ([0], [0], 17, INVALID), ([0], [0], 2**64 - 1, INVALID), ([1], [0], 16, OK), ([1, 0], [0, 1], 0, OK),
])
def test_blocks_and_their_bytes(pair: tuple[Peer, Peer], source_blocks: list[int], target_blocks: list[int], nbytes: int | None,
                                result: str) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    assert push(source, base[:2], src_block_indices=source_blocks, dst_block_indices=target_blocks,
                dst_block_memory_size=nbytes) == [result]
    wanted = np.full((4, 1, 2, ROW), 0x5A, np.uint8)
    if result == OK:
        wanted[:2, :, target_blocks] = source.read("src")[:2, :, source_blocks]
    np.testing.assert_array_equal(target.read("dst"), wanted)


def test_a_row_that_the_source_does_not_have(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    source.call("push", name="src", configs=[[2, target.call("addresses", name="dst"), None, 2]])
    assert source.call("results") == [INVALID]
    assert (target.read("dst") == 0x5A).all()


def test_not_linked_and_linked_no_more(pair: tuple[Peer, Peer]) -> None:
    source, target = pair
    base = target.call("addresses", name="dst")
    assert push(source, base[:2]) == [OK]
    target.call("unlink", ids=[1])
    assert push(source, base[:2]) == ["LLM_NOT_YET_LINK"]
    target.call("link", ids=[1])
    assert push(source, base[:2]) == [OK]
    assert source.call("unlink", ids=[2]) == [OK, [OK]]
    assert push(source, base[:2]) == ["LLM_NOT_YET_LINK"]
    target.call("unlink", ids=[1])                      # its own end of the link that the prompt removed
    target.call("link", ids=[1])
    assert push(source, base[:2]) == [OK]


def test_a_push_to_the_own_cluster_needs_no_link(prompt: StartPeer) -> None:
    source = prompt()
    source.call("allocate", name="src")
    source.call("noise", name="src", seed=7)
    source.call("allocate", name="dst")
    source.call("canary", name="dst")
    base = source.call("addresses", name="dst")
    source.call("push", name="src", configs=[[1, base, None, 1]])
    assert source.call("results") == [OK]
    found, wanted = source.read("dst"), source.read("src")
    np.testing.assert_array_equal(found[:, :, 0], wanted[:, :, 1])
    assert (found[:, :, 1] == 0x5A).all()
    source.call("push", name="src", configs=[[1, base]], src_block_indices=[0, 1], dst_block_indices=[1, 0])
    assert source.call("results") == [OK]
    np.testing.assert_array_equal(source.read("dst"), wanted[:, :, ::-1])
    for row, addresses in ((2, base), (0, [*base[:3], base[3] + ROW + 1]), (0, [base[0] - 1, *base[1:]]), (0, [64, *base[1:]])):
        source.call("push", name="src", configs=[[1, addresses, None, row]])
        assert source.call("results") == [INVALID]
    source.call("push", name="src", configs=[[1, [each + 8 for each in source.call("addresses", name="src")]]])
    assert source.call("results") == [OK]               # on itself: as if through a temporary
    np.testing.assert_array_equal(source.read("src").reshape(4, 32)[:, 8:24], wanted.reshape(4, 32)[:, :16])
