"""Field cases FR-010 to FR-014: too little shared memory, pages that are not there, no /dev/shm at all, a memory limit."""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_code import HEARD, LISTEN, enter_private_shm, mount_tmpfs
from interposed import Interposer
from peer import SHM, Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import segments_of

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
NO_MEMORY = "LLM_DEVICE_OUT_OF_MEMORY"
PrivateShm = Callable[[str], Any]


def _of_bytes(nbytes: int, rows: int = 1) -> dict[str, Any]:
    return {"name": "kv", "num_tensors": 1, "shape": [rows, nbytes // rows], "dtype": "DT_INT8"}


def test_fr_010_too_little_shared_memory_is_an_answer(private_shm: PrivateShm) -> None:
    shm = private_shm("size=1m")
    p = shm.cluster("PROMPT", 1)
    before = shm.names()
    answer = p.attempt("allocate", **_of_bytes(4 * MIB))
    assert answer.outcome == NO_MEMORY, "the first raises the out-of-memory status"
    assert str(4 * MIB) in answer.text, "it names the bytes wanted"
    free = os.statvfs(shm.path)
    assert f"{free.f_bavail * free.f_frsize} bytes free" in answer.text, "it names the bytes free"
    assert shm.names() == before, "no partial file is left"
    assert p.outcome("allocate", **_of_bytes(MIB // 2)) == SUCCESS, "P lives; the second works"
    p.call("fill", name="kv", generation=1)


def test_fr_011_every_page_is_there_from_the_beginning(private_shm: PrivateShm) -> None:
    shm = private_shm("size=2m")
    p, d = shm.cluster("PROMPT", 1), shm.cluster("DECODER", 2)
    p.call("allocate", **_of_bytes(MIB, rows=4))
    (name,) = (name for name in shm.names() if ".c." in name)
    found = os.stat(shm.path / name)
    assert found.st_blocks * 512 >= found.st_size, "every page was reserved at allocation"
    d.call("allocate", **_of_bytes(MIB // 4))
    d.call("link", ids=[1])
    with (shm.path / "filler").open("wb", buffering=0) as filler:
        written = filler.write(bytes(MIB))
    assert written < MIB, "another process filled the rest"
    assert os.statvfs(shm.path).f_bfree == 0, "all of it"
    p.call("fill", name="kv", generation=1)
    wanted = pattern(geometry(1, [4, MIB // 4], 1), 1)
    for row in range(4):
        assert d.outcome("pull", key=by_id(1, 1, row), name="kv") == SUCCESS, "no signal"
        np.testing.assert_array_equal(d.read("kv")[0, 0, 0], wanted[0, 0, row], err_msg="right bytes")
    (shm.path / "filler").unlink()


@pytest.mark.parametrize("fault", ["unsupported", "interrupted"])
def test_fr_012_reserving_where_the_kernel_will_not(namespace: Namespace, interposer: Interposer, prompt: StartPeer,
                                                    decoder: StartPeer, fault: str) -> None:
    p = prompt(1, env=interposer.environment(fault))
    assert p.outcome("allocate", **_of_bytes(64 << 10), keys=[req(1, 7)]) == SUCCESS, "it works all the same"
    for name in segments_of(namespace, 1):
        found = os.stat(SHM / name)
        assert found.st_blocks * 512 >= found.st_size, "never an unreserved segment"
    tries = [call.result for call in interposer.calls(p.pid) if call.name == "fallocate"]
    if fault == "interrupted":
        assert len([result for result in tries if result]) == 3, "EINTR is retried"
        assert tries[-1] == 0, "and then works"
    else:
        assert set(tries) == {95}, "the pages were reserved another way"
    p.call("fill", name="kv", generation=2)
    d = decoder(2)
    d.call("allocate", **_of_bytes(64 << 10))
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv"), pattern(geometry(1, [1, 64 << 10], 1), 2), err_msg="right bytes")


MS_RDONLY = 1
_PLACES = {
    "missing": enter_private_shm("size=1m") + mount_tmpfs("/dev", "size=1m"),
    "read-only": enter_private_shm("size=1m") + mount_tmpfs("/dev/shm", "size=1m", MS_RDONLY),
    "too small": enter_private_shm("size=32k"),
}


@pytest.mark.parametrize("state", list(_PLACES))
def test_fr_013_no_other_place_is_used_in_silence(namespace: Namespace, interposer: Interposer, state: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace")
    p = namespace.start(interposer.environment())
    p.call("execute", code=LISTEN + _PLACES[state])
    begun = len(interposer.calls())
    answer = p.attempt("init", role="PROMPT", cluster_id=1, options={}, raw={})
    assert "LLMException" in answer.kinds, "an explicit error"
    assert "/dev/shm" in answer.text, "it names the place"
    made = [call for call in interposer.calls()[begun:] if call.creates and not call.path.startswith("/dev/shm/")]
    assert made == [], "no file of the library appears outside /dev/shm"
    assert p.call("execute", code=HEARD)[1] == [], "nothing unraisable"
    left = p.call("execute", code="import glob\nresult = glob.glob('/dev/shm/*')")
    assert left == [], "nothing is left of the failed init"


def test_fr_013_too_small_for_a_cache(private_shm: PrivateShm, interposer: Interposer) -> None:
    shm = private_shm("size=400k")
    p = shm.cluster("PROMPT", 1, interposer.environment())
    answer = p.attempt("allocate", **_of_bytes(MIB))
    assert answer.outcome == NO_MEMORY, "an explicit error"
    made = [call for call in interposer.calls() if call.creates and call.result >= 0]
    assert all(call.path.startswith("/dev/shm/") for call in made), "no file appears outside /dev/shm"


def test_fr_014_a_memory_limit_is_an_answer_at_allocate(prompt: StartPeer, decoder: StartPeer,
                                                        memory_cgroup: Callable[[Peer, int], None]) -> None:
    p, d = prompt(1), decoder(2)
    memory_cgroup(p, 64 * MIB)
    first = p.call("allocate", **_of_bytes(48 * MIB))
    answer = p.attempt("allocate", **{**_of_bytes(48 * MIB), "name": "more"})
    assert answer.outcome == NO_MEMORY, "the second raises the out-of-memory status"
    assert "cgroup" in answer.text, "it names what is short"
    # In place: the limit leaves no room for a second copy of these bytes in P.
    p.call("execute", code="tokens = agent.caches['kv'].tensors[0].numpy().reshape(48, 1 << 20)\n"
                           "tokens[:] = np.arange(48, dtype=np.int8)[:, None]")
    d.call("allocate", **_of_bytes(48 * MIB))
    assert d.outcome("pull", key=by_id(1, first), name="kv") == SUCCESS, "no later write or read is killed"
    arrived = d.call("execute", code="tokens = agent.caches['kv'].tensors[0].numpy().reshape(48, 1 << 20)\n"
                                     "result = [[int(token.min()), int(token.max())] for token in tokens]")
    assert arrived == [[number, number] for number in range(48)], "right bytes"
    p.kill()
    dead = d.attempt("pull", key=by_id(1, first), name="kv")
    assert dead.outcome == "LLM_WAIT_PROCESS_TIMEOUT", "D sees the death of P"
    assert dead.ms < 10000, "within half of its timeout"
