"""Field cases FR-006 to FR-008 and FR-079: names, creating, sizing, opening."""
from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from agent_code import HEARD, LISTEN
from interposed import Call, Interposer
from peer import SHM, Namespace, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import directory_of

pytestmark = pytest.mark.timeout(120)
ROWS = geometry(4, [2, 8], 2)


def _look(name: str) -> tuple[int, int, int, bytes]:
    found = os.stat(SHM / name)
    return found.st_ino, found.st_size, found.st_mtime_ns, (SHM / name).read_bytes()


def test_fr_006_a_name_that_is_taken_is_left_alone(namespace: Namespace, interposer: Interposer, prompt: StartPeer,
                                                   decoder: StartPeer, rng: np.random.Generator) -> None:
    p = prompt(1, env=interposer.environment())
    incarnation = directory_of(namespace, 1).rpartition(".")[2]
    squatter = f"{namespace.name}.c.{incarnation}.1"
    (SHM / squatter).write_bytes(rng.bytes(8192))
    before = _look(squatter)
    p.call("execute", code=LISTEN)
    p.call("allocate", name="kv", num_tensors=1, shape=[1, 4096], dtype="DT_INT8")
    p.call("fill", name="kv", generation=1)
    d = decoder(2)
    d.call("allocate", name="kv", num_tensors=1, shape=[1, 4096], dtype="DT_INT8")
    pulled = d.outcome("pull", key=by_id(1, 1), name="kv")
    assert _look(squatter) == before, "the existing inode keeps its size, content and mtime"
    assert pulled == SUCCESS, "P uses another name"
    np.testing.assert_array_equal(d.read("kv"), pattern(geometry(1, [1, 4096], 1), 1), err_msg="right bytes")
    assert any(squatter in text for _, text in p.call("execute", code=HEARD)[0]), "the log names it"
    assert [call for call in interposer.calls() if call.creates and not call.flags & os.O_EXCL
            and call.path.startswith("/dev/shm")] == [], "never create without exclusive"
    (SHM / squatter).unlink()


def test_fr_006_eight_taken_names_are_a_clear_status(namespace: Namespace, prompt: StartPeer) -> None:
    p = prompt(1)
    incarnation = directory_of(namespace, 1).rpartition(".")[2]
    squatters = [f"{namespace.name}.c.{incarnation}.{serial:x}" for serial in range(1, 12)]
    for name in squatters:
        (SHM / name).write_bytes(b"x")
    before = [_look(name) for name in squatters]
    answer = p.attempt("allocate", name="kv")
    assert [_look(name) for name in squatters] == before, "nothing of it was touched"
    assert "LLMException" in answer.kinds, "a clear status"
    assert f"{namespace.name}.c.{incarnation}" in answer.text, "it names what is in the way"
    assert p.outcome("allocate", name="kv") == SUCCESS, "P lives and goes on behind them"
    for name in squatters:
        (SHM / name).unlink()


def test_fr_007_a_living_publisher_is_not_replaced(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    p1 = prompt(1)
    p1.call("allocate", name="kv", keys=[req(1, 7)])
    p1.call("fill", name="kv", generation=1)
    own = [(name, os.stat(SHM / name).st_ino) for name in sorted(namespace.names())]
    p2 = namespace.start()
    refused = p2.attempt("init", role="PROMPT", cluster_id=1, options={}, raw={})
    assert "LLMException" in refused.kinds, "P2 is refused with LLMException"
    assert str(p1.pid) in refused.text, "the text names who has the id"
    assert [(name, os.stat(SHM / name).st_ino) for name in sorted(namespace.names())] == own, (
        "P1's segments keep name and inode")
    d = decoder(2)
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "a pull from P1 still works"
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0], err_msg="right bytes")
    p1.kill()
    assert p2.outcome("init", role="PROMPT", cluster_id=1, options={}, raw={}) == SUCCESS, "a dead one is replaced"


def _in_shm(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.path.startswith("/dev/shm/")]


def test_fr_008_each_segment_is_sized_once_by_its_creator(interposer: Interposer, prompt: StartPeer,
                                                          decoder: StartPeer) -> None:
    p, d = prompt(1, env=interposer.environment()), decoder(2, env=interposer.environment())
    p.call("allocate", name="kv", publish=False)
    ready = len(interposer.calls())
    created = {call.path: call.pid for call in _in_shm(interposer.calls()) if call.creates and call.result >= 0}
    p.call("fill", name="kv", generation=1)
    p.call("publish", name="kv")
    d.call("allocate", name="kv")
    assert [d.outcome("pull", key=by_id(1, 1), name="kv") for _ in range(10)] == [SUCCESS] * 10
    p.call("deallocate", name="kv")
    calls = _in_shm(interposer.calls())
    sized = Counter(call.path for call in calls if call.sizes)
    assert {path for path, times in sized.items() if times > 1} == set(), "each segment is sized once"
    owner = {call.path: call.pid for call in calls if call.creates and call.result >= 0}
    assert all(owner.get(call.path) == call.pid for call in calls if call.sizes), "by its creator"
    late = [call for call in _in_shm(interposer.calls()[ready:]) if call.sizes and call.path in created]
    assert late == [], "before its name can be found as ready"
    p_made = {path for path, pid in created.items() if pid == p.pid}
    assert [call for call in calls if call.pid == d.pid and call.sizes and call.path in p_made] == [], "D sizes nothing"
    assert sum(sized.values()) >= 6, "the interposer saw the calls"


def test_fr_079_every_file_is_created_exclusively_and_private(interposer: Interposer, prompt: StartPeer) -> None:
    p = prompt(1, env=interposer.environment())
    p.call("execute", code="import os\nos.umask(0)")
    p.call("allocate", name="kv")
    p.call("execute", code="import os\nos.umask(0o277)")
    p.call("allocate", name="other", shape=[3, 1000])
    made = [call for call in _in_shm(interposer.calls()) if call.creates]
    assert len(made) >= 5, "life file, table, directory and two segments were seen"
    assert all(call.flags & os.O_EXCL for call in made), "O_EXCL"
    assert all(call.status_flags & os.O_NOFOLLOW for call in made), "O_NOFOLLOW"
    assert all(call.descriptor_flags & 1 for call in made), "O_CLOEXEC"
    assert {call.mode for call in made} == {0o600}, "0600 was asked for"
    modes = {os.stat(call.path).st_mode & 0o7777 for call in made}
    assert modes == {0o600}, "0600 is what the files have, whatever the umask"
    opened = [call for call in _in_shm(interposer.calls()) if call.name == "open" and call.result >= 0]
    assert all(call.status_flags & os.O_NOFOLLOW and call.descriptor_flags & 1 for call in opened), "so are all opens"
