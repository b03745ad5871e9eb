"""Contract, appendix A2: init, finalize and roles in cache-manager mode."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agent import cluster_info

from shmkv import (
    CacheDesc,
    CacheKey,
    CacheManager,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("namespace")]
Managed = Callable[..., Any]
LISTEN = {"llm.listenIpInfo": "127.0.0.1:1111"}


def options_of(**options: Any) -> dict[str, str]:
    config = LLMConfig()
    for name, value in {"enable_cache_manager": True, **options}.items():
        setattr(config, name, value)
    return config.generate_options()


def test_a2_1_init_twice_on_one_instance(managed: Managed) -> None:
    dist = managed()
    manager = dist.cache_manager
    dist.init(options_of())
    assert dist.cache_manager is manager
    dist.finalize()
    assert not manager.is_initialized()
    with pytest.raises(LLMException) as refusal:
        manager.remove_cache_key(CacheKey(1, 1))
    assert refusal.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED


def test_a2_2_second_instance_is_refused(managed: Managed) -> None:
    managed(1)
    with pytest.raises(LLMException) as refusal:
        LLMDataDist(LLMRole.DECODER, 2).init(options_of())
    assert refusal.value.status_code == LLMStatusCode.LLM_FAILED


@pytest.mark.parametrize(("memory", "error"), [(123, TypeError), ("1024,2048", LLMException), ("1.23", LLMException),
                                               ("-1", LLMException)])
def test_a2_3_memory_size_of_the_graph(memory: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        LLMDataDist(LLMRole.PROMPT, 1).init({**options_of(), "ge.flowGraphMemMaxSize": memory})


@pytest.mark.parametrize(("options", "named"), [
    ({"enable_cache_manager": False, "listen_ip_info": "127.0.0.1:1"}, "EnableCacheManager"),
    ({"enable_remote_cache_accessible": False, "listen_ip_info": "127.0.0.1:1"}, "EnableRemoteCacheAccessible"),
    ({}, "listenIpInfo"),
])
def test_a2_6_transfer_backend_names_what_is_missing(options: dict[str, Any], named: str) -> None:
    with pytest.raises(LLMException, match=named):
        LLMDataDist(LLMRole.PROMPT, 1).init(options_of(transfer_backend="hixl", **options))


def test_a2_6_transfer_backend_with_all_it_wants(managed: Managed) -> None:
    dist = managed(remote=True, transfer_backend="hixl", listen_ip_info="127.0.0.1:1")
    assert isinstance(dist.cache_manager, CacheManager)


def test_a2_7_the_role_as_text_and_the_cluster_id() -> None:
    assert [LLMDataDist._role_to_str(role) for role in LLMRole] == ["Prompt", "Decoder", "Mix"]
    assert LLMDataDist(LLMRole.MIX, 2**64 - 1).cluster_id == 2**64 - 1


def test_a2_8_calls_of_the_other_mode_are_refused(managed: Managed) -> None:
    dist = managed(role="DECODER")
    with pytest.raises(LLMException, match="cache_manager") as refusal:
        _ = dist.kv_cache_manager
    assert refusal.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMParamError):
        dist.check_link_status(1)


def test_a2_8_local_comm_res_turns_the_mode_on(namespace: Any, here: Managed) -> None:
    dist = here("DECODER", 1, local_comm_res="{}")
    assert isinstance(dist.cache_manager, CacheManager)


def test_a2_9_calls_before_init() -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    calls: list[Callable[[], Any]] = [
        lambda: dist.link("name", {1: 0, 2: 1}, "{}"), lambda: dist.unlink(1), lambda: dist.cache_manager,
        lambda: dist.query_register_mem_status(1), lambda: dist.link_clusters([cluster_info(2)], 1000)]
    for call in calls:
        with pytest.raises(RuntimeError):
            call()


def test_a2_12_roles_may_be_switched_freely(managed: Managed) -> None:
    dist = managed(role="PROMPT")
    dist.switch_role(LLMRole.DECODER)
    dist.switch_role(LLMRole.PROMPT, LISTEN)
    dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:2222"})
    dist.switch_role(LLMRole.PROMPT)
    dist.switch_role(LLMRole.MIX)
    # Whatever the role, all calls are there.
    assert dist.cache_manager.allocate_cache(CacheDesc(2, [2, 8], DataType.DT_INT8), [CacheKey(1, 1)]).cache_id == 1
    dist.cache_manager.remove_cache_key(CacheKey(1, 1))


@pytest.mark.parametrize(("role", "options"), [("not_a_role", None), (LLMRole.PROMPT, "not_dict"), (None, None)])
def test_a2_13_switch_role_of_wrong_types(managed: Managed, role: Any, options: Any) -> None:
    with pytest.raises(TypeError):
        managed().switch_role(role, options)


def test_the_callers_options_are_left_alone(here: Managed, namespace: Any) -> None:
    given = options_of()
    before = dict(given)
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    try:
        dist.init(given)
    finally:
        dist.finalize()
    assert given == before
