"""`shmkv gc`: exactly what the dead left goes."""
from __future__ import annotations

import json
from typing import Any

import pytest
from peer import SHM, Namespace, Peer, StartPeer, req

pytestmark = pytest.mark.timeout(120)


def inodes(namespace: Namespace) -> dict[str, int]:
    """Name → inode of every file of the namespace."""
    return {name: (SHM / name).stat().st_ino for name in namespace.names()}


def cleaned(cli: Any, *arguments: str) -> dict[str, Any]:
    """What `gc --json` did."""
    done = cli("gc", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def living(prompt: StartPeer) -> Peer:
    """A prompt that lives and owns a cache with a key."""
    peer = prompt(1)
    peer.call("allocate", name="kv", keys=[req(1, 7)])
    return peer


def test_nothing_to_do(namespace: Namespace, cli: Any) -> None:
    assert cleaned(cli)["files"] == []
    assert namespace.names() == set()
    assert "nothing" in cli("gc").stdout


def test_dry_run_then_real_run_removes_the_dead_ones_files_alone(living: Peer, namespace: Namespace, decoder: StartPeer,
                                                                  cli: Any) -> None:
    before = inodes(namespace)
    dead = decoder(2)
    dead.call("allocate", name="kv")
    dead.call("pull", key=req(1, 7), name="kv")
    dead.kill()
    everything = inodes(namespace)
    left_behind = set(everything) - set(before)
    assert len(left_behind) == 2

    planned = cleaned(cli, "--dry-run")
    assert {file["name"] for file in planned["files"]} == left_behind
    assert inodes(namespace) == everything

    done = cleaned(cli)
    assert (done["files"], done["whole_namespace"]) == (planned["files"], False)
    assert done["bytes"] == sum(file["bytes"] for file in done["files"]) > 0
    assert inodes(namespace) == before
    assert cleaned(cli)["files"] == []


def test_living_member_goes_on_after_gc(living: Peer, decoder: StartPeer, cli: Any) -> None:
    decoder(2).kill()
    assert len(cleaned(cli)["files"]) == 1
    living.call("allocate", name="more", keys=[req(1, 9)])
    heir = decoder(2)
    heir.call("allocate", name="kv")
    heir.call("pull", key=req(1, 9), name="kv")
    assert heir.outcome("pull", key=req(1, 9), name="kv") == "LLM_KV_CACHE_NOT_EXIST"


def test_stopped_member_is_not_dead(living: Peer, namespace: Namespace, cli: Any) -> None:
    before = inodes(namespace)
    living.stop()
    assert cleaned(cli)["files"] == []
    assert inodes(namespace) == before
    living.cont()


def test_namespace_without_anybody_goes_altogether(living: Peer, namespace: Namespace, decoder: StartPeer, cli: Any) -> None:
    decoder(2).kill()
    living.kill()
    before = namespace.names()
    assert {f"{namespace.name}.life", f"{namespace.name}.members.v2"} < before
    planned = cleaned(cli, "--dry-run")
    assert ({file["name"] for file in planned["files"]}, planned["whole_namespace"]) == (before, True)
    assert namespace.names() == before
    assert {file["name"] for file in cleaned(cli)["files"]} == before
    assert namespace.names() == set()


def test_table_for_people_names_what_went(living: Peer, namespace: Namespace, cli: Any) -> None:
    living.kill()
    before = namespace.names()
    done = cli("gc", "--namespace", namespace.name, env={"SHMKV_NAMESPACE": "elsewhere"})
    assert done.returncode == 0
    assert all(name in done.stdout for name in before)
    assert namespace.names() == set()


def test_life_file_that_is_in_the_way_is_one_red_line(namespace: Namespace, cli: Any) -> None:
    life = SHM / f"{namespace.name}.life"
    life.symlink_to("/dev/null")
    done = cli("gc")
    life.unlink()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
