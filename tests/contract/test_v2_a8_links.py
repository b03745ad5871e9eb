"""Contract, appendix A8: links in cache-manager mode."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from agent import cluster_info
from peer import StartPeer, by_id, req

from shmkv import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    RegisterMemStatus,
)

pytestmark = pytest.mark.timeout(120)
Managed = Callable[..., Any]
DONE = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
SUCCESS = ["LLM_SUCCESS", ["LLM_SUCCESS"]]
DEVICE, HOST = Memtype.MEM_TYPE_DEVICE, Memtype.MEM_TYPE_HOST


@pytest.mark.parametrize("role", ["PROMPT", "DECODER", "MIX"])
def test_a8_1_any_role_links_to_itself_and_unlinks(managed: Managed, role: str) -> None:
    dist = managed(1, role=role)
    assert dist.link_clusters([cluster_info(1)], 5000) == DONE
    assert dist.unlink_clusters([cluster_info(1)], 5000) == DONE


def test_a8_1_any_role_links_to_any_other(member: StartPeer) -> None:
    member(1, role="DECODER")
    other = member(2, role="PROMPT")
    assert other.call("link", ids=[1]) == SUCCESS
    assert other.call("unlink", ids=[1]) == SUCCESS


def test_a8_2_unlink_before_any_link(managed: Managed) -> None:
    answer = managed().unlink_clusters([cluster_info(2)], 5000)
    assert answer == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_NOT_YET_LINK])


def test_a8_3_arguments_of_link_clusters(managed: Managed) -> None:
    dist = managed()
    for call in (dist.link_clusters, dist.unlink_clusters):
        with pytest.raises(LLMException):
            call([cluster_info(2)], 0)
        with pytest.raises(TypeError):
            call("not_list", 1000)
    with pytest.raises(TypeError):
        dist.unlink_clusters([cluster_info(2)], 1000, "not_bool")


def test_a8_4_a_cluster_without_local_ip_info(managed: Managed) -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    dist = managed(1)
    with pytest.raises(LLMException, match="local_ip_info_list is empty"):
        dist.link_clusters([info], 1000)
    dist.finalize()
    assert managed(1, local_comm_res="{}").link_clusters([info], 1000) == DONE


@pytest.mark.parametrize(("name", "ranks", "table", "error"), [
    ("", {1: 0, 2: 1}, "{}", LLMException), ("x" * 128, {1: 0, 2: 1}, "{}", LLMException), (None, {1: 0, 2: 1}, "{}", TypeError),
    ("n", [1, 2], "{}", TypeError), ("n", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}, "{}", LLMException), ("n", {1: 0}, "{}", LLMException),
    ("n", {1: 1, 2: 0}, "{}", LLMException), ("n", {2: 0, 3: 1}, "{}", LLMException), ("n", {1: 0, "2": 1}, "{}", TypeError),
    ("n", {1: 0, 2: -1}, "{}", LLMException), ("n", {1: 0, -2: 1}, "{}", LLMException), ("n", {1: 0, 2: 1}, 123, TypeError),
])
def test_a8_5_arguments_of_link(managed: Managed, name: Any, ranks: Any, table: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        managed(1).link(name, ranks, table)


def test_a8_6_members_are_linked_under_numbers(member: StartPeer) -> None:
    one, two = member(1), member(2)
    assert one.call("v2_link", name="first", members=[[1, 0], [2, 1]]) == 1
    assert one.call("v2_link", name="x" * 127, members=[[1, 0], [2, 0]]) == 2
    assert [one.call("v2_query", comm_id=number) for number in (1, 2)] == ["OK", "OK"]
    cache_id = two.call("v2_allocate", name="kv", keys=[req(2, 1)])
    one.call("v2_allocate", name="kv")
    one.call("v2_unlink", comm_id=1)
    one.call("v2_pull", key=by_id(2, cache_id), name="kv")         # the other communication has the link
    one.call("v2_unlink", comm_id=2)
    assert one.outcome("v2_pull", key=by_id(2, cache_id), name="kv") == "LLM_NOT_YET_LINK"
    assert one.outcome("v2_unlink", comm_id="not_int") == "TypeError"
    assert one.outcome("v2_query", comm_id=2) == one.outcome("v2_unlink", comm_id=2) == "LLM_PARAM_INVALID"
    assert one.call("v2_link", name="third", members=[[1, 0], [2, 1]]) == 3


def test_a_member_that_comes_late_is_linked_when_it_is_needed(member: StartPeer) -> None:
    one = member(1, remote=True)
    assert one.call("v2_link", name="comm", members=[[1, 0], [2, 1], [3, 1]]) == 1
    one.call("v2_allocate", name="kv")
    assert one.call("v2_query", comm_id=1) == "PREPARING"
    assert one.outcome("v2_pull", key=by_id(2, 1), name="kv") == "LLM_NOT_YET_LINK"
    two = member(2, remote=True)
    two.call("v2_allocate", name="kv")
    one.call("v2_pull", key=by_id(2, 1), name="kv")
    assert one.call("v2_query", comm_id=1) == "PREPARING"
    three = member(3, remote=True)
    three.call("v2_allocate", name="kv")
    one.call("v2_push", key=by_id(3, 1), name="kv")
    assert one.call("v2_query", comm_id=1) == "OK"


def test_a_member_that_died_is_a_failure(member: StartPeer) -> None:
    one, two = member(1), member(2)
    number = one.call("v2_link", name="comm", members=[[1, 0], [2, 1]])
    assert one.call("v2_query", comm_id=number) == "OK"
    two.kill()
    deadline = time.monotonic() + 20
    while one.call("v2_query", comm_id=number) != "FAILED":
        assert time.monotonic() < deadline
    one.call("v2_unlink", comm_id=number)


def test_a_link_made_otherwise_is_left_alone(member: StartPeer) -> None:
    member(1).call("v2_allocate", name="kv")
    two = member(2, link=(1,))
    two.call("v2_allocate", name="kv")
    two.call("v2_unlink", comm_id=two.call("v2_link", name="comm", members=[[1, 0], [2, 1]]))
    assert two.outcome("v2_pull", key=by_id(1, 1), name="kv") == "LLM_SUCCESS"


def test_calls_of_a_communication_belong_to_the_mode(here: Managed) -> None:
    dist = here("DECODER", 1)
    for call in (lambda: dist.link("n", {1: 0, 2: 1}, "{}"), lambda: dist.unlink(1), lambda: dist.query_register_mem_status(1)):
        with pytest.raises(LLMParamError, match="EnableCacheManager"):
            call()


def test_a_member_that_never_comes_leaves_it_preparing(managed: Managed) -> None:
    dist = managed(1)
    assert dist.query_register_mem_status(dist.link("n", {1: 0, 7: 0}, "")) == RegisterMemStatus.PREPARING


@pytest.mark.parametrize("infos", [MemInfo(DEVICE, 1, 1), [MemInfo(DEVICE, 1, 1), MemInfo(DEVICE, 2**63, 2**40)]])
def test_a8_7_memory_is_remapped(managed: Managed, infos: Any) -> None:
    assert managed().cache_manager.remap_registered_memory(infos) is None


@pytest.mark.parametrize("infos", ["some val", None, [], ["x"], MemInfo(HOST, 1, 1), MemInfo(DEVICE, 0, 1), MemInfo(DEVICE, 1, -1),
                                   MemInfo(DEVICE, -1, 1), MemInfo(DEVICE, 1, 0), [MemInfo(DEVICE, 1, 1), MemInfo(HOST, 1, 1)]])
def test_a8_7_and_b22_memory_that_cannot_be_remapped(managed: Managed, infos: Any) -> None:
    with pytest.raises(LLMException) as refusal:
        managed().cache_manager.remap_registered_memory(infos)
    assert refusal.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


def test_b22_a_mem_info_takes_any_int() -> None:
    for address, size in ((0, 1), (-1, -1), (2**80, 2**80)):
        info = MemInfo(HOST, address, size)
        assert (info.mem_type, info.addr, info.size) == (HOST, address, size)


def test_switch_role_while_links_exist(managed: Managed) -> None:
    dist = managed(1)
    dist.link_clusters([cluster_info(1)], 5000)
    manager = dist.cache_manager
    manager.allocate_cache(CacheDesc(1, [1], DataType.DT_INT8), [CacheKey(1, 1)])
    with pytest.raises(LLMException) as refusal:
        dist.switch_role(LLMRole.DECODER)
    assert refusal.value.status_code == LLMStatusCode.LLM_EXIST_LINK


def test_the_status_of_a_call_is_the_last_failure(member: StartPeer) -> None:
    member(1)
    two = member(2)
    timeout = "LLM_TIMEOUT"
    assert two.call("link", ids=[7, 1], timeout=300) == [timeout, [timeout, "LLM_SUCCESS"]]
    assert two.call("link", ids=[1, 1]) == ["LLM_SUCCESS", ["LLM_ALREADY_LINK", "LLM_REPEAT_REQUEST"]]
    assert two.call("unlink", ids=[1, 7]) == ["LLM_SUCCESS", ["LLM_SUCCESS", "LLM_NOT_YET_LINK"]]
