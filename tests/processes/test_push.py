"""Pushes between real processes: bytes against numpy, and links in use from both sides."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, by_id
from pushes import WORKERS, start

pytestmark = pytest.mark.timeout(120)
OK, TIMEOUT = "LLM_SUCCESS", "LLM_WAIT_PROCESS_TIMEOUT"
DTYPES = {"DT_INT8": 1, "DT_FLOAT16": 2, "DT_FLOAT": 4, "DT_INT64": 8}


# -- bytes -------------------------------------------------------------------------------------------------------------

def random_cache(rng: random.Random, peer: Peer, name: str, rows: int) -> list[tuple[int, int]]:
    """Tensors that may differ, in a random shape with the batch in any dimension: (bytes, bytes of a row) of each."""
    tensors, dim = 2 * rng.randint(1, 4), rng.randrange(3)
    shapes, dtypes, sizes = [], [], []
    for _ in range(tensors):
        rest = [rng.randint(1, 9) for _ in range(2)]
        rest.insert(dim, rows)
        dtype = rng.choice(list(DTYPES))
        shapes.append(rest)
        dtypes.append(dtype)
        nbytes = int(np.prod(rest)) * DTYPES[dtype]
        sizes.append((nbytes, nbytes // rows))
    peer.call("allocate_tensors", name=name, shapes=shapes, dtypes=dtypes, batch_dim=dim)
    return sizes


def row_of(tensor: np.ndarray[Any, Any], row: int) -> np.ndarray[Any, Any]:
    """One row of a tensor as it is read: (outer, rows, inner) bytes."""
    return np.ascontiguousarray(tensor[:, row, :]).reshape(-1)


def test_rows_of_random_caches_against_numpy(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    rng = random.Random(20)
    source, target = prompt(), decoder()
    for number in range(rounds(25)):
        rows = rng.randint(1, 5)
        sizes = random_cache(rng, source, "src", rows)
        source.call("noise_tensors", name="src", seed=number)
        room = [(nbytes + rng.randint(0, 40)) for _, nbytes in sizes]
        target.call("allocate_tensors", name="dst", shapes=[[1, nbytes] for nbytes in room], dtypes=["DT_INT8"] * len(room))
        target.call("canary", name="dst")
        base = target.call("addresses", name="dst")
        row, first = rng.randrange(rows), rng.randrange(len(sizes) // 2)
        layers = range(first, rng.randint(first + 1, len(sizes) // 2))
        chosen = range(2 * layers.start, 2 * layers.stop)
        offsets = {each: rng.randint(0, room[each] - sizes[each][1]) for each in chosen}
        source.call("push", name="src", configs=[[2, [base[each] + offsets[each] for each in chosen], layers, row]])
        assert source.call("results") == [OK]
        wanted, found = source.read_tensors("src"), target.read_tensors("dst")
        for each, nbytes in enumerate(room):
            memory = np.full(nbytes, 0x5A, np.uint8)
            if each in offsets:
                memory[offsets[each]:offsets[each] + sizes[each][1]] = row_of(wanted[each], row)
            np.testing.assert_array_equal(found[each].reshape(-1), memory, err_msg=f"round {number}, tensor {each}")
        for peer, name in ((source, "src"), (target, "dst")):
            peer.call("deallocate", name=name)


def test_small_layers_of_a_large_transfer(prompt: StartPeer, decoder: StartPeer) -> None:
    """Together they are above the threshold from which stores go past the processor's cache, each for itself is not."""
    source, target, nbytes, room = prompt(), decoder(), 70_001, 70_100
    for peer, name, row in ((source, "src", nbytes), (target, "dst", room)):
        peer.call("allocate", name=name, num_tensors=64, shape=(1, row), dtype="DT_INT8")
    source.call("noise", name="src", seed=1)
    target.call("canary", name="dst")
    offsets = [number % (room - nbytes) for number in range(64)]
    addresses = [address + offset for address, offset in zip(target.call("addresses", name="dst"), offsets, strict=True)]
    source.call("push", name="src", configs=[[2, addresses]])
    assert source.call("results") == [OK]
    wanted, found = source.read("src"), target.read("dst")
    for number, offset in enumerate(offsets):
        memory = np.full(room, 0x5A, np.uint8)
        memory[offset:offset + nbytes] = wanted[number].reshape(-1)
        np.testing.assert_array_equal(found[number].reshape(-1), memory, err_msg=f"tensor {number}")


def test_blocks_of_random_caches_against_numpy(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    rng = random.Random(21)
    source, target = prompt(), decoder()
    for number in range(rounds(25)):
        blocks, places, count = rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, 10)
        inner, tensors = rng.randint(1, 70), 2 * rng.randint(1, 3)
        source.call("allocate", name="src", num_tensors=tensors, shape=(blocks, inner), dtype="DT_INT8")
        source.call("noise", name="src", seed=number)
        target.call("allocate", name="dst", num_tensors=tensors, shape=(places, inner), dtype="DT_INT8")
        target.call("canary", name="dst")
        src, dst = ([rng.randrange(among) for _ in range(count)] for among in (blocks, places))
        source.call("push", name="src", configs=[[2, target.call("addresses", name="dst")]], src_block_indices=src,
                    dst_block_indices=dst, dst_block_memory_size=rng.choice([None, 0, inner]))
        assert source.call("results") == [OK]
        wanted = np.full((tensors, 1, places, inner), 0x5A, np.uint8)
        for one, other in zip(src, dst, strict=True):       # of equal destinations the last one stays
            wanted[:, :, other] = source.read("src")[:, :, one]
        np.testing.assert_array_equal(target.read("dst"), wanted, err_msg=f"round {number}")
        for peer, name in ((source, "src"), (target, "dst")):
            peer.call("deallocate", name=name)


def test_a_big_push_streams_and_shares_its_copy(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(env={"SHMKV_COPY_THREADS": "2"}), decoder()
    base = start(source, target, (1, 9 << 20), 2)
    source.call("push", name="src", configs=[[2, base]])
    assert source.call("results") == [OK]
    assert target.call("digest", name="dst") == source.call("digest", name="src")


def test_two_tensors_may_go_to_two_caches_and_to_one_place(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    target.call("allocate", name="other")
    target.call("canary", name="other")
    others = target.call("addresses", name="other")
    source.call("push", name="src", configs=[[2, [base[0], others[0], base[1], base[1]]]])
    assert source.call("results") == [OK]
    wanted, found = source.read("src"), target.read("dst")
    np.testing.assert_array_equal(found[0, :, 0], wanted[0, :, 0])
    np.testing.assert_array_equal(target.read("other")[0, :, 0], wanted[1, :, 0])
    np.testing.assert_array_equal(found[1, :, 0], wanted[3, :, 0])      # of one layer the second one stays


def test_memory_that_the_prompt_registered_is_a_source(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    code = """
agent.memory = np.arange(4 * 2 * 16, dtype=np.uint8).reshape(4, 2, 16)
agent.caches["src"] = agent.dist.kv_cache_manager.register_cache(shmkv.CacheDesc(4, [2, 16], shmkv.DataType.DT_INT8),
                                                                 list(agent.memory))
"""
    source.call("execute", code=code)
    source.call("push", name="src", configs=[[2, base, None, 1]])
    assert source.call("results") == [OK]
    np.testing.assert_array_equal(target.read("dst")[:, 0, 0], np.arange(128, dtype=np.uint8).reshape(4, 2, 16)[:, 1])


# -- links in use ------------------------------------------------------------------------------------------------------

def test_two_decoders_and_two_configs(prompt: StartPeer, decoder: StartPeer) -> None:
    source, one, other = prompt(), decoder(2), decoder(3)
    base = start(source, one)
    other.call("allocate", name="dst")
    other.call("canary", name="dst")
    source.call("push", name="src", configs=[[2, base, None, 0], [3, other.call("addresses", name="dst"), None, 1]])
    assert source.call("results") == [OK, OK]
    wanted = source.read("src")
    np.testing.assert_array_equal(one.read("dst")[:, :, 0], wanted[:, :, 0])
    np.testing.assert_array_equal(other.read("dst")[:, :, 0], wanted[:, :, 1])


def test_pushes_and_pulls_of_one_link_at_the_same_time(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int]) -> None:
    """Four threads of the prompt push, each to a row of its own, while two of the decoder pull from another cache."""
    source, target = prompt(), decoder()
    base = start(source, target, (4, 4096))
    cache_id = source.call("allocate", name="pulled", shape=(2, 4096))
    source.call("noise", name="pulled", seed=9)
    for name in ("one", "two"):
        target.call("allocate", name=name, shape=(1, 4096))
    rounds_each, nbytes = rounds(40), 8192
    pushes = [[command for turn in range(rounds_each) for command in
               (("push", {"name": "src", "task": f"{row}", "configs": [[2, [at + row * nbytes for at in base], None, row]]}),
                ("results", {"task": f"{row}"}))] for row in range(4)]
    pulls = [[("pull", {"key": by_id(1, cache_id, turn % 2), "name": name}) for turn in range(2 * rounds_each)]
             for name in ("one", "two")]
    source.send("parallel", batches=pushes)
    target.send("parallel", batches=pulls)
    pushed, pulled = source.receive(), target.receive()
    assert all("error" not in each for batch in pulled.value for each in batch)
    assert all(each.get("value") in (None, [OK]) and "error" not in each for batch in pushed.value for each in batch)
    np.testing.assert_array_equal(target.read("dst"), source.read("src"))
    np.testing.assert_array_equal(target.read("one")[:, :, 0], source.read("pulled")[:, :, 1])
    assert source.call("execute", code=WORKERS) == []


def test_a_slow_layer_is_waited_for_by_one_thread_and_holds_no_lock(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    cache_id = source.call("allocate", name="pulled")
    source.call("push", name="src", configs=[[2, base]], slow=[1])
    source.call("wait_asked", layer=1)
    assert source.call("results", timeout=0) == [TIMEOUT]
    threads = "import threading\nresult = [each.name for each in threading.enumerate()].count('shmkv-push')"
    assert source.call("execute", code=threads) == 1
    np.testing.assert_array_equal(target.read("dst")[:2, :, 0], source.read("src")[:2, :, 0])
    assert (target.read("dst")[2:] == 0x5A).all()
    target.call("allocate", name="buffer")
    target.call("pull", key=by_id(1, cache_id), name="buffer")
    source.call("computed", layer=1)
    assert source.call("results") == [OK]
    assert source.call("execute", code=WORKERS) == []


def test_pushing_leaves_records_for_the_next_links(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    for _ in range(6):
        source.call("push", name="src", configs=[[2, base]])
        assert source.call("results") == [OK]
        target.call("unlink", ids=[1])
        target.call("link", ids=[1])
    records = "from shmkv import _link_record\nresult = len(_link_record.living(agent.dist._cluster.directory.region))"
    assert source.call("execute", code=records) == 1
    used = "from shmkv import _link_record\n" \
           "result = [_link_record.read(agent.dist._cluster.directory.region, slot)['serial'] for slot in range(4)]"
    assert source.call("execute", code=used) == [7, 0, 0, 0]
