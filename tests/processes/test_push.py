"""Pushes between real processes: bytes against numpy, links in use from both sides, what ends in the middle of a transfer."""
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer import SHM, Namespace, Peer, StartPeer, by_id
from reference import SUCCESS

pytestmark = pytest.mark.timeout(120)
OK, INVALID, TIMEOUT = "LLM_SUCCESS", "LLM_PARAM_INVALID", "LLM_WAIT_PROCESS_TIMEOUT"
DTYPES = {"DT_INT8": 1, "DT_FLOAT16": 2, "DT_FLOAT": 4, "DT_INT64": 8}


def start(source: Peer, target: Peer, shape: tuple[int, ...] = (2, 8), tensors: int = 4) -> list[int]:
    """A source of noise and a destination of canaries, alike: the destination's addresses."""
    source.call("allocate", name="src", num_tensors=tensors, shape=shape)
    source.call("noise", name="src", seed=3)
    target.call("allocate", name="dst", num_tensors=tensors, shape=shape)
    target.call("canary", name="dst")
    return list(target.call("addresses", name="dst"))


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


WORKERS = """
import threading
for thread in threading.enumerate():
    if thread.name == "shmkv-push":
        thread.join()           # its results are there: it is about to end
result = [thread.name for thread in threading.enumerate() if thread.name == "shmkv-push"]
"""


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


# -- caches that go meanwhile ------------------------------------------------------------------------------------------

def test_the_source_stays_until_the_task_has_ended(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(env={"SHMKV_RECYCLE_BYTES": "0"}), decoder()
    base = start(source, target)
    wanted, before = source.read("src"), namespace.segments()
    source.call("push", name="src", configs=[[2, base]], slow=[0])
    source.call("wait_asked", layer=0)
    source.call("deallocate", name="src")
    assert namespace.segments() == before
    source.call("computed", layer=0)
    assert source.call("results") == [OK]
    np.testing.assert_array_equal(target.read("dst")[:, :, 0], wanted[:, :, 0])
    source.call("execute", code=WORKERS)
    source.call("collect")
    assert len(namespace.segments()) == len(before) - 1


def test_a_destination_that_goes_between_layers(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder(env={"SHMKV_RECYCLE_BYTES": "0"})
    base = start(source, target)
    before = namespace.segments()
    source.call("push", name="src", configs=[[2, base]], slow=[1])
    source.call("wait_asked", layer=1)
    source.call("listen")
    target.call("deallocate", name="dst")
    assert len(namespace.segments()) == len(before) - 1         # between layers nothing is named
    source.call("computed", layer=1)
    assert source.call("results") == [INVALID]


def test_recycled_memory_is_reached_by_the_addresses_of_its_next_cache(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    start(source, target)
    for _ in range(4):
        base = target.call("addresses", name="dst")
        source.call("push", name="src", configs=[[2, base]])
        assert source.call("results") == [OK]
        np.testing.assert_array_equal(target.read("dst")[:, :, 0], source.read("src")[:, :, 0])
        target.call("deallocate", name="dst")
        target.call("allocate", name="dst")
        target.call("canary", name="dst")


# -- peers that go meanwhile -------------------------------------------------------------------------------------------

def mappings(peer: Peer, namespace: Namespace) -> list[str]:
    """Files of the namespace that have no name any more and are mapped all the same."""
    lines = Path(f"/proc/{peer.pid}/maps").read_text().splitlines()
    return [line for line in lines if f"{SHM}/{namespace.name}" in line and line.endswith("(deleted)")]


@pytest.mark.parametrize("how", ["kill", "finalize", "unlink", "unlink by force"])
def test_a_decoder_that_goes_between_layers(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, how: str) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    source.call("listen")
    source.call("push", name="src", configs=[[2, base]], slow=[1])
    source.call("wait_asked", layer=1)
    if how == "kill":
        target.kill()
    elif how == "finalize":
        target.call("finalize")
    else:
        target.call("unlink", ids=[1], force=how == "unlink by force")
    source.call("computed", layer=1)
    answer = source.attempt("results")
    assert answer.value == [TIMEOUT if how == "kill" else "LLM_NOT_YET_LINK"]
    assert answer.ms < 10_000
    for _ in range(2):                      # and it stays so
        source.call("push", name="src", configs=[[2, base]])
        assert source.call("results") == answer.value
    if how in ("kill", "finalize"):
        source.call("execute", code="import time\ntime.sleep(0.03)\nagent.collect()")       # a look is due every 20 ms
        assert mappings(source, namespace) == []


def test_a_decoder_that_comes_back_is_reached_again(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    source.call("listen")
    source.call("push", name="src", configs=[[2, base]])
    assert source.call("results") == [OK]
    target.kill()
    again = decoder()
    again.call("allocate", name="dst")
    source.call("push", name="src", configs=[[2, again.call("addresses", name="dst")]])
    assert source.call("results") == [OK]
    np.testing.assert_array_equal(again.read("dst")[:, :, 0], source.read("src")[:, :, 0])


def test_a_stopped_decoder_is_not_dead(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    target.stop()
    source.call("push", name="src", configs=[[2, base]])
    assert source.call("results") == [OK]
    target.cont()
    np.testing.assert_array_equal(target.read("dst")[:, :, 0], source.read("src")[:, :, 0])


def test_a_prompt_that_was_killed_leaves_nothing_in_the_way(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder(env={"SHMKV_RECYCLE_BYTES": "0"})
    base = start(source, target)
    before = namespace.segments()
    source.call("push", name="src", configs=[[2, base]], slow=[1])
    source.call("wait_asked", layer=1)
    source.kill()
    target.call("deallocate", name="dst")
    assert len(namespace.segments()) == len(before) - 1
    assert target.call("unlink", ids=[1]) == [OK, [OK]]


# -- the end of the prompt ---------------------------------------------------------------------------------------------

def test_finalize_waits_for_a_transfer(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    wanted = source.read("src")
    source.call("push", name="src", configs=[[2, base]], slow=[1])
    source.call("wait_asked", layer=1)
    code = """
import threading
finalizing = threading.Thread(target=agent.finalize)
finalizing.start()
agent.refused = None
while agent.refused is None:                    # until finalize refuses new calls
    try:
        agent.dist.kv_cache_manager.collect()
    except shmkv.LLMException as error:
        agent.refused = error.status_code.name
agent.computed(1)
finalizing.join()
result = [agent.refused, agent.results(0)]
"""
    assert source.call("execute", code=code) == ["LLM_ENGINE_FINALIZED", [OK]]
    np.testing.assert_array_equal(target.read("dst")[:, :, 0], wanted[:, :, 0])


def test_finalize_does_not_wait_for_ever(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(sync_kv_timeout=200), decoder()
    base = start(source, target)
    source.call("push", name="src", configs=[[2, base[:2], range(1)], [2, base]], slow=[1])
    source.call("wait_asked", layer=1)
    answer = source.attempt("finalize")
    assert (answer.outcome, answer.ms >= 200) == (SUCCESS, True)
    assert source.call("results", timeout=0) == [OK, "LLM_ENGINE_FINALIZED"]
    assert source.call("synchronize", timeout=0) == "LLM_ENGINE_FINALIZED"
    source.call("computed", layer=1)            # the layer comes too late, for a cluster that is gone
    assert source.call("execute", code=WORKERS) == []
    assert source.call("results", timeout=0) == [OK, "LLM_ENGINE_FINALIZED"]
    assert (target.read("dst")[2:] == 0x5A).all()


def test_a_program_ends_whatever_its_layers_do(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(sync_kv_timeout=100), decoder()
    source.call("push", name="src", configs=[[2, start(source, target)]], slow=[0])
    source.call("wait_asked", layer=0)
    source.close()                              # exits with 0 and without a word


def test_a_synchronizer_may_finalize(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    code = f"""
class Ends(shmkv.LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        agent.finalize()
        return True
task = agent.dist.kv_cache_manager.transfer_cache_async(agent.caches["src"], Ends(), [shmkv.TransferConfig(2, {base})])
result = [each.name for each in task.get_results()]
"""
    answer = source.attempt("execute", code=code)
    assert answer.value == ["LLM_ENGINE_FINALIZED"]
    assert answer.ms < 10_000


def test_a_forked_child_is_told_that_its_parents_transfer_is_not_its_own(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(), decoder()
    base = start(source, target)
    source.call("push", name="src", configs=[[2, base]], slow=[0])
    source.call("wait_asked", layer=0)
    code = """
import os
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(writer, f"{agent.synchronize()} {agent.results()}".encode())
    finally:
        os._exit(0)
os.waitpid(child, 0)
result = os.read(reader, 1000).decode()
"""
    assert source.call("execute", code=code) == "LLM_FAILED ['LLM_FAILED']"
    source.call("computed", layer=0)
    assert source.call("results") == [OK]
