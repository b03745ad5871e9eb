"""What surrounds a process: its umask, a pid namespace, clocks that jump."""
from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer import SHM, Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import LINK_HELD_BY_OWNER, SharedFile, directory_of, segments_of

pytestmark = pytest.mark.timeout(120)
ROWS = geometry(4, [2, 8], 2)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
T_MS = 20000


def _init(peer: Peer, role: str, cluster_id: int, timeout: int = T_MS) -> str:
    return peer.outcome("init", role=role, cluster_id=cluster_id, options={"sync_kv_timeout": timeout}, raw={})


def _exchange(p: Peer, d: Peer, number: int = 7) -> None:
    """P publishes a key, D pulls it."""
    p.call("allocate", name=f"kv{number}", keys=[req(1, number)])
    p.call("fill", name=f"kv{number}", generation=number)
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, number), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, number)[:, :, 0], err_msg="right bytes")


@pytest.mark.parametrize("umask", [0, 0o777])
def test_files_are_private_whatever_the_umask(namespace: Namespace, umask: int) -> None:
    p, d = namespace.start(), namespace.start()
    for peer in (p, d):
        peer.call("execute", code=f"import os\nos.umask({umask})")
    assert (_init(p, "PROMPT", 1), _init(d, "DECODER", 2)) == (SUCCESS, SUCCESS)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    _exchange(p, d)
    modes = {name: oct(stat.S_IMODE(os.stat(SHM / name).st_mode)) for name in namespace.names()}
    assert len(modes) >= 6, "life file, members table, two directories, two segments"
    assert set(modes.values()) == {"0o600"}, f"all of them: {modes}"


_ENTER_PIDS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWPID = 0x20000000
if libc.unshare(CLONE_NEWPID):
    raise OSError(ctypes.get_errno(), "unshare")
"""
# The next child is process 1 of a pid namespace; it answers commands that come on one pipe, on another.
_FIRST_PROCESS = _ENTER_PIDS + """
import json, signal, sys
from agent import Agent, answer
to_child, from_child = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    try:
        signal.alarm(100)
        os.close(to_child[1])
        own = Agent()
        with os.fdopen(to_child[0]) as commands, os.fdopen(from_child[1], "w", buffering=1) as answers:
            for line in commands:
                answers.write(json.dumps(answer(own, *json.loads(line))) + "\\n")
    finally:
        os._exit(0)
os.close(to_child[0])
os.close(from_child[1])
agent.child = pid
agent.commands, agent.answers = os.fdopen(to_child[1], "w", buffering=1), os.fdopen(from_child[0])
"""
_ASK = """
import json
agent.commands.write({line!r} + "\\n")
result = json.loads(agent.answers.readline())
"""


class FirstProcess:
    """Process 1 of a pid namespace of its own, reached through the agent that started it."""

    def __init__(self, outside: Peer) -> None:
        self._outside = outside
        outside.call("execute", code=_FIRST_PROCESS)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        line = json.dumps([command, arguments])
        said: dict[str, Any] = self._outside.call("execute", code=_ASK.replace("{line!r}", repr(line)))
        return said

    def call(self, command: str, **arguments: Any) -> Any:
        said = self.ask(command, **arguments)
        assert "error" not in said, said
        return said["value"]

    def kill(self) -> None:
        self._outside.call("execute", code="import os, signal\nos.kill(agent.child, signal.SIGKILL)\nos.waitpid(agent.child, 0)")


def test_two_pid_namespaces_that_share_the_memory(namespace: Namespace) -> None:
    """Both clusters are process 1; the death of one is seen across, and what it left is swept across."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a pid namespace")
    namespace.somebody_died = True
    outsides = [namespace.start() for _ in range(3)]
    p, d = FirstProcess(outsides[0]), FirstProcess(outsides[1])
    init = {"options": {"sync_kv_timeout": T_MS}, "raw": {}}
    for inside, role, cluster_id in ((p, "PROMPT", 1), (d, "DECODER", 2)):
        assert inside.call("execute", code="import os\nresult = os.getpid()") == 1, "both are process 1"
        inside.call("init", role=role, cluster_id=cluster_id, **init)
    p.call("allocate", name="kv", keys=[["key", 1, 7, 0, 2**64 - 1]])
    p.call("fill", name="kv", generation=1)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv")
    d.call("pull", key=["key", 1, 7, 0, 2**64 - 1], name="kv")
    assert d.call("digest", name="kv") != p.call("digest", name="kv"), "one row of two was pulled"
    left = set(segments_of(namespace, 1))
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
        p.kill()
        gone = d.ask("pull", key=by_id(1, 1), name="kv")
    assert gone["error"]["status"] == TIMED_OUT, "the death of a holder with our own pid is seen"
    assert gone["ms"] < T_MS / 2, "long before the deadline"
    heir = FirstProcess(outsides[2])
    heir.call("init", role="PROMPT", cluster_id=1, **init)
    assert not left & namespace.names(), "what it left is swept by a process of another pid namespace"
    assert segments_of(namespace, 2), "what the living one owns is not"
    heir.call("allocate", name="kv", keys=[["key", 1, 7, 0, 2**64 - 1]])
    assert d.call("unlink", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("pull", key=["key", 1, 7, 0, 2**64 - 1], name="kv")
    d.kill()
    heir.call("finalize")


# A child of the agent's process lives in a time namespace whose monotonic clock is `shift` seconds ahead or behind.
_SHIFTED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWTIME = 0x80
if libc.unshare(CLONE_NEWTIME):
    raise OSError(ctypes.get_errno(), "unshare")
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write("monotonic {shift} 0\\nboottime {shift} 0\\n")
"""


@pytest.mark.parametrize("shift", [10**6, -1])
def test_a_process_whose_clock_is_elsewhere(namespace: Namespace, prompt: StartPeer, shift: int) -> None:
    """Deadlines are absolute times of the process that waits, and stamps in shared memory decide nothing."""
    if not Path("/proc/self/timens_offsets").exists() or os.geteuid() != 0:
        pytest.skip("needs root and time namespaces")
    p, outside = prompt(1), namespace.start()
    begin = outside.call("execute", code="import time\nresult = int(time.monotonic())")
    seconds = shift if shift > 0 else -(begin - 5)
    outside.call("execute", code=_SHIFTED.replace("{shift}", str(seconds)))
    outside.call("execute", code=_FIRST_PROCESS.replace(_ENTER_PIDS, "import os\n"))
    d = FirstProcess.__new__(FirstProcess)
    d._outside = outside
    there = d.call("execute", code="import time\nresult = int(time.monotonic())")
    assert abs(there - begin) > 60, "its clock is another one"
    d.call("init", role="DECODER", cluster_id=2, options={"sync_kv_timeout": 500}, raw={})
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    p.call("allocate", name="kv", keys=[req(1, 7)])
    d.call("allocate", name="kv")
    d.call("pull", key=req(1, 7), name="kv")
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
        late = d.ask("pull", key=by_id(1, 1), name="kv")
        found.put("LinkRecord", "word", 0)
    assert late["error"]["status"] == TIMED_OUT, "a wait ends by its own clock"
    assert 500 <= late["ms"] < T_MS / 2, "neither at once nor never"
    d.call("pull", key=by_id(1, 1), name="kv")
    p.call("deallocate", name="kv")
    p.call("collect")
    assert segments_of(namespace, 1) == [] or p.call("collect") == 0, "P frees what nobody uses"
    d.call("finalize")


_JUMPING = """
import ctypes, threading, time
jump = ctypes.CDLL(None).shift_clock_to
jump.argtypes = [ctypes.c_longlong]
agent.stop = threading.Event()
def keep_jumping():
    number = 0
    while not agent.stop.wait(0.002):
        number += 1
        jump((-1) ** number * number * 86400)
agent.thread = threading.Thread(target=keep_jumping)
agent.thread.start()
"""


def test_a_wall_clock_that_jumps(namespace: Namespace, preload: Callable[[str], Path], rounds: Callable[[int], int]) -> None:
    """CLOCK_REALTIME goes days ahead and back, every 2 ms, in both processes: nothing here is decided by it."""
    variables = {"LD_PRELOAD": str(preload("shift_clock"))}
    p, d = namespace.start(variables), namespace.start(variables)
    assert (_init(p, "PROMPT", 1), _init(d, "DECODER", 2, 500)) == (SUCCESS, SUCCESS)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    before = d.call("execute", code="import time\nresult = time.time()")
    for peer in (p, d):
        peer.call("execute", code=_JUMPING)
    for number in range(1, rounds(40) + 1):
        _exchange(p, d, number)
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
        late = d.attempt("pull", key=by_id(1, 1), name="kv")
        found.put("LinkRecord", "word", 0)
    assert (late.outcome, 500 <= late.ms < T_MS / 2) == (TIMED_OUT, True), "a wait ends by the steady clock"
    assert d.call("link", ids=[77], timeout=300) == ["LLM_LINK_FAILED", [TIMED_OUT]], "so does the poll for a peer"
    for peer in (p, d):
        peer.call("execute", code="agent.stop.set()\nagent.thread.join()")
    after = d.call("execute", code="import time\nresult = time.time()")
    assert abs(after - before) > 86400 / 2, "it did jump"
    assert p.outcome("unlink", ids=[2]) == SUCCESS

