"""A lost link is told without a request: by a callback, and by a descriptor."""
from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import memory
import pytest
from peer import Peer, StartPeer, req
from reference import SUCCESS

pytestmark = pytest.mark.timeout(120)
SHAPE: dict[str, Any] = {"num_tensors": 2, "shape": [1, 64], "dtype": "DT_INT8"}
WITHOUT_PIDFD = "import os\ndef fails(pid): raise OSError(38, 'not here')\nos.pidfd_open = fails\n"
LISTEN = """
import time
agent.heard = []
agent.manager = agent.dist.kv_cache_manager
agent.manager.on_link_lost(lambda cluster, reason: agent.heard.append([cluster, reason]))
"""
SETTLED = """
import time
def looked_twice():
    # The thread has seen all links that there are: two of its looks began after this one.
    monitor = agent.manager._watch._monitor
    looks, look = [0], monitor._look
    def counted():
        looks[0] += 1
        look()
    monitor._look = counted
    until = time.monotonic() + 20
    while looks[0] < 3 and time.monotonic() < until:
        time.sleep(0.001)
    monitor._look = look
    assert looks[0] >= 3
looked_twice()
"""
THREADS = "import threading\nresult = [each.name for each in threading.enumerate() if each.name.startswith('shmkv')]"
DESCRIPTORS = "import os\nresult = len(os.listdir('/proc/self/fd'))"
Start = Callable[..., Peer]


def listen(peer: Peer, before: str = "") -> Peer:
    peer.call("execute", code=before + LISTEN + SETTLED)
    return peer


def heard(peer: Peer, count: int) -> list[list[Any]]:
    """What was told, once it is so much; and that no more comes in two further looks."""
    peer.call("execute", code=f"""
import time
until = time.monotonic() + 20
while len(agent.heard) < {count} and time.monotonic() < until:
    time.sleep(0.001)
""" + SETTLED)
    return list(peer.call("execute", code="result = agent.heard"))


@pytest.mark.parametrize("before", ["", WITHOUT_PIDFD], ids=["pidfd", "looks"])
def test_death_of_a_prompt_and_of_a_decoder(prompt: StartPeer, decoder: StartPeer, before: str) -> None:
    p, d, other = prompt(1), decoder(2), decoder(3)
    listen(p, before)
    listen(d, before)
    assert p.call("execute", code="result = len(agent.manager._watch._monitor._by_fd)") == (0 if before else 2)
    other.kill()
    assert heard(p, 1) == [[3, "died"]]
    p.kill()
    assert heard(d, 1) == [[1, "died"]]
    assert d.call("execute", code="result = len(agent.manager._watch._monitor._by_fd)") == 0


def test_finalize_and_unlink_of_the_peer(prompt: StartPeer, decoder: StartPeer) -> None:
    p, q, d = prompt(1), prompt(4), decoder(2, link=(1, 4))
    for peer in (p, q, d):
        listen(peer)
    assert d.call("unlink", ids=[4])[0] == SUCCESS
    assert heard(q, 1) == [[2, "unlinked"]]
    assert heard(d, 0) == [], "it did that itself"
    p.call("finalize")
    assert heard(d, 1) == [[1, "finalized"]]


@pytest.mark.parametrize("force", [False, True])
def test_prompt_unlinks(prompt: StartPeer, decoder: StartPeer, force: bool) -> None:
    p, d = prompt(1), decoder(2)
    listen(p)
    listen(d)
    assert p.call("unlink", ids=[2], force=force)[0] == SUCCESS
    assert heard(d, 1) == [[1, "unlinked"]]
    assert heard(p, 0) == []


@pytest.mark.parametrize("force", [False, True])
def test_own_unlink_is_no_loss(prompt: StartPeer, decoder: StartPeer, force: bool) -> None:
    prompt(1)
    d = listen(decoder(2))
    for _ in range(20):
        assert d.call("unlink", ids=[1], force=force)[0] == SUCCESS
        assert d.call("link", ids=[1])[0] == SUCCESS
    assert heard(d, 0) == []


def test_end_of_a_decoder_unlinks(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = listen(prompt(1)), decoder(2)
    p.call("execute", code=SETTLED)
    d.close()
    assert heard(p, 1) == [[2, "unlinked"]]


def test_stopped_peer_is_not_lost(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), listen(decoder(2))
    p.stop()
    for _ in range(6):                  # two looks each
        assert heard(d, 0) == []
    p.cont()
    assert heard(d, 0) == []
    p.kill()
    assert heard(d, 1) == [[1, "died"]]


def test_only_the_lost_one_is_told_and_its_successor_is_watched(prompt: StartPeer, decoder: StartPeer) -> None:
    p, q, d = prompt(1), prompt(4), decoder(2, link=(1, 4))
    listen(d)
    p.kill()
    assert heard(d, 1) == [[1, "died"]]
    successor = prompt(1)
    assert d.call("unlink", ids=[1])[0] == SUCCESS
    assert d.call("link", ids=[1])[0] == SUCCESS
    assert heard(d, 1) == [[1, "died"]]
    successor.kill()
    assert heard(d, 2) == [[1, "died"]] * 2
    q.kill()
    assert heard(d, 3)[2] == [4, "died"]


def test_link_whose_memory_was_written_over(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), listen(decoder(2))
    p.call("allocate", name="kv", keys=[req(1, 1)], **SHAPE)
    d.call("allocate", name="kv", **SHAPE)
    d.call("execute", code=f"""
import ctypes
handle = agent.dist._links.handle(1)
ctypes.c_uint32.from_address(handle.address + {memory.OFFSETS['LinkRecord', 'word']}).value = 77
""")
    assert d.outcome("pull", key=req(1, 1), name="kv") == "LLM_WAIT_PROCESS_TIMEOUT"
    assert heard(d, 1) == [[1, "broken"]]


# -- the descriptor ----------------------------------------------------------------------------------------------------

def test_descriptor_is_readable_while_there_is_something_to_tell(prompt: StartPeer, decoder: StartPeer) -> None:
    p, q, d = prompt(1), prompt(4), decoder(2, link=(1, 4))
    d.call("execute", code="""
import select
agent.manager = agent.dist.kv_cache_manager
assert agent.manager.lost_links() == []
agent.fd = agent.manager.link_lost_fd()
assert agent.manager.link_lost_fd() == agent.fd
assert select.select([agent.fd], [], [], 0)[0] == []
""" + SETTLED)
    for peer in (p, q):
        peer.kill()
    found = d.call("execute", code="""
import select
result = []
while len(result) < 2:
    assert select.select([agent.fd], [], [], 20)[0], "nothing came"
    result += agent.manager.lost_links()
assert select.select([agent.fd], [], [], 0)[0] == []
assert agent.manager.lost_links() == []
""")
    assert sorted(found) == [[1, "died"], [4, "died"]]
    d.call("execute", code="""
import os
agent.dist.finalize()
try:
    os.fstat(agent.fd)
except OSError as error:
    result = str(error)
else:
    raise AssertionError("the descriptor is open after finalize")
""")


# -- callbacks ---------------------------------------------------------------------------------------------------------

def test_callback_that_raises_is_logged_and_the_next_loss_is_told(prompt: StartPeer, decoder: StartPeer) -> None:
    p, q, d = prompt(1), prompt(4), decoder(2, link=(1, 4))
    listen(d)
    d.call("execute", code="""
import logging
agent.said = []
class Kept(logging.Handler):
    def emit(self, record):
        agent.said.append(record.getMessage())
log = logging.getLogger("shmkv")
log.addHandler(Kept())
log.propagate = False
def fails(cluster, reason):
    agent.heard.append([cluster, reason])
    raise ValueError("no")
agent.manager.on_link_lost(fails)
""")
    p.kill()
    assert heard(d, 1) == [[1, "died"]]
    q.kill()
    assert heard(d, 2) == [[1, "died"], [4, "died"]]
    assert d.call("execute", code="result = agent.said") == [
        f"the callback of on_link_lost failed for cluster {number}" for number in (1, 4)]


def test_callback_may_unlink_link_again_and_take_itself_away(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), listen(decoder(2))
    d.call("execute", code="""
def again(cluster, reason):
    agent.results = [agent.unlink([cluster]), agent.link([cluster])]
    agent.manager.on_link_lost(None)
    agent.heard.append([cluster, reason])
agent.manager.on_link_lost(again)
""")
    p.kill()
    successor = prompt(1)
    d.call("execute", code="""
import time, threading
until = time.monotonic() + 20
while any(each.name.startswith("shmkv") for each in threading.enumerate()) and time.monotonic() < until:
    time.sleep(0.001)
assert agent.heard == [[1, "died"]], agent.heard
""")
    assert d.call("execute", code="result = agent.results") == [[SUCCESS, [SUCCESS]]] * 2
    successor.call("allocate", name="kv", keys=[req(1, 1)], **SHAPE)
    d.call("allocate", name="kv", **SHAPE)
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS


def test_callback_may_finalize(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), listen(decoder(2))
    d.call("execute", code="agent.manager.on_link_lost(lambda *_: agent.dist.finalize())")
    p.kill()
    left = d.call("execute", code="""
import time, threading
until = time.monotonic() + 20
while (agent.manager.is_initialized() or threading.active_count() > 1) and time.monotonic() < until:
    time.sleep(0.001)
result = [agent.manager.is_initialized(), threading.active_count()]
""")
    assert left == [False, 1]


@pytest.mark.parametrize("value", [1, "x"])
def test_callback_is_checked(decoder: StartPeer, value: Any) -> None:
    d = decoder(2, link=())
    answer = d.attempt("execute", code=f"agent.dist.kv_cache_manager.on_link_lost({value!r})")
    assert answer.kinds[0] == "TypeError"
    assert d.call("execute", code=THREADS) == []


# -- what it costs, what it leaves ---------------------------------------------------------------------------------------

def test_thread_and_descriptors_exist_only_while_somebody_listens(prompt: StartPeer, decoder: StartPeer) -> None:
    prompt(1)
    d = decoder(2)
    before = d.call("execute", code=DESCRIPTORS)
    assert d.call("execute", code=THREADS) == []
    for _ in range(3):
        listen(d)
        assert d.call("execute", code=THREADS) == ["shmkv-link-watch"]
        assert d.call("execute", code=DESCRIPTORS) == before + 2, "what wakes the thread, and the peer's pidfd"
        d.call("execute", code="agent.manager.on_link_lost(None)")
        assert d.call("execute", code=THREADS) == []
        assert d.call("execute", code=DESCRIPTORS) == before
    listen(d)
    d.call("execute", code="agent.manager.link_lost_fd()")
    d.call("finalize")
    assert d.call("execute", code=THREADS) == []
    assert d.call("execute", code=DESCRIPTORS) <= before


def test_idle_it_wakes_at_most_fifty_times_a_second(prompt: StartPeer, decoder: StartPeer) -> None:
    prompt(1)
    d = listen(decoder(2))
    switches, seconds = d.call("execute", code="""
import time
from pathlib import Path
def switches():
    status = Path(f"/proc/self/task/{agent.manager._watch._monitor._thread.native_id}/status").read_text()
    return int(status.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])
began, before = time.monotonic(), switches()
time.sleep(2)
result = [switches() - before, time.monotonic() - began]
""")
    assert 1 <= switches <= 50 * seconds


def test_forked_child_has_none(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), listen(decoder(2))
    d.call("execute", code="""
import os, threading
agent.manager.link_lost_fd()
child = os.fork()
if child == 0:
    status = 1
    try:
        refused = 0
        for call in (agent.manager.lost_links, agent.manager.link_lost_fd, lambda: agent.manager.on_link_lost(None)):
            try:
                call()
            except shmkv.LLMException as error:
                refused += error.status_code == shmkv.LLMStatusCode.LLM_FAILED
        fds = [agent.manager._watch._lost_fd, *agent.manager._watch._monitor._by_fd]
        agent.dist.finalize()
        closed = 0
        for fd in fds:
            try:
                os.fstat(fd)
            except OSError:
                closed += 1
        status = 0 if (refused, closed, threading.active_count()) == (3, 2, 1) else 2
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert status == 0, status
""")
    p.kill()
    assert heard(d, 1) == [[1, "died"]], "the parent's goes on"


# -- pid namespaces ----------------------------------------------------------------------------------------------------

INSIDE = """
import os, sys, time
from shmkv import *
dist = LLMDataDist(LLMRole.DECODER, 2)
dist.init(LLMConfig().generate_options())
peer = LLMClusterInfo()
peer.remote_cluster_id = 1
peer.append_local_ip_info("127.0.0.1", 1)
peer.append_remote_ip_info("127.0.0.1", 1)
assert dist.link_clusters([peer], 20000)[0] == LLMStatusCode.LLM_SUCCESS
manager, heard = dist.kv_cache_manager, []
manager.on_link_lost(lambda *lost: heard.append(lost))
monitor = manager._watch._monitor
while not monitor._made:
    time.sleep(0.001)
print(os.getpid(), len(monitor._by_fd), flush=True)
while not heard:
    time.sleep(0.001)
print(heard, flush=True)
dist.finalize()
"""


def unshare() -> list[str]:
    """The command that starts a program in a pid namespace of its own, which ends with it; skips where that is not allowed."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode != 0:
        pytest.skip("needs a pid namespace")
    return command


def test_peer_in_another_pid_namespace_has_no_pidfd_and_is_told_all_the_same(prompt: StartPeer) -> None:
    command = unshare()
    p = prompt(1)
    with subprocess.Popen([*command, sys.executable, "-c", INSIDE], stdout=subprocess.PIPE, text=True) as decoder:
        try:
            assert decoder.stdout is not None
            assert decoder.stdout.readline() == "1 0\n", "it is pid 1 there, and sees no pid of the prompt"
            p.kill()
            assert decoder.stdout.readline() == "[(1, 'died')]\n"
            assert decoder.wait(20) == 0
        finally:
            decoder.kill()
