"""A living process that opens and closes the life file of its namespace: its life byte is gone, and others call it dead."""
from __future__ import annotations

import builds
import pytest
from peer import Namespace, req
from reference import SUCCESS

from crash.house import DECODERS, NOT_EXIST, TIMED_OUT, House

pytestmark = pytest.mark.timeout(600)
LOSE = """
import logging, os
logging.getLogger("shmkv").addHandler(logging.NullHandler())        # its warning is asked for elsewhere
os.close(os.open(f"/dev/shm/{os.environ['SHMKV_NAMESPACE']}.life", os.O_RDONLY))
"""


@pytest.fixture
def house(namespace: Namespace) -> House:
    made = House(namespace, builds.environment("crash", builds.build("crash")))
    made.furnish()
    for decoder in DECODERS:
        made.destination(decoder)
    return made


def test_a_reader_taken_for_dead_never_keeps_other_bytes(house: House) -> None:
    """Its hazard counts for nothing any more: the owner fills the memory anew in the middle of the copy."""
    number = house.publish(1, "new")
    reader, owner = house.peers[2], house.peers[1]
    reader.call("execute", code=LOSE + "from shmkv import _crash\n_crash.arm('copying:3', True)")
    reader.send("pull", key=req(1, number), name="buffer")
    assert reader.wait_stopped_or_dead()
    owner.call("deallocate", name="new")
    owner.call("remove_key", key=req(1, number))
    assert house.publish(1, "next")         # in the same memory: it is kept for the next cache that fits
    owner.call("fill", name="next", generation=99)
    reader.cont()
    answer = reader.receive()
    assert answer.outcome in (NOT_EXIST, TIMED_OUT), answer.trace
    house.links = {link for link in house.links if 2 not in link}
    house.judge()


def test_an_owner_that_lost_it_is_gone_for_its_readers_until_they_link_again(house: House) -> None:
    number = house.publish(1, "new")
    house.peers[1].call("execute", code=LOSE)
    house.assert_says_gone(2, 1, number)
    house.links -= {(2, 1), (3, 1)}
    house.judge()
    house.publish(1)                        # at its next allocation it takes the byte again
    for decoder in DECODERS:
        house.peers[decoder].call("unlink", ids=[1])
        house.link(decoder, [1])
        assert house.pull(decoder, 1, house.publish(1)).outcome == SUCCESS
    house.judge()


def test_an_owner_that_was_swept_meanwhile_is_told(house: House) -> None:
    owner = house.peers[1]
    owner.call("execute", code=LOSE)
    house.start([9])                        # whoever joins sweeps the dead
    answer = owner.attempt("allocate", name="new", keys=[req(1, 1000)])
    assert answer.outcome == "LLM_FAILED", answer.trace
    assert "was taken for dead: finalize and init again" in answer.text
    house.assert_says_gone(2, 1, 1)
    owner.call("finalize")
    owner.call("init", role="PROMPT", cluster_id=1, options={}, raw={})
    for decoder in DECODERS:
        house.peers[decoder].call("unlink", ids=[1])
        house.link(decoder, [1])
    house.judge()
