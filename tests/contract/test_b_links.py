"""Contract, appendix B13 and B16: what links answer, and what becomes of pulls when the peer is not there."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from agent import cluster_info
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern

from shmkv import LLMClusterInfo, LLMStatusCode

pytestmark = pytest.mark.timeout(120)
T_MS = 24000
TIMED_OUT, NOT_LINKED, FAILED = "LLM_WAIT_PROCESS_TIMEOUT", "LLM_NOT_YET_LINK", "LLM_LINK_FAILED"
INVALID: tuple[LLMStatusCode, list[LLMStatusCode]] = (LLMStatusCode.LLM_PARAM_INVALID, [])
WANTED = pattern(geometry(4, [2, 8], 2), 1)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """A prompt whose cache has the id 1, and a linked decoder that may wait for T_MS."""
    p, d = prompt(1), decoder(2, sync_kv_timeout=T_MS)
    p.call("allocate", name="kv", keys=[req(1, 1)])
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv")
    return p, d


def _pull(d: Peer) -> str:
    """The outcome of a pull, which must not have waited for its timeout."""
    answer = d.attempt("pull", key=by_id(1, 1), name="kv")
    assert answer.ms < T_MS / 2
    return answer.outcome


def _check(d: Peer) -> str:
    answer = d.attempt("check_link", cluster_id=1)
    assert answer.ms < T_MS / 2
    return answer.outcome


def test_b13_pull_without_a_link(pair: tuple[Peer, Peer], decoder: StartPeer) -> None:
    stranger = decoder(3, link=())
    stranger.call("allocate", name="kv")
    assert stranger.outcome("pull", key=req(1, 1), name="kv") == NOT_LINKED
    assert pair[1].outcome("pull", key=req(1, 1), name="kv") == SUCCESS


@pytest.mark.parametrize("force", [False, True])
def test_b13_pull_after_unlink_and_after_a_new_link(pair: tuple[Peer, Peer], force: bool) -> None:
    _, d = pair
    assert _pull(d) == SUCCESS
    assert d.call("unlink", ids=[1], force=force) == [SUCCESS, [SUCCESS]]
    assert [_pull(d), _check(d)] == [NOT_LINKED, NOT_LINKED]
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert [_pull(d), _check(d)] == [SUCCESS, SUCCESS]


@pytest.mark.parametrize("pulled_before", [False, True])
def test_b13_killed_peer_is_noticed_long_before_the_timeout(pair: tuple[Peer, Peer],
                                                            pulled_before: bool) -> None:
    p, d = pair
    if pulled_before:
        assert _pull(d) == SUCCESS
    p.kill()
    assert [_pull(d), _check(d), _pull(d)] == [TIMED_OUT] * 3


@pytest.mark.parametrize("end", ["kill", "finalize"])
def test_b13_gone_peer_stays_gone(pair: tuple[Peer, Peer], end: str) -> None:
    """The memory is still mapped: without a look at the peer a pull would work, and bring bytes of a dead cache."""
    p, d = pair
    assert _pull(d) == SUCCESS
    p.kill() if end == "kill" else p.call("finalize")
    said = d.batch([("pull", {"key": by_id(1, 1), "name": "kv"})] * 500)
    assert [answer.outcome for answer in said] == [TIMED_OUT] * 500


def test_b13_finalized_peer_is_noticed_too(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert _pull(d) == SUCCESS
    p.call("finalize")
    assert [_pull(d), _check(d)] == [TIMED_OUT, TIMED_OUT]


@pytest.mark.parametrize("end", ["kill", "finalize", "exit"])
def test_b13_successor_of_the_same_id_needs_a_new_link(pair: tuple[Peer, Peer], prompt: StartPeer,
                                                       end: str) -> None:
    p, d = pair
    {"kill": p.kill, "finalize": lambda: p.call("finalize"), "exit": p.close}[end]()
    heir = prompt(1)
    heir.call("allocate", name="kv")
    heir.call("fill", name="kv", generation=1)
    assert [_pull(d), _check(d)] == [TIMED_OUT, TIMED_OUT]
    assert d.call("unlink", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert _pull(d) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], WANTED[:, :, 0])


def test_b13_stopped_peer_is_pulled_from(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.stop()
    assert [_pull(d), _check(d)] == [SUCCESS, SUCCESS]
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], WANTED[:, :, 0])
    p.cont()
    assert p.call("collect") >= 0


def test_b13_killed_decoder_does_not_harm_the_others(pair: tuple[Peer, Peer], decoder: StartPeer) -> None:
    p, d = pair
    assert _pull(d) == SUCCESS
    d.kill()
    p.call("deallocate", name="kv")
    other = decoder(2)
    other.call("allocate", name="kv")
    p.call("allocate", name="next", keys=[req(1, 2)])
    p.call("fill", name="next", generation=1)
    assert other.outcome("pull", key=req(1, 2), name="kv") == SUCCESS
    np.testing.assert_array_equal(other.read("kv")[:, :, 0], WANTED[:, :, 0])


def test_b16_same_cluster_twice_in_one_call(prompt: StartPeer, decoder: StartPeer) -> None:
    prompt(1)
    d = decoder(2, link=())
    assert d.call("link", ids=[1, 1]) == [SUCCESS, [SUCCESS, "LLM_REPEAT_REQUEST"]]
    assert _check(d) == SUCCESS


def test_b16_cluster_that_is_linked_already(pair: tuple[Peer, Peer]) -> None:
    _, d = pair
    assert d.call("link", ids=[1]) == [SUCCESS, ["LLM_ALREADY_LINK"]]
    assert _pull(d) == SUCCESS


def test_b16_unknown_cluster_is_waited_for_until_the_timeout(decoder: StartPeer) -> None:
    d = decoder(2, link=())
    answer = d.attempt("link", ids=[77], timeout=150)
    assert answer.value == [FAILED, [TIMED_OUT]]
    assert answer.ms >= 150
    assert d.outcome("check_link", cluster_id=77) == NOT_LINKED
    assert d.call("unlink", ids=[77]) == [SUCCESS, [NOT_LINKED]]


def test_b16_cluster_that_comes_while_it_is_waited_for(namespace: Namespace, decoder: StartPeer) -> None:
    d = decoder(2, link=())
    p = namespace.start()
    d.send("link", ids=[1], timeout=25000)
    p.call("init", role="PROMPT", cluster_id=1, options={}, raw={})
    assert d.receive().value == [SUCCESS, [SUCCESS]]
    assert _check(d) == SUCCESS


@pytest.mark.parametrize("role", ["DECODER", "MIX"])
def test_b16_peer_with_another_role_is_refused(namespace: Namespace, decoder: StartPeer, role: str) -> None:
    namespace.start_cluster(role, 5)
    d = decoder(2, link=())
    assert d.call("link", ids=[5], timeout=300) == [FAILED, [FAILED]]
    assert d.outcome("check_link", cluster_id=5) == NOT_LINKED


def test_b16_dead_peer_is_refused(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, link=())
    p.kill()
    assert d.call("link", ids=[1], timeout=300) == [FAILED, [FAILED]]
    assert _check(d) == NOT_LINKED


def test_b16_good_and_bad_clusters_in_one_call(pair: tuple[Peer, Peer], prompt: StartPeer,
                                               decoder: StartPeer) -> None:
    prompt(4)
    d = decoder(3, link=())
    d.call("allocate", name="kv")
    answer = d.call("link", ids=[1, 77, 2, 4], timeout=1000)
    assert answer == [FAILED, [SUCCESS, TIMED_OUT, FAILED, SUCCESS]]
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
    assert d.call("unlink", ids=[77, 4, 1]) == [SUCCESS, [NOT_LINKED, SUCCESS, SUCCESS]]


def test_b16_seventeen_clusters(decoder: StartPeer) -> None:
    d = decoder(2, link=())
    assert d.call("link", ids=list(range(100, 117)), timeout=100) == ["LLM_CLUSTER_NUM_EXCEED_LIMIT", []]
    assert d.call("link", ids=list(range(100, 116)), timeout=100) == [FAILED, [TIMED_OUT] * 16]


@pytest.mark.parametrize("role", ["PROMPT", "MIX"])
def test_b16_only_a_decoder_links(prompt: StartPeer, here: Any, role: str) -> None:
    prompt(1)
    assert here(role, 2).link_clusters([cluster_info(1)], 5000) == INVALID


def _with_ips(remote_cluster_id: int, local: list[str], remote: list[str]) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = remote_cluster_id
    for ip in local:
        info.append_local_ip_info(ip, 1)
    for ip in remote:
        info.append_remote_ip_info(ip, 1)
    return info


@pytest.mark.parametrize("clusters", [
    [], [_with_ips(1, [], [])], [_with_ips(1, ["1.1.1.1"], [])], [_with_ips(1, [], ["1.1.1.1"])],
    [_with_ips(1, ["1.1.1.1"], ["2.2.2.2", "3.3.3.3"])],
    [_with_ips(1, ["1.1.1.1"], ["2.2.2.2"]), _with_ips(4, ["1.1.1.9"], ["2.2.2.2"])],
], ids=["no cluster", "no ips", "no remote ips", "no local ips", "unequal lengths", "different local ips"])
def test_b16_lists_that_say_nothing(prompt: StartPeer, here: Any, clusters: list[LLMClusterInfo]) -> None:
    prompt(1)
    dist = here("DECODER", 2)
    assert dist.link_clusters(clusters, 5000) == INVALID
    assert dist.unlink_clusters([cluster_info(1)]) == (LLMStatusCode.LLM_SUCCESS,
                                                       [LLMStatusCode.LLM_NOT_YET_LINK])


def test_b16_ips_are_never_matched(prompt: StartPeer, here: Any) -> None:
    prompt(1)
    done = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    dist = here("DECODER", 2)
    assert dist.link_clusters([_with_ips(1, ["9.9.9.9", "8.8.8.8"], ["7.7.7.7", "6.6.6.6"])]) == done
    assert dist.unlink_clusters([_with_ips(1, ["1.2.3.4"], ["4.3.2.1"])]) == done


def test_b16_second_link_call_while_one_is_running(namespace: Namespace, here: Any) -> None:
    dist = here("DECODER", 2)
    p = namespace.start()
    first: list[Any] = []
    waiting = threading.Thread(target=lambda: first.append(dist.link_clusters([cluster_info(1)], 25000)))
    waiting.start()
    second = LLMStatusCode.LLM_LINK_FAILED
    while second == LLMStatusCode.LLM_LINK_FAILED and waiting.is_alive():
        second, each = dist.link_clusters([cluster_info(77)], 50)
    p.call("init", role="PROMPT", cluster_id=1, options={}, raw={})
    waiting.join()
    assert (second, each) == (LLMStatusCode.LLM_PROCESSING_LINK, [])
    assert first == [(LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])]


def test_b16_unlink_from_the_side_of_the_prompt(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert p.call("unlink", ids=[2]) == [SUCCESS, [SUCCESS]]
    assert [_pull(d), _check(d)] == [NOT_LINKED, NOT_LINKED]
    assert p.call("unlink", ids=[2]) == [SUCCESS, [NOT_LINKED]]
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert _pull(d) == SUCCESS


@pytest.mark.parametrize("force", [False, True])
def test_b16_unlink_of_a_dead_peer(pair: tuple[Peer, Peer], force: bool) -> None:
    p, d = pair
    p.kill()
    answer = d.attempt("unlink", ids=[1], timeout=T_MS, force=force)
    assert answer.value == [SUCCESS, [SUCCESS]]
    assert answer.ms < T_MS / 2
    assert _check(d) == NOT_LINKED


def test_b16_unlink_says_for_each_cluster(pair: tuple[Peer, Peer], prompt: StartPeer) -> None:
    _, d = pair
    prompt(4)
    assert d.call("link", ids=[4]) == [SUCCESS, [SUCCESS]]
    assert d.call("unlink", ids=[77, 4]) == [SUCCESS, [NOT_LINKED, SUCCESS]]
    assert _pull(d) == SUCCESS


def test_b16_many_decoders_of_one_prompt(pair: tuple[Peer, Peer], decoder: StartPeer) -> None:
    others = [decoder(cluster_id) for cluster_id in (3, 4)]
    for d in others:
        d.call("allocate", name="kv")
    others[0].kill()
    assert [_pull(pair[1]), others[1].outcome("pull", key=by_id(1, 1), name="kv")] == [SUCCESS, SUCCESS]


@pytest.mark.parametrize("cluster_id", [0, 2**63, 2**64 - 1])
def test_b16_every_uint64_is_a_cluster_id(prompt: StartPeer, decoder: StartPeer, cluster_id: int) -> None:
    p, d = prompt(cluster_id), decoder(1, link=(cluster_id,))
    p.call("allocate", name="kv", keys=[req(cluster_id, 1)])
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(cluster_id, 1), name="kv") == SUCCESS
    assert d.call("unlink", ids=[cluster_id]) == [SUCCESS, [SUCCESS]]


def test_b16_namespaces_do_not_see_each_other(namespace: Namespace, pair: tuple[Peer, Peer]) -> None:
    elsewhere = {"SHMKV_NAMESPACE": f"{namespace.name}-2"}
    namespace.start_cluster("PROMPT", 1, env=elsewhere).kill()
    namespace.start_cluster("PROMPT", 5, env=elsewhere)
    d = namespace.start_cluster("DECODER", 2, env=elsewhere)
    assert d.call("link", ids=[5]) == [SUCCESS, [SUCCESS]]
    assert pair[1].call("link", ids=[5], timeout=100) == [FAILED, [TIMED_OUT]]
    assert _pull(pair[1]) == SUCCESS
