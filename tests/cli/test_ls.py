"""`shmkv ls`: the living, the dead, and files that cannot be read."""
from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from peer import SHM, Namespace, Peer, StartPeer, req

pytestmark = pytest.mark.timeout(300)     # many programs, one after the other


def clusters(cli: Any, *arguments: str) -> dict[int, Any]:
    """What `ls --json` says of each cluster."""
    done = cli("ls", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return {each["cluster_id"]: each for each in json.loads(done.stdout)["clusters"]}


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """A prompt with a cache of two keys, and a decoder that has pulled one of them."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 7), req(1, 8)])
    d.call("allocate", name="kv")
    d.call("pull", key=req(1, 7), name="kv")
    return p, d


def directory_of(namespace: Namespace, incarnation: str) -> Path:
    return SHM / f"{namespace.name}.d.{incarnation}"


def test_namespace_that_does_not_exist_is_empty(namespace: Namespace, cli: Any) -> None:
    assert clusters(cli) == {}
    assert namespace.name in cli("ls").stdout
    assert namespace.names() == set()


def test_living_clusters_show_caches_and_links(pair: tuple[Peer, Peer], cli: Any) -> None:
    found = clusters(cli)
    assert [(each["role"], each["pid"], each["alive"], each["fault"], each["state"]) for each in (found[1], found[2])] == [
        ("PROMPT", pair[0].pid, True, "", "open"), ("DECODER", pair[1].pid, True, "", "open")]
    [cache] = found[1]["caches"]
    assert {name: cache[name] for name in ("state", "kind", "tensors", "rows", "keys", "published_rows", "dtype", "fault")} == {
        "state": "live", "kind": "contiguous", "tensors": 4, "rows": 2, "keys": 1, "published_rows": 2, "dtype": "DT_FLOAT16",
        "fault": ""}
    [link] = found[1]["links"]
    assert (link["state"], link["lock"]["holder"], link["initiator"]["cluster_id"]) == ("live", None, 2)
    assert (link["initiator"]["pulls"], link["initiator"]["bytes"]) == (1, 4 * 8 * 2)
    assert found[1]["bytes"] >= cache["bytes"]


def test_tensors_that_differ_are_shown_as_mixed(prompt: StartPeer, cli: Any) -> None:
    p = prompt(1)
    for name, shapes, dtypes in (("sizes", [[2, 8], [2, 4]], ["DT_BF16", "DT_BF16"]),
                                 ("types", [[2, 8], [2, 8]], ["DT_BF16", "DT_FLOAT16"]),
                                 ("both", [[2, 8], [2, 4]], ["DT_FLOAT8_E5M2", "DT_FLOAT"])):
        p.call("allocate_tensors", name=name, shapes=shapes, dtypes=dtypes)
    assert [(cache["tensor_bytes"], cache["dtype"], cache["fault"]) for cache in clusters(cli)[1]["caches"]] == [
        (0, "DT_BF16", ""), (32, "mixed", ""), (0, "mixed", "")]
    assert "mixed" in cli("ls").stdout


def test_table_for_people_names_every_cluster(pair: tuple[Peer, Peer], cli: Any) -> None:
    done = cli("ls")
    assert done.returncode == 0
    for wanted in ("PROMPT", "DECODER", str(pair[0].pid), str(pair[1].pid), "alive", "contiguous", "free"):
        assert wanted in done.stdout


def test_namespace_option_wins_over_the_environment(pair: tuple[Peer, Peer], namespace: Namespace, cli: Any) -> None:
    assert clusters(cli, "--namespace", f"{namespace.name}-other") == {}
    done = cli("ls", "--json", "--namespace", namespace.name, env={"SHMKV_NAMESPACE": "elsewhere"})
    assert {each["cluster_id"] for each in json.loads(done.stdout)["clusters"]} == {1, 2}


def test_killed_decoder_is_dead_and_the_prompt_alive(pair: tuple[Peer, Peer], cli: Any) -> None:
    pair[1].kill()
    found = clusters(cli)
    assert (found[1]["alive"], found[2]["alive"]) == (True, False)
    assert [(link["initiator"]["cluster_id"], link["state"]) for link in found[1]["links"]] == [(2, "dead")]
    assert cli("ls").stdout.count("dead") == 2          # the process, and the link that it made


def test_directory_that_was_removed_is_a_fault(pair: tuple[Peer, Peer], namespace: Namespace, cli: Any) -> None:
    pair[1].kill()
    directory_of(namespace, clusters(cli)[2]["incarnation"]).unlink()
    found = clusters(cli)
    assert (found[2]["fault"], found[1]["fault"]) == ("its directory is gone", "")


@pytest.mark.parametrize(("offset", "content", "fault"), [
    (0, b"\0" * 8, "magic"), (8, b"\x09", "layout version 9"), (8, b"\0", "not ready"), (12, b"\0" * 4, "fingerprint"),
    (32, b"\0" * 8, "incarnation"), (None, b"", "bytes"),
])
def test_damaged_header_is_a_fault(pair: tuple[Peer, Peer], namespace: Namespace, cli: Any, offset: int | None, content: bytes,
                                   fault: str) -> None:
    pair[1].kill()
    with directory_of(namespace, clusters(cli)[2]["incarnation"]).open("r+b") as directory:
        if offset is None:
            directory.truncate(8192)
        else:
            directory.seek(offset)
            directory.write(content)
    found = clusters(cli)
    assert fault in found[2]["fault"]
    assert (found[1]["fault"], len(found[1]["caches"])) == ("", 1)
    assert cli("ls").returncode == 0


def test_empty_directory_file_is_a_fault(pair: tuple[Peer, Peer], namespace: Namespace, cli: Any) -> None:
    pair[1].kill()
    os.truncate(directory_of(namespace, clusters(cli)[2]["incarnation"]), 0)
    assert clusters(cli)[2]["fault"]


def test_scribbled_records_never_end_ls(pair: tuple[Peer, Peer], namespace: Namespace, cli: Any) -> None:
    pair[1].kill()
    path = directory_of(namespace, clusters(cli)[2]["incarnation"])
    with path.open("r+b") as directory:
        for seed in range(3):
            chance = random.Random(seed)
            for offset in (64, 4096, 12288, 2109440):       # behind the header, and where rings, links and caches stand
                directory.seek(offset)
                directory.write(chance.randbytes(2048))
            directory.flush()
            assert clusters(cli)[2]["alive"] is False
        assert cli("ls").returncode == 0


def test_members_table_of_another_build_is_a_fault(pair: tuple[Peer, Peer], namespace: Namespace, cli: Any) -> None:
    for peer in pair:
        peer.close()
    (SHM / f"{namespace.name}.life").touch(0o600)
    table = SHM / f"{namespace.name}.members.v2"
    table.touch(0o600)
    table.write_bytes(b"\1" * 4096)
    done = cli("ls", "--json")
    assert done.returncode == 0
    assert "magic" in json.loads(done.stdout)["fault"]
    assert cli("gc").returncode == 0
    assert namespace.names() == set()


def test_name_that_no_namespace_can_have_is_one_red_line(cli: Any) -> None:
    done = cli("ls", "--namespace", "a b")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "SHMKV_NAMESPACE" in done.stderr
