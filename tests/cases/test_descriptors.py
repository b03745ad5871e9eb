"""Field cases FR-023 to FR-026: removed names, descriptors, programs that are started, forks."""
from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_code import HEARD, LISTEN, become
from peer import SHM, Namespace, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import segments_of
from started_apart import Program, descriptors

pytestmark = pytest.mark.timeout(120)
NO_RECYCLING = {"SHMKV_RECYCLE_BYTES": "0"}
MIB = 1 << 20
PrivateShm = Callable[[str], Any]


def test_fr_023_a_name_that_is_gone_already(namespace: Namespace, prompt: StartPeer) -> None:
    p = prompt(1, env=NO_RECYCLING)
    p.call("execute", code=LISTEN)
    p.call("allocate", name="kv")
    (name,) = segments_of(namespace, 1)
    (SHM / name).unlink()
    assert p.outcome("deallocate", name="kv") == SUCCESS, "success"
    assert [text for level, text in p.call("execute", code=HEARD)[0] if level != "DEBUG"] == [], "in silence"
    assert p.outcome("allocate", name="kv") == SUCCESS, "P goes on"
    assert p.outcome("fill", name="kv", generation=1) == SUCCESS


def test_fr_023_a_name_that_cannot_be_removed(private_shm: PrivateShm) -> None:
    shm = private_shm("size=4m")
    p = shm.start(NO_RECYCLING)
    p.call("execute", code=LISTEN + become(1000))
    p.call("init", role="PROMPT", cluster_id=1, options={}, raw={})
    p.call("allocate", name="kv")
    (name,) = (name for name in shm.names() if ".c." in name)
    shm.path.chmod(0o555)
    assert p.outcome("deallocate", name="kv") == SUCCESS, "P lives"
    warned = [text for level, text in p.call("execute", code=HEARD)[0] if level == "WARNING"]
    assert any(name in text for text in warned), "a logged warning with name"
    assert any("errno 13" in text for text in warned), "and errno"
    shm.path.chmod(0o1777)
    assert p.outcome("allocate", name="other") == SUCCESS, "and goes on to allocate another cache"
    p.call("finalize")


_FEW = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))"
_HUNDRED = """
desc = shmkv.CacheDesc(2, [1, 64], shmkv.DataType.DT_INT8)
manager = agent.dist.kv_cache_manager
agent.many = [manager.allocate_cache(desc, [shmkv.CacheKey(1, 100 + number)]) for number in range(100)]
for number, cache in enumerate(agent.many):
    for tensor in cache.tensors:
        tensor.numpy()[...] = number
"""
_PULL_HUNDRED = """
result = []
for number in range(100):
    agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKey(1, 100 + number), agent.caches["kv"])
    result.append(sorted({int(v) for tensor in agent.caches["kv"].tensors for v in tensor.numpy()[0]}))
"""


def test_fr_024_descriptors_do_not_grow_with_caches(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    d.call("allocate", name="kv", num_tensors=2, shape=[1, 64], dtype="DT_INT8")
    before = [len(descriptors(peer)) for peer in (p, d)]
    for peer in (p, d):
        peer.call("execute", code=_FEW)
    assert p.outcome("execute", code=_HUNDRED) == SUCCESS, "100 caches with 32 descriptors"
    assert d.call("execute", code=_PULL_HUNDRED) == [[number] for number in range(100)], "each pulled once"
    assert [len(descriptors(peer)) for peer in (p, d)] == before, "none grows with the number of caches"


_CHILDREN = """
import os, subprocess
agent.started = [subprocess.Popen(["sleep", "30"], close_fds=False).pid,
                 os.posix_spawn("/bin/sleep", ["sleep", "30"], os.environ)]
result = agent.started
"""


def test_fr_025_started_programs_inherit_nothing(namespace: Namespace, prompt: StartPeer) -> None:
    p = prompt(1, env=NO_RECYCLING)
    for number in range(3):
        p.call("allocate", name=f"kv{number}", shape=[1, MIB], dtype="DT_INT8")
    blocks = os.statvfs(SHM).f_bfree
    started = p.call("execute", code=_CHILDREN)
    try:
        for pid in started:
            held = [path for path in descriptors(pid) if "/dev/shm/" in path]
            assert held == [], "no child holds a segment"
        for number in range(3):
            p.call("deallocate", name=f"kv{number}")
        p.call("collect")
        assert segments_of(namespace, 1) == [], "/dev/shm shrinks at once"
        assert os.statvfs(SHM).f_bfree - blocks >= 12 * MIB // os.statvfs(SHM).f_frsize - 1024, "so do the used blocks"
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        p.call("execute", code="import os\nfor pid in agent.started:\n    os.waitpid(pid, 0)")


@pytest.mark.parametrize("how", ["pull", "exit"])
def test_fr_026_fork_while_a_thread_pulls(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                          rounds: Callable[[int], int], how: str) -> None:
    nbytes, forks = 64 * MIB, rounds(10)
    p = prompt(1)
    p.call("allocate", name="kv", num_tensors=1, shape=[1, nbytes], dtype="DT_INT8")
    p.call("execute", code="agent.caches['kv'].tensors[0].numpy()[...] = 7")
    program = Program(namespace, "fork_while_pulling.py", how, str(forks), str(nbytes))
    said = json.loads(program.line() or "{}")
    own = segments_of(namespace, 2)
    assert said.get("codes") == [0] * forks, "a child's pull fails with a clear exception; a child's exit is clean"
    assert said["slowest"] < 10, "no child hangs"
    assert (said["wrong"], said["ok"], said["pulls"] > 0) == (0, True, True), "the parent's pulls end with right bytes"
    assert len(own) == 1, "a child's exit removes no segment"
    assert Path(f"/proc/{program.pid}").exists(), "the parent lives"
    twin = namespace.start()
    refused = twin.attempt("init", role="DECODER", cluster_id=2, options={}, raw={})
    assert "LLMException" in refused.kinds, "a child's exit releases no lock of the parent: it still counts as alive"
    ended = program.end()
    assert (ended.code, ended.complained) == (0, ""), "and ends in silence"
    d = decoder(3)
    d.call("allocate", name="kv", num_tensors=1, shape=[1, nbytes], dtype="DT_INT8")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "P is unharmed"


def test_fr_026_a_child_may_init_a_cluster_of_its_own(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 7)])
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv")
    code = d.call("execute", code="""
import os
from agent import Agent
pid = os.fork()
if pid == 0:
    code = 1
    try:
        own = Agent()
        own.init("DECODER", 9, {"sync_kv_timeout": 20000}, {})
        assert own.link([1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
        own.allocate("kv")
        own.pull(["key", 1, 7, 0, 2**64 - 1], "kv")
        own.finalize()
        code = 0
    finally:
        os._exit(code)
result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
    assert code == 0, "the child pulled through a link of its own"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "the parent's link goes on"
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(geometry(4, [2, 8], 2), 1)[:, :, 0])
