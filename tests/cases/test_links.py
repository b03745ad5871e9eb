"""Field cases FR-027, 034, 040, 044, 045, 051: links to peers that restart, stop, are not there, or differ."""
from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern
from shared_bytes import LINK_HELD_BY_OWNER, SharedFile, directory_of, segments_of
from started_apart import descriptors, maps

from shmkv import _layout

pytestmark = pytest.mark.timeout(120)
TIMED_OUT, NOT_LINKED, FAILED = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_NOT_YET_LINK", "LLM_LINK_FAILED"
ROWS = geometry(4, [2, 8], 2)
T_MS = 20000


def _publish(p: Peer, generation: int) -> None:
    p.call("allocate", name="kv", keys=[req(1, 7)])
    p.call("fill", name="kv", generation=generation)


def _init(peer: Peer, role: str, cluster_id: int) -> None:
    peer.call("init", role=role, cluster_id=cluster_id, options={"sync_kv_timeout": T_MS}, raw={})


def _right(d: Peer, generation: int) -> None:
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, generation)[:, :, 0])


def test_fr_027_a_restarted_server_is_not_the_old_one(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    _publish(p, 1)
    d.call("allocate", name="kv")
    d.call("pull", key=by_id(1, 1), name="kv")
    _right(d, 1)
    p.close()
    d.call("canary", name="kv")
    gone = d.attempt("pull", key=by_id(1, 1), name="kv")
    assert gone.outcome == TIMED_OUT, "no generation 1 bytes after P's clean stop"
    _publish(prompt(1), 2)
    answer = d.attempt("pull", key=req(1, 7), name="kv")
    assert answer.outcome == TIMED_OUT, "first: the link is lost"
    assert max(answer.ms, gone.ms) < T_MS / 2, "at once"
    np.testing.assert_array_equal(d.read("kv"), np.full((4, 1, 2, 16), 0x5A, np.uint8), err_msg="nothing written")
    assert d.call("unlink", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "second: works"
    _right(d, 2)


def test_fr_034_a_peer_that_is_killed_again_and_again(prompt: StartPeer, decoder: StartPeer,
                                                      rounds: Callable[[int], int]) -> None:
    p, d = prompt(1), decoder(2)
    _publish(p, 0)
    d.call("allocate", name="kv")
    d.call("pull", key=by_id(1, 1), name="kv")
    sizes = []
    for generation in range(1, rounds(8) + 1):
        p.kill()
        p = prompt(1)
        _publish(p, generation)
        answer = d.attempt("pull", key=by_id(1, 1), name="kv")
        assert answer.outcome == TIMED_OUT, "the failing call ends by LLMException"
        assert answer.ms < T_MS / 2, "and soon"
        assert d.call("unlink", ids=[1], force=True) == [SUCCESS, [SUCCESS]]
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
        assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "every second pull"
        _right(d, generation)
        sizes.append((len(maps(d, "/dev/shm/")), len(descriptors(d))))
    assert sizes[-1] <= sizes[min(4, len(sizes) - 1)], "no more mappings or descriptors than early on"
    assert len(set(sizes[1:])) <= 2, f"they do not grow: {sizes}"


def test_fr_040_a_stopped_holder_is_named(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, sync_kv_timeout=500)
    _publish(p, 1)
    d.call("allocate", name="kv")
    p.stop()
    with SharedFile(directory_of(namespace, 1)) as found:
        found.put("LinkRecord", "word", LINK_HELD_BY_OWNER)
        answer = d.attempt("pull", key=req(1, 7), name="kv")
        found.put("LinkRecord", "word", 0)
    p.cont()
    assert answer.outcome == TIMED_OUT, "LLM_WAIT_PROCESS_TIMEOUT"
    assert answer.ms >= 500, "not before its timeout"
    for named, what in (("cluster 1", "the cluster"), ("req_id=7", "the key"), ("500 ms", "the time waited"),
                        (str(p.pid), "the holder's pid")):
        assert named in answer.text, f"its text names {what}: {answer.text}"
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "the link stays usable"


def test_fr_044_reasons_why_a_link_fails(namespace: Namespace, prompt: StartPeer) -> None:
    p, d = prompt(0), namespace.start()
    twin = d.attempt("init", role="DECODER", cluster_id=0, options={}, raw={})
    assert "LLMException" in twin.kinds, "two living clusters with one id"
    assert "0" in twin.text, "the text says which id"
    _init(d, "DECODER", 2)
    d.call("allocate", name="kv")
    unknown = d.attempt("link", ids=[77], timeout=500)
    assert unknown.value == [FAILED, [TIMED_OUT]], "one status per cluster for an id that nobody has"
    assert "77" in d.attempt("pull", key=by_id(77, 1), name="kv").text, "the text says which id"
    assert d.outcome("check_link", cluster_id=77) == NOT_LINKED, "no partial link is left"
    assert d.call("link", ids=[2]) == [SUCCESS, [SUCCESS]], "to itself"
    assert d.call("link", ids=[0]) == [SUCCESS, [SUCCESS]]
    assert d.call("link", ids=[0, 77], timeout=500) == [FAILED, ["LLM_ALREADY_LINK", TIMED_OUT]], "linking twice"
    with SharedFile(directory_of(namespace, 0)) as found:
        assert [found.get("LinkRecord", "state", slot) & 0xFF for slot in range(4)] == [1, 0, 0, 0], "one link"
    p.call("finalize")
    gone = d.attempt("link", ids=[77, 0], timeout=300)
    assert gone.value == [FAILED, [TIMED_OUT, "LLM_ALREADY_LINK"]], "nothing changes by itself"


def _join_all(peers: list[Peer], rng: np.random.Generator, without: int | None = None) -> None:
    """All inits are on their way before the first one is answered, in random order."""
    order = [int(number) for number in rng.permutation(8) if number != without]
    for number in order:
        role = "PROMPT" if number < 4 else "DECODER"
        peers[number].send("init", role=role, cluster_id=number, options={"sync_kv_timeout": T_MS}, raw={})
        if number >= 4:
            timeout = T_MS if without is None else 1000
            peers[number].send("link", ids=[0, 1, 2, 3], timeout=timeout)
    for number in order:
        assert peers[number].receive().outcome == SUCCESS, "init"


def test_fr_045_everybody_links_at_the_same_time(namespace: Namespace, rng: np.random.Generator,
                                                 rounds: Callable[[int], int]) -> None:
    peers = [namespace.start() for _ in range(8)]
    for _ in range(rounds(6)):
        _join_all(peers, rng)
        for number in range(4, 8):
            answer = peers[number].receive()
            assert answer.value == [SUCCESS, [SUCCESS] * 4], "all 16 links succeed in every round"
            assert answer.ms < T_MS / 2, "and soon"
        for peer in peers:
            peer.call("finalize")
    _join_all(peers, rng, without=2)
    for number in range(4, 8):
        wanted = [SUCCESS, SUCCESS, TIMED_OUT, SUCCESS]
        assert peers[number].receive().value == [FAILED, wanted], "exactly the missing one's entries fail"
    peers[3].call("allocate", name="kv")
    peers[4].call("allocate", name="kv")
    assert peers[4].outcome("pull", key=by_id(3, 1), name="kv") == SUCCESS, "the others work"


OTHER_FORMATS = {
    "version + 1": ("version", _layout.VERSION + 1), "version - 1": ("version", _layout.VERSION - 1),
    "version 0": ("version", 0), "version 255": ("version", 255), "byte order": ("version", _layout.VERSION << 24),
    "fingerprint": ("fingerprint", 0x12345678),
    "magic": ("magic", int.from_bytes(b"KMVsmhsh", sys.byteorder)),
}


@pytest.mark.parametrize("what", list(OTHER_FORMATS))
def test_fr_051_peers_of_another_format(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, what: str) -> None:
    p, own, d = prompt(1), prompt(4), decoder(2, link=())
    _publish(p, 1)
    own.call("allocate", name="kv")
    field, odd = OTHER_FORMATS[what]
    d.call("allocate", name="kv")
    assert d.call("link", ids=[4]) == [SUCCESS, [SUCCESS]]
    with SharedFile(directory_of(namespace, 1)) as directory, SharedFile(segments_of(namespace, 1)[0]) as segment:
        kept = directory.get("Header", field)
        directory.put("Header", field, odd)
        linked = d.call("link", ids=[1], timeout=1000)
        # Version 0 is also what a directory has that is not ready yet, so both answers are right for it.
        wanted = [FAILED] if odd else [FAILED, TIMED_OUT]
        assert (linked[0], linked[1][0] in wanted) == (FAILED, True), "a status for the directory"
        text = d.attempt("pull", key=req(1, 7), name="kv").text
        assert "dead" not in text, "a living peer is not reported as dead"
        if field == "version":
            assert f"version {odd}, expected {kept}" in text, "whose text gives both versions"
        directory.put("Header", field, kept)
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
        own_value = segment.get("Header", field)
        segment.put("Header", field, odd)
        answer = d.attempt("pull", key=req(1, 7), name="kv")
        assert "LLMException" in answer.kinds, "a status for the segment"
        if odd and field == "version":
            assert f"version {odd}" in answer.text, "whose text gives the version found"
            assert f"expected {kept}" in answer.text, "and the one expected"
        assert d.outcome("pull", key=by_id(4, 1), name="kv") == SUCCESS, "D can pull from a P of its own version"
        segment.put("Header", field, own_value)
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "no guess was kept"
