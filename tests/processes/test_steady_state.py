"""In steady state nothing is mapped, faulted or zeroed, on neither side."""
from __future__ import annotations

import pytest
from peer import StartPeer, req

pytestmark = pytest.mark.timeout(180)
NBYTES = 16 << 20
SHAPE = {"num_tensors": 16, "shape": [1, NBYTES // 16], "dtype": "DT_INT8"}
FAULTS = """
import resource
usage = resource.getrusage(resource.RUSAGE_SELF)
result = [usage.ru_minflt, usage.ru_majflt]
"""
MAPPINGS = """
with open("/proc/self/maps") as maps:
    result = sum(".c." in line for line in maps)
"""


def test_cycles_of_a_warm_pair_fault_on_nothing(prompt: StartPeer, decoder: StartPeer) -> None:
    """Allocate, fill, publish, pull, consume, free: the same segment goes round, under a new generation each time."""
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", **SHAPE)

    def cycle(number: int) -> None:
        p.call("allocate", name="kv", keys=[req(1, number)], publish=False, **SHAPE)
        p.call("execute", code="for tensor in agent.caches['kv'].tensors: tensor.numpy()[:] = 7")
        p.call("publish", name="kv")
        p.call("deallocate", name="kv")
        d.call("pull", key=req(1, number), name="kv")

    for number in range(10):
        cycle(number)
    before = [p.call("execute", code=FAULTS), d.call("execute", code=FAULTS)]
    mapped = [p.call("execute", code=MAPPINGS), d.call("execute", code=MAPPINGS)]
    for number in range(100, 150):
        cycle(number)
    after = [p.call("execute", code=FAULTS), d.call("execute", code=FAULTS)]
    for (minor, major), (minor_then, major_then) in zip(after, before, strict=True):
        assert major == major_then
        # A page a time would be 4096 a cycle; the interpreter's own JSON and strings take a few.
        assert minor - minor_then < 50 * 10
    assert [p.call("execute", code=MAPPINGS), d.call("execute", code=MAPPINGS)] == mapped


def test_decoder_lets_go_of_memory_that_its_peer_gave_up(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2)
    d.call("allocate", name="kv", **SHAPE)
    before = d.call("execute", code=MAPPINGS)
    for number in range(8):
        p.call("allocate", name="kv", keys=[req(1, number)], **SHAPE)
        d.call("pull", key=req(1, number), name="kv")
        p.call("deallocate", name="kv")
    assert d.call("execute", code=MAPPINGS) <= before + 2
