"""Field cases FR-001 to FR-005: shared memory and buffer views of Python."""
from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from agent_code import HEARD, LISTEN, MAPPED
from peer import SHM, Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import SharedFile, directory_of, segments_of
from started_apart import Program, children

pytestmark = pytest.mark.timeout(120)
ROW = geometry(4, [1, 4096], 1)


def _p_with_a_row(prompt: StartPeer) -> Peer:
    p = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"})
    p.call("allocate", name="kv", shape=[1, 4096], dtype="DT_INT8", keys=[req(1, 7)])
    p.call("fill", name="kv", generation=1)
    return p


def _owned(files: list[str]) -> list[tuple[str, int]]:
    return [(name, os.stat(SHM / name).st_ino) for name in files]


def test_fr_001_a_reader_that_exits_takes_nothing_with_it(namespace: Namespace, prompt: StartPeer,
                                                          decoder: StartPeer) -> None:
    p, d2 = _p_with_a_row(prompt), decoder(2)
    d2.call("allocate", name="kv", shape=[1, 4096], dtype="DT_INT8")
    before = _owned(segments_of(namespace, 1))
    right = hashlib.sha256(pattern(ROW, 1).tobytes()).hexdigest()
    for place, how in enumerate([None, signal.SIGINT, signal.SIGKILL]):
        d1 = Program(namespace, "pull_and_wait.py", str(10 + place))
        assert d1.line() == right, "D1's own bytes"
        assert children(d1.pid) == [], "no tracker helper process was started"
        if how is not None:
            d1.signal(how)
        ended = d1.end()
        assert ended.code == -(how or 0), "D1 ended as the test wanted"
        said = [line for line in ended.complained.splitlines() if "tracker" in line or "shmkv" in line.lower()]
        assert said == [], "neither the library nor a tracker printed anything"
        assert how == signal.SIGINT or ended.complained == "", "nothing at all on stderr"
        d2.call("canary", name="kv")
        assert d2.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "D2's pull"
        np.testing.assert_array_equal(d2.read("kv"), pattern(ROW, 1), err_msg="D2's bytes are right each time")
        assert _owned(segments_of(namespace, 1)) == before, "the segment still exists"
    p.call("remove_key", key=req(1, 7))
    p.call("deallocate", name="kv")
    p.call("collect")
    assert segments_of(namespace, 1) == [], "the segment exists until P frees it"


# The padding of a row is what stands behind its tensor up to the next 64-byte boundary.
_AROUND = """
import ctypes
base = agent.caches["kv"].per_device_tensor_addrs[0][0]
around = (ctypes.c_ubyte * 59).from_address(base + 5)
before = (ctypes.c_ubyte * 64).from_address(base - 64)
"""


def test_fr_002_padding_is_never_part_of_a_row(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    for peer in (p, d):
        peer.call("allocate", name="kv", num_tensors=1, shape=[1, 5], dtype="DT_INT8")
    p.call("fill", name="kv", generation=3)
    p.call("execute", code=_AROUND + "around[:] = [0xA5] * 59")
    d.call("canary", name="kv")
    d.call("execute", code=_AROUND + "around[:] = [0x77] * 59\nbefore[:] = [0xA5] * 64")
    shape = geometry(1, [1, 5], 1)
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv"), pattern(shape, 3), err_msg="the first pull copies exactly 5 bytes")
    too_long = d.attempt("pull", key=by_id(1, 1), name="kv", size=6)
    assert (too_long.outcome, "ValueError" in too_long.kinds) == ("LLM_PARAM_INVALID", True), "size 6"
    behind = d.attempt("pull", key=by_id(1, 1), name="kv", size=1, src_cache_offset=5)
    assert (behind.outcome, "ValueError" in behind.kinds) == ("LLM_PARAM_INVALID", True), "offset 5"
    np.testing.assert_array_equal(d.read("kv"), pattern(shape, 3), err_msg="padding is never copied")
    whole = d.call("execute", code=_AROUND + "result = [sorted(set(around)), sorted(set(before))]")
    assert whole == [[0x77], [0xA5]], "the canaries around the destination are whole"


_VIEW = """
agent.array = agent.caches["kv"].tensors[1].numpy()
agent.array[...] = 42
"""
_END_WITH_VIEW = """
agent.dist.kv_cache_manager.deallocate_cache(agent.caches["kv"])
agent.dist.finalize()
"""


@pytest.mark.parametrize("recycle", ["0", str(1 << 30)])
def test_fr_003_a_view_outlives_its_cache(namespace: Namespace, prompt: StartPeer, recycle: str) -> None:
    p = prompt(1, env={"SHMKV_RECYCLE_BYTES": recycle})
    p.call("allocate", name="kv", shape=[2, 3000], dtype="DT_INT8")
    p.call("execute", code=LISTEN + _VIEW)
    assert p.outcome("execute", code=_END_WITH_VIEW) == SUCCESS, "no BufferError and no crash"
    assert namespace.names() == set(), "the name is gone at once"
    assert p.call("execute", code="result = int(agent.array[1, 2999])") == 42, "the view stays readable"
    mapped = p.call("execute", code=MAPPED)
    assert [path for path in mapped if f"{namespace.name}.c." in path], "the probe sees the mapping of a living view"
    p.call("execute", code="del agent.array\nagent.caches.clear()")
    mapped = p.call("execute", code=MAPPED)
    assert [path for path in mapped if f"{namespace.name}.c." in path] == [], "no mapping after the drop"
    assert p.call("execute", code=HEARD)[1] == [], "nothing unraisable"


@pytest.mark.parametrize("damaged", ["segment", "directory", "tensor"])
def test_fr_004_the_first_error_is_the_one_that_is_seen(namespace: Namespace, prompt: StartPeer,
                                                        decoder: StartPeer, damaged: str) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv")
    d.call("allocate", name="kv")
    d.call("canary", name="kv")
    d.call("execute", code=LISTEN + "agent.view = agent.caches['kv'].tensors[0].numpy()")
    name = segments_of(namespace, 1)[0] if damaged == "segment" else directory_of(namespace, 1)
    field = {"segment": ("Header", "magic"), "directory": ("CacheRecord", "segment_nbytes"),
             "tensor": ("TensorRecord", "nbytes")}[damaged]
    with SharedFile(name) as found:
        offset, nbytes = found.place(*field)
        kept = found.bytes[offset:offset + nbytes]
        found.bytes[offset:offset + nbytes] = b"\xff" * nbytes
        answer = d.attempt("pull", key=by_id(1, 1), name="kv")
        found.bytes[offset:offset + nbytes] = kept
    assert "LLMException" in answer.kinds, "it is the LLMException of the real cause"
    assert any(word in answer.text for word in ("magic", "size", "segment")), "its text tells the cause"
    assert "During handling" not in answer.trace, "nothing raised in cleanup took its place"
    d.call("execute", code="agent.view = None")
    assert d.call("execute", code=HEARD)[1] == [], "sys.unraisablehook was never called"
    np.testing.assert_array_equal(d.read("kv"), np.full((4, 1, 2, 16), 0x5A, np.uint8), err_msg="nothing written")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "the link works when the damage is mended"


@pytest.mark.parametrize(("how", "code"), [("fall", 0), ("exit", 3), ("raise", 1), ("touch", 0), ("leave", 0)])
def test_fr_005_interpreter_ends_without_finalize(namespace: Namespace, prompt: StartPeer, how: str,
                                                  code: int) -> None:
    p = prompt(1)
    p.call("allocate", name="kv", shape=[2, 64], dtype="DT_INT8")
    program = Program(namespace, "end_without_finalize.py", how)
    ended = program.end()
    assert ended.said.splitlines()[0] == "pulled", "the program did its work"
    assert ended.code == code, "exit code"
    own = ended.complained.splitlines()
    assert (own == [] if how != "raise" else own[-1].startswith("LookupError")), "stderr is silent"
    assert "shmkv" not in ended.complained.replace(str(Path.cwd()), ""), "stderr holds nothing from the library"
    incarnation = directory_of(namespace, 1).rpartition(".")[2]
    of_others = {name for name in namespace.names() if ".c." in name or ".d." in name} - {
        name for name in namespace.names() if incarnation in name}
    assert of_others == set(), "/dev/shm holds none of its segments"
    assert p.outcome("fill", name="kv", generation=1) == SUCCESS, "its peer goes on"
