"""Contract, appendix A8: links, as far as they concern the mode without cache manager."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agent import cluster_info
from peer import StartPeer

from shmkv import LLMClusterInfo, LLMException, LLMParamError, LLMRole, LLMStatusCode

pytestmark = pytest.mark.timeout(120)
Here = Callable[..., Any]
SUCCESS = ["LLM_SUCCESS", ["LLM_SUCCESS"]]


def test_a8_1_decoder_links_and_unlinks(prompt: StartPeer, decoder: StartPeer) -> None:
    prompt(1)
    d = decoder(2, link=())
    assert d.call("link", ids=[1]) == SUCCESS
    d.call("check_link", cluster_id=1)
    assert d.call("unlink", ids=[1]) == SUCCESS


def test_a8_1_link_unlink_and_link_again(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, link=())
    p.call("allocate", name="kv")
    for _ in range(3):
        assert d.call("link", ids=[1]) == SUCCESS
        assert d.call("unlink", ids=[1]) == SUCCESS
    assert d.call("link", ids=[1]) == SUCCESS
    d.call("check_link", cluster_id=1)


def test_a8_1_self_link_after_switching_to_decoder(here: Here) -> None:
    dist = here("PROMPT", 1, enable_switch_role=True)
    dist.switch_role(LLMRole.DECODER)
    done = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    assert dist.link_clusters([cluster_info(1)], 5000) == done
    assert dist.unlink_clusters([cluster_info(1)], 5000) == done


def test_a8_2_unlink_before_any_link(here: Here) -> None:
    dist = here("DECODER", 2)
    answer = dist.unlink_clusters([cluster_info(1)], 5000)
    assert answer == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_NOT_YET_LINK])


@pytest.mark.parametrize("verb", ["link_clusters", "unlink_clusters"])
@pytest.mark.parametrize(("timeout", "error"), [
    (0, LLMParamError), (-1, LLMParamError), (2**31, LLMParamError), ("3000", TypeError), (3.5, TypeError),
    (None, TypeError),
])
def test_a8_3_timeout_is_a_positive_int32(here: Here, verb: str, timeout: Any,
                                          error: type[Exception]) -> None:
    dist = here("DECODER", 2)
    with pytest.raises(error):
        getattr(dist, verb)([cluster_info(1)], timeout)


@pytest.mark.parametrize("verb", ["link_clusters", "unlink_clusters"])
def test_a8_3_clusters_are_a_list_of_cluster_infos(here: Here, verb: str) -> None:
    dist = here("DECODER", 2)
    for clusters in ("not_list", None, [1], [cluster_info(1), None], {1: cluster_info(1)}):
        with pytest.raises(TypeError):
            getattr(dist, verb)(clusters, 1000)


def test_a8_3_force_is_a_bool(here: Here) -> None:
    dist = here("DECODER", 2)
    for force in ("not_bool", 1, None):
        with pytest.raises(TypeError):
            dist.unlink_clusters([cluster_info(1)], 1000, force)


@pytest.mark.parametrize("verb", ["link_clusters", "unlink_clusters"])
def test_a8_3_remote_cluster_id_has_to_be_set(here: Here, verb: str) -> None:
    dist = here("DECODER", 2)
    nameless = LLMClusterInfo()
    nameless.append_local_ip_info("127.0.0.1", 1)
    nameless.append_remote_ip_info("127.0.0.1", 1)
    with pytest.raises(TypeError) as refusal:
        getattr(dist, verb)([nameless], 1000)
    assert isinstance(refusal.value, AttributeError)


def test_a8_3_check_link_status_wants_a_uint64(here: Here) -> None:
    dist = here("DECODER", 2)
    for cluster_id in ("1", 1.0, None):
        with pytest.raises(TypeError):
            dist.check_link_status(cluster_id)
    for cluster_id in (-1, 2**64):
        with pytest.raises(LLMParamError):
            dist.check_link_status(cluster_id)


@pytest.mark.parametrize("role", ["PROMPT", "MIX"])
def test_a8_3_only_a_decoder_asks_for_the_link(here: Here, role: str) -> None:
    dist = here(role, 2)
    with pytest.raises(LLMParamError):
        dist.check_link_status(1)


def test_a8_8_check_right_after_unlink_says_not_linked(prompt: StartPeer, decoder: StartPeer) -> None:
    prompt(1)
    d = decoder(2)
    d.call("unlink", ids=[1])
    assert d.outcome("check_link", cluster_id=1) == "LLM_NOT_YET_LINK"
    assert d.outcome("check_link", cluster_id=77) == "LLM_NOT_YET_LINK"


def test_a8_8_check_of_a_link_that_never_was(here: Here) -> None:
    dist = here("DECODER", 2)
    with pytest.raises(LLMException) as refusal:
        dist.check_link_status(1)
    assert refusal.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK
