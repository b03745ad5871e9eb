"""A move of private memory that stands still between two calls: the owner is killed, or goes on as another program, meanwhile."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import builds
import numpy as np
import pytest
from members import namespace_of, wait_until_dead
from peer import Namespace, Peer, StartPeer, by_id

from shmkv import _link

pytestmark = pytest.mark.timeout(600)       # the first one waits for a build
MIB = 1 << 20
NBYTES = 64 * MIB
MADE = f"""
agent.bytes = np.random.default_rng(3).integers(0, 256, {NBYTES}, np.uint8)
result = agent.bytes.ctypes.data
"""
DIGEST = "import hashlib\nresult = hashlib.sha256(agent.bytes).hexdigest()"
# In the mover: everything at once, which takes many calls; what came of it, and how much of it is the owner's.
MOVE = """
from shmkv import _crash, _peer_memory
from shmkv.membership import Namespace
space = Namespace.peek({name!r})
member = next(each for each in space.members() if each.pid == {pid})
own = np.zeros({nbytes}, np.uint8)
_crash.arm("copying:3", True)
status = _peer_memory.transfer(space.table, space.life_fd, member.slot, member.incarnation,
                               [(own.ctypes.data, {base}, {nbytes})], {writes}, 20000)[0]
result = [status, int(np.count_nonzero(own))]
"""


class World:
    """An owner of private memory, and a process that stands still in the middle of a move, on one thread."""

    def __init__(self, namespace: Namespace, owner: Peer, env: dict[str, str]) -> None:
        self.owner, self.mover = owner, namespace.start(env)
        base = owner.call("execute", code=MADE)
        self.code = {writes: MOVE.format(name=namespace.name, pid=owner.pid, nbytes=NBYTES, base=base, writes=writes)
                     for writes in (False, True)}

    def stop(self, *, writes: bool) -> None:
        self.mover.call("execute", code="from shmkv import _copy\n_copy.configure(threads=1)")
        self.mover.send("execute", code=self.code[writes])
        assert self.mover.wait_stopped_or_dead()

    def go_on(self) -> tuple[int, int, float]:
        self.mover.cont()
        answer = self.mover.receive()
        assert answer.outcome == "LLM_SUCCESS", answer.trace
        return answer.value[0], answer.value[1], answer.ms


@pytest.fixture
def world(namespace: Namespace, prompt: StartPeer) -> Callable[[], World]:
    env = builds.environment("crash", builds.build("crash"))
    return lambda: World(namespace, prompt(1, env=env), env)


@pytest.mark.parametrize("writes", [False, True])
def test_the_owner_is_killed_in_the_middle(world: Any, writes: bool) -> None:
    made = world()
    made.stop(writes=writes)
    made.owner.kill()
    status, moved, _ = made.go_on()
    assert status == _link.PEER_GONE
    assert moved < NBYTES / 4 if not writes else moved == 0, "what came before the third call, and no more"


def test_the_owner_goes_on_as_another_program(world: Any, name: str) -> None:
    """Its pid and start time stay; nothing is written into the memory of what runs there now."""
    made = world()
    made.stop(writes=True)
    space = namespace_of(name)
    (member,) = space.members()
    made.owner.send("execute", code="import os\nos.execv('/bin/sleep', ['sleep', '60'])")
    wait_until_dead(space, member)
    assert made.go_on()[0] == _link.PEER_GONE
    made.owner.kill()


@pytest.mark.parametrize("writes", [False, True])
def test_an_owner_that_stands_still_is_moved_from_and_to(world: Any, writes: bool) -> None:
    made = world()
    made.stop(writes=writes)
    made.owner.stop()
    assert made.go_on()[0] == 0
    made.owner.cont()
    wanted = np.zeros(NBYTES, np.uint8) if writes else np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)
    assert made.owner.call("execute", code=DIGEST) == hashlib.sha256(wanted).hexdigest()


@pytest.mark.parametrize("ends", ["goes on", "is killed"])
def test_unregister_waits_for_who_is_in_the_memory(namespace: Namespace, ends: str) -> None:
    """Only then may the memory be freed: a push that stands still has it pinned."""
    env = builds.environment("crash", builds.build("crash"))
    managed = {"enable_cache_manager": True, "enable_remote_cache_accessible": True, "mem_pool_cfg": '{"memory_size": 104857600}'}
    owner = namespace.start_cluster("MIX", 1, env, sync_kv_timeout=200, **managed)
    pusher = namespace.start_cluster("MIX", 2, env, **managed)
    assert pusher.call("link", ids=[1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    cache_id = owner.call("v2_register", name="private", num_tensors=2)
    pusher.call("v2_allocate", name="kv", num_tensors=2)
    pusher.call("noise", name="kv", seed=4)
    pusher.call("execute", code="from shmkv import _crash\n_crash.arm('copying', True)")
    pusher.send("v2_push", key=by_id(1, cache_id), name="kv")
    assert pusher.wait_stopped_or_dead()
    for _ in range(2):
        assert owner.outcome("v2_unregister", cache_id=cache_id) == "LLM_TIMEOUT"
    if ends == "is killed":
        pusher.kill()
    else:
        pusher.cont()
        assert pusher.receive().outcome == "LLM_SUCCESS"
    assert owner.outcome("v2_unregister", cache_id=cache_id) == "LLM_SUCCESS"
    content = owner.call("execute", code="result = bytes(memoryview(agent.memory['private'][0])).hex()")
    wanted = bytes(32) if ends == "is killed" else pusher.read("kv")[0].tobytes()[:16] + bytes(16)
    assert bytes.fromhex(content) == wanted
