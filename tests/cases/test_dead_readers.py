"""Field cases FR-028, FR-057, FR-059 and FR-063: readers that are killed, again and again, and what they had in their hands."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from agent_code import SPAWN
from peer import Namespace, Peer, StartPeer, by_id
from reference import SUCCESS, geometry, pattern
from shared_bytes import SharedFile, directory_of, reader_slot
from started_apart import descriptors, maps

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
ROWS = geometry(4, [2, 8], 2)
LINKS = 512
T_MS = 20000
LINK_LIVE = 1
HELD_BY_OWNER, HELD_BY_READER = 1, 2


def _prompt(prompt: StartPeer) -> Peer:
    p = prompt(1)
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=1)
    return p


def _works(d: Peer) -> None:
    """A reader that is still there pulls the right bytes."""
    d.call("canary", name="kv")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "the others go on"
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0], err_msg="right bytes")


def _size(peer: Peer, namespace: Namespace) -> dict[str, int]:
    """What a long-lived process holds, and what the namespace takes in /dev/shm."""
    rss = next(line for line in Path(f"/proc/{peer.pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    blocks = sum(os.stat(f"/dev/shm/{name}").st_blocks for name in namespace.names())
    return {"mappings": len(maps(peer, "/dev/shm/")), "descriptors": len(descriptors(peer)),
            "rss": int(rss.split()[1]) * 1024, "shm": blocks * 512}


_ONE_READER = SPAWN + """
def work(own, ready):
    linked(own, 2)
    own.allocate("kv")
    own.pull(["id", 1, 1, 0], "kv")
    ready()
    signal.pause()
for _ in range({cycles}):
    kill(spawn(work))
"""


def test_fr_028_killed_readers_leave_nothing_in_a_server(namespace: Namespace, prompt: StartPeer,
                                                         rounds: Callable[[int], int]) -> None:
    p, nursery = _prompt(prompt), namespace.start()
    namespace.somebody_died = True
    nursery.call("execute", code=_ONE_READER.replace("{cycles}", "20"))
    p.call("collect")
    early = _size(p, namespace)
    nursery.call("execute", code=_ONE_READER.replace("{cycles}", str(rounds(80))))
    p.call("collect")
    late = _size(p, namespace)
    assert (late["mappings"], late["descriptors"]) == (early["mappings"], early["descriptors"]), "mappings and descriptors"
    assert late["rss"] - early["rss"] < MIB, "resident memory"
    assert late["shm"] - early["shm"] < MIB, "the size of /dev/shm"
    with SharedFile(directory_of(namespace, 1)) as found:
        assert found.get("DirectoryHeader", "links_reserved") == 4, "link slots are used again"


_MANY_READERS = SPAWN + """
def work(number):
    def run(own, ready):
        linked(own, 1000 + number)
        ready()
        signal.pause()
    return run
agent.readers = [spawn(work(number)) for number in range({count})]
"""
_KILL_THEM = "for pid in agent.readers:\n    kill(pid)"


def test_fr_063_dead_readers_slots_are_taken_back(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                  rounds: Callable[[int], int]) -> None:
    _prompt(prompt)
    nursery, last = namespace.start(), decoder(2, link=())
    last.call("allocate", name="kv")
    namespace.somebody_died = True
    for _ in range(rounds(1)):
        nursery.call("execute", code=_MANY_READERS.replace("{count}", str(LINKS)))
        full = last.attempt("link", ids=[1])
        assert full.value == ["LLM_LINK_FAILED", ["LLM_PARAM_INVALID"]], "with as many living ones the next is refused"
        assert str(LINKS) in last.attempt("pull", key=by_id(1, 1), name="kv").text, "and told why"
        nursery.call("execute", code=SPAWN + _KILL_THEM)
    for _ in range(rounds(1)):
        nursery.call("execute", code=_MANY_READERS.replace("{count}", "40"))
        nursery.call("execute", code=SPAWN + _KILL_THEM)
    assert last.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "dead slots are taken back before a limit is named"
    _works(last)


_HOLDER = SPAWN + """
def work(own, ready):
    linked(own, 3)
    own.allocate("kv", num_tensors=1, shape=(1, 4 << 20), dtype="DT_INT8")
    own.pull(["id", 1, 2, 0], "kv")
    ready()
    while True:
        own.pull(["id", 1, 2, 0], "kv")
agent.holder = spawn(work)
"""


def test_fr_057_a_killed_holder_stops_nobody(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                             rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    p, other, nursery = _prompt(prompt), decoder(2), namespace.start()
    other.call("allocate", name="kv")
    p.call("allocate", name="big", num_tensors=1, shape=[1, 4 * MIB], dtype="DT_INT8")
    namespace.somebody_died = True
    held = 0
    with SharedFile(directory_of(namespace, 1)) as found:
        for _ in range(rounds(60)):
            nursery.call("execute", code=_HOLDER)
            slot = reader_slot(found, 3)
            time.sleep(float(rng.choice([1e-6, 1e-4, 1e-2])))
            nursery.call("execute", code=SPAWN + "kill(agent.holder)")
            died_with = found.get("LinkRecord", "word", slot)
            held += died_with == HELD_BY_READER
            _works(other)
            answer = p.attempt("unlink", ids=[3])
            assert answer.value == [SUCCESS, [SUCCESS]], "the other side of that lock is not kept waiting"
            assert answer.ms < T_MS / 2, "for its whole timeout"
            assert found.get("LinkRecord", "state", slot) & 0xFF != LINK_LIVE, "the link is over: who held it is known to be dead"
    assert held, "some of them died while they held the lock"


_LOOKS: dict[str, Callable[[Peer], str]] = {
    "check_link": lambda d: d.outcome("check_link", cluster_id=1),
    "collect": lambda d: d.outcome("collect"),
    "link": lambda d: str(d.call("link", ids=[1])[1][0]),
    "switch_role": lambda d: d.outcome("switch_role", role="MIX"),
}


def test_fr_059_looking_at_a_dead_holders_lock_changes_nothing(namespace: Namespace, prompt: StartPeer,
                                                               decoder: StartPeer) -> None:
    p, d = _prompt(prompt), decoder(2)
    d.call("allocate", name="kv")
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", HELD_BY_OWNER)
        p.kill()
        before = found.get("LinkRecord", "state"), found.get("LinkRecord", "word")
        said = {name: {look(d) for _ in range(10)} for name, look in _LOOKS.items()}
        listed = subprocess.run([sys.executable, "-m", "shmkv", "ls"], env=namespace.environment({}), capture_output=True,
                                timeout=30, check=False)
        after = found.get("LinkRecord", "state"), found.get("LinkRecord", "word")
    assert (listed.returncode, listed.stderr) == (0, b""), "the list works too"
    assert said == {"check_link": {TIMED_OUT}, "collect": {SUCCESS}, "link": {"LLM_ALREADY_LINK"},
                    "switch_role": {"LLM_FEATURE_NOT_ENABLED"}}, "each says what is so, and none waits"
    assert after == before, "none changes the lock or the link"
    gone = d.attempt("pull", key=by_id(1, 1), name="kv")
    assert (gone.outcome, gone.ms < T_MS / 2) == (TIMED_OUT, True), "the pull says that the holder died"
    _prompt(prompt)
    assert d.call("unlink", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    _works(d)
