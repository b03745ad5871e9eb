"""A peer that truncates its segment in the middle of a pull: an error where bytes are read by system calls."""
from __future__ import annotations

from pathlib import Path

import builds
import pytest
from peer import SHM, Namespace, req

from crash.house import DECODERS, House

pytestmark = pytest.mark.timeout(600)
PREAD = {"SHMKV_COPY": "pread"}


@pytest.fixture
def house(namespace: Namespace) -> House:
    made = House(namespace, {**builds.environment("crash", builds.build("crash")), **PREAD})
    made.furnish()
    for decoder in DECODERS:
        made.destination(decoder)
    return made


def the_segment(house: House) -> Path:
    """The only cache segment with pages that are not the decoder's."""
    names = house.namespace.segments()
    owner = house.peers[1].call("execute", code="result = agent.dist._cluster.member.incarnation")
    return SHM / next(name for name in names if f"{owner:016x}" in name)


@pytest.mark.parametrize("left", [0, 4096, 4096 + 64])
def test_a_segment_cut_off_while_it_is_copied_is_an_error(house: House, left: int) -> None:
    number = house.publish(1, "new")
    decoder = house.peers[2]
    decoder.call("execute", code="from shmkv import _crash\n_crash.arm('copying:2', True)")
    decoder.send("pull", key=req(1, number), name="buffer")
    assert decoder.wait_stopped_or_dead()
    with the_segment(house).open("r+b") as file:
        file.truncate(left)
    decoder.cont()
    answer = decoder.receive()
    assert answer.outcome == "LLM_FAILED", answer.trace
    assert "its size is not the one recorded" in answer.text
    house.links.discard((2, 1))
    house.judge()                       # everybody else


def test_a_segment_cut_off_before_it_is_opened_is_an_error(house: House) -> None:
    number = house.publish(1, "new")
    with the_segment(house).open("r+b") as file:
        file.truncate(64)
    answer = house.pull(2, 1, number)
    assert answer.outcome == "LLM_FAILED", answer.trace
    assert "its size is not the one recorded" in answer.text


def test_what_is_read_is_what_is_published_whoever_uses_the_memory_next(house: House) -> None:
    """Recycled memory under the next generation, more segments than descriptors are kept, and no descriptor left."""
    decoder = house.peers[2]
    for _ in range(3):
        numbers = [house.publish(1, f"cache {place}") for place in range(70)]
        for number in numbers:
            assert house.pull(2, 1, number).outcome == "LLM_SUCCESS"
        house.assert_right(2, numbers[-1])
        for place in range(70):
            house.peers[1].call("drop", name=f"cache {place}")
        house.peers[1].call("collect")
    open_files = decoder.call("execute", code="import os\nresult = len(os.listdir('/proc/self/fd'))")
    assert open_files < 64 + 20
    decoder.call("unlink", ids=[1])
    assert decoder.call("execute", code="import os\nresult = len(os.listdir('/proc/self/fd'))") < 20
