"""Pushes between real processes that lose something in the middle: a cache, a peer, the prompt itself."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peer import SHM, Namespace, Peer, StartPeer
from pushes import WORKERS, start
from reference import SUCCESS

pytestmark = pytest.mark.timeout(120)
OK, INVALID, TIMEOUT = "LLM_SUCCESS", "LLM_PARAM_INVALID", "LLM_WAIT_PROCESS_TIMEOUT"


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


def test_a_decoder_that_comes_back_in_another_record_is_reached_again(prompt: StartPeer, decoder: StartPeer) -> None:
    """The record of the dead one still says that its link lives, since nobody has needed it."""
    source, other, target = prompt(), decoder(3), decoder()
    addresses = start(source, target)
    source.call("push", name="src", configs=[[2, addresses]])
    assert source.call("results") == [OK]
    other.call("unlink", ids=[1])
    target.kill()
    again = decoder()
    again.call("allocate", name="dst", num_tensors=4, shape=(2, 8))
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
    source.close()                              # exits with 0 and without a word, or this raises
    assert not source.is_alive


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
