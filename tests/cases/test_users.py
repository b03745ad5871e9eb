"""Field cases FR-009, FR-077, FR-078 and FR-080 (owner and mode): another user was there first."""
from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_code import HEARD, LISTEN, become
from interposed import Interposer
from peer import SHM, Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import segments_of
from started_apart import maps

pytestmark = pytest.mark.timeout(120)
VICTIM, OTHER = 1000, 1001
PrivateShm = Callable[[str], Any]


def _as_user(shm: Any, uid: int, env: dict[str, str] | None = None) -> Peer:
    peer: Peer = shm.start(env)
    peer.call("execute", code=LISTEN + become(uid, default_namespace=True))
    return peer


def _init(peer: Peer, role: str, cluster_id: int) -> str:
    return peer.outcome("init", role=role, cluster_id=cluster_id, options={"sync_kv_timeout": 20000}, raw={})


def _exchange(p: Peer, d: Peer) -> str:
    """P publishes a key, D links and pulls it: the outcome of the pull."""
    p.call("allocate", name="kv", keys=[req(1, 7)])
    p.call("fill", name="kv", generation=1)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv")
    outcome = d.outcome("pull", key=req(1, 7), name="kv")
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(geometry(4, [2, 8], 2), 1)[:, :, 0])
    return outcome


def _look(shm: Any) -> dict[str, tuple[int, int, int]]:
    found = {name: os.lstat(shm.path / name) for name in shm.names()}
    return {name: (entry.st_ino, entry.st_mode, entry.st_mtime_ns) for name, entry in found.items()}


def test_fr_009_leftovers_of_another_user(private_shm: PrivateShm, interposer: Interposer) -> None:
    shm = private_shm("size=8m")
    p = _as_user(shm, VICTIM)
    assert _init(p, "PROMPT", 1) == SUCCESS
    p.call("allocate", name="kv", keys=[req(1, 7)])
    p.kill()
    left = _look(shm)
    assert len(left) >= 4, "the killed process left its files"
    p2, d2 = (_as_user(shm, OTHER, interposer.environment()) for _ in range(2))
    for peer in (p2, d2):
        peer.call("execute", code="import os\nos.environ['SHMKV_NAMESPACE'] = 'team'")
    assert (_init(p2, "PROMPT", 1), _init(d2, "DECODER", 2)) == (SUCCESS, SUCCESS), "it works"
    assert _exchange(p2, d2) == SUCCESS, "they exchange one key"
    for peer in (d2, p2):
        peer.call("finalize")
    for peer in (p2, d2):
        peer.call("execute", code="import os\nos.environ.pop('SHMKV_NAMESPACE')")
    assert (_init(p2, "PROMPT", 1), _init(d2, "DECODER", 2)) == (SUCCESS, SUCCESS), "in the default namespace too"
    assert [call for call in interposer.calls() if call.path.endswith(".life")], "the interposer saw the opens"
    opened = [call for call in interposer.calls() if Path(call.path).name in left and call.result >= 0]
    assert opened == [], "nothing of the first user was opened for writing or removed"
    assert _look(shm).items() >= left.items(), "nothing of the first user changed"


def test_fr_009_a_leftover_that_is_in_the_way_is_named(private_shm: PrivateShm) -> None:
    shm = private_shm("size=8m")
    p = _as_user(shm, VICTIM)
    p.call("execute", code="import os\nos.environ['SHMKV_NAMESPACE'] = 'team'")
    assert _init(p, "PROMPT", 1) == SUCCESS
    p.kill()
    left = _look(shm)
    p2 = _as_user(shm, OTHER)
    p2.call("execute", code="import os\nos.environ['SHMKV_NAMESPACE'] = 'team'")
    answer = p2.attempt("init", role="PROMPT", cluster_id=1, options={}, raw={})
    assert "LLMException" in answer.kinds, "a clear exception"
    assert "/dev/shm/team.life" in answer.text, "it names what is in the way"
    assert _look(shm) == left, "nothing of the first user changed"


def _squat(name: Path, kind: str, home: Path) -> None:
    if kind == "file":
        name.write_bytes(b"squatter")
        name.chmod(0o666)
    elif kind == "directory":
        name.mkdir(mode=0o777)
    elif kind == "fifo":
        os.mkfifo(name, 0o666)
        name.chmod(0o666)
    else:
        name.symlink_to(home)
    os.lchown(name, OTHER, OTHER)


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "fifo"])
@pytest.mark.parametrize("what", ["life", "members.v2"])
def test_fr_077_another_user_takes_the_names_first(private_shm: PrivateShm, open_folder: Path, interposer: Interposer,
                                                   kind: str, what: str) -> None:
    shm = private_shm("size=8m")
    home = open_folder / "precious"
    home.write_bytes(b"precious")
    os.chown(home, VICTIM, VICTIM)
    names = [f"shmkv-{VICTIM}.{what}", *(f"shmkv-{VICTIM}.d.{number:016x}" for number in range(500)),
             *(f"shmkv-{VICTIM}.c.{number:016x}.1" for number in range(500))]
    for name in names:
        _squat(shm.path / name, kind, home)
    before = _look(shm)
    p = _as_user(shm, VICTIM, interposer.environment())
    answer = p.attempt("init", role="PROMPT", cluster_id=1, options={}, raw={})
    assert answer.outcome != SUCCESS, "fails: these names cannot be chosen otherwise"
    assert f"/dev/shm/shmkv-{VICTIM}.{what}" in answer.text, "a text that names the squatter"
    assert _look(shm).items() >= before.items(), "P changes nothing that it did not create"
    assert maps(p, f"shmkv-{VICTIM}.{what}") == [], "never maps it"
    assert home.read_bytes() == b"precious", "no file outside /dev/shm is touched"
    assert home.stat().st_mode & 0o777 == 0o644, "nor its mode"
    assert any(call.path.endswith(what) for call in interposer.calls()), "the interposer saw the open"
    assert [call for call in interposer.calls() if call.path == str(home)] == [], "never follows"
    assert not stat.S_ISLNK(os.lstat(home).st_mode)


def test_fr_077_names_that_cannot_be_guessed_are_free(private_shm: PrivateShm) -> None:
    shm = private_shm("size=8m")
    home = Path("/nonexistent")
    for number in range(1000):
        _squat(shm.path / f"shmkv-{VICTIM}.{'dc'[number % 2]}.{number:016x}{'.1' * (number % 2)}", "file", home)
    before = _look(shm)
    p, d = _as_user(shm, VICTIM), _as_user(shm, VICTIM)
    assert (_init(p, "PROMPT", 1), _init(d, "DECODER", 2)) == (SUCCESS, SUCCESS), "works with other names"
    assert _exchange(p, d) == SUCCESS, "and exchanges a key"
    d.call("finalize")
    p.call("finalize")
    assert _look(shm) == before, "what it did not create is as it was"
    heard = p.call("execute", code=HEARD)[0]
    assert all(level in ("DEBUG", "INFO", "WARNING") for level, _ in heard), "at most warnings"


def test_fr_078_no_directory_is_used(private_shm: PrivateShm) -> None:
    shm = private_shm("size=8m")
    p = _as_user(shm, VICTIM)
    assert _init(p, "PROMPT", 1) == SUCCESS
    p.call("allocate", name="kv")
    kinds = {stat.S_IFMT(os.lstat(shm.path / name).st_mode) for name in shm.names()}
    assert kinds == {stat.S_IFREG}, "all names are files directly in /dev/shm: there is no directory to squat"


@pytest.mark.parametrize("wrong", ["mode", "owner"])
def test_fr_080_wrong_owner_or_mode_is_not_mapped(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                  wrong: str) -> None:
    if wrong == "owner" and os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 7)])
    d.call("allocate", name="kv")
    d.call("canary", name="kv")
    (name,) = segments_of(namespace, 1)
    if wrong == "owner":
        os.chown(SHM / name, OTHER, OTHER)
    else:
        (SHM / name).chmod(0o660)
    answer = d.attempt("pull", key=req(1, 7), name="kv")
    assert "LLMException" in answer.kinds, "a status"
    assert "mode 0600" in answer.text, "it says what is wrong"
    assert maps(d, name) == [], "not mapped"
    np.testing.assert_array_equal(d.read("kv"), np.full((4, 1, 2, 16), 0x5A, np.uint8), err_msg="nothing written")
    os.chown(SHM / name, os.geteuid(), os.getegid())
    (SHM / name).chmod(0o600)
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "it works when that is mended"


@pytest.mark.parametrize("wrong", ["mode", "owner"])
def test_fr_080_a_directory_of_another_owner_or_mode(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                     wrong: str) -> None:
    if wrong == "owner" and os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    prompt(1)
    (name,) = (name for name in namespace.names() if ".d." in name)
    if wrong == "owner":
        os.chown(SHM / name, OTHER, OTHER)
    else:
        (SHM / name).chmod(0o644)
    d = decoder(2, link=())
    assert d.call("link", ids=[1], timeout=2000) == ["LLM_LINK_FAILED", ["LLM_LINK_FAILED"]], "a status"
    assert maps(d, name) == [], "not mapped"
    d.call("allocate", name="kv")
    assert "mode 0600" in d.attempt("pull", key=by_id(1, 1), name="kv").text, "the next message says why"
    os.chown(SHM / name, os.geteuid(), os.getegid())
    (SHM / name).chmod(0o600)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "it works when that is mended"
