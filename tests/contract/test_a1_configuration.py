"""Contract, appendix A1: configuration. Item numbers are in the names."""
from __future__ import annotations

from typing import Any

import pytest

from shmkv.config import LLMConfig, LlmConfig, Settings
from shmkv.errors import LLMException

REMOTE = "llm.EnableRemoteCacheAccessible"


@pytest.mark.parametrize(
    "name", ["enable_switch_role", "enable_cache_manager", "enable_remote_cache_accessible"]
)
@pytest.mark.parametrize("value", [True, False])
def test_a1_1_switches_read_back(name: str, value: bool) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) is value


@pytest.mark.parametrize("name", ["mem_pool_cfg", "host_mem_pool_cfg"])
@pytest.mark.parametrize("text", ["", "not json", '{"memory_size": 102428800}', "{"])
def test_a1_1_pool_setters_take_any_string(name: str, text: str) -> None:
    config = LlmConfig()
    setattr(config, name, text)
    assert getattr(config, name) == text


@pytest.mark.parametrize("devices", [[0, 1, 2], (3, 4)])
def test_a1_2_device_id_reads_back_unchanged(devices: Any) -> None:
    config = LLMConfig()
    config.device_id = devices
    assert config.device_id == devices
    assert type(config.device_id) is type(devices)


def test_a1_2_device_id_options() -> None:
    config = LLMConfig()
    config.device_id = [0, 1]
    options = config.generate_options()
    assert (options["ge.exec.deviceId"], options["ge.session_device_id"]) == ("0;1", "0")


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_a1_3_mem_utilization_accepted(value: float) -> None:
    config = LLMConfig()
    config.mem_utilization = value
    assert config.mem_utilization == value


@pytest.mark.parametrize("value", [1.5, -0.1])
def test_a1_3_mem_utilization_refused(value: float) -> None:
    with pytest.raises(LLMException):
        LLMConfig().mem_utilization = value


@pytest.mark.parametrize("value", [123, {"key": "value"}, [1, 2]])
def test_a1_4_global_resource_config_is_a_str(value: Any) -> None:
    with pytest.raises(TypeError):
        LLMConfig().global_resource_config = value


def test_a1_4_global_resource_config_in_the_options() -> None:
    config = LLMConfig()
    assert "llm.GlobalResourceConfig" not in config.generate_options()
    for text in ("", '{"a": "b"}', "plain"):
        config.global_resource_config = text
        assert config.generate_options()["llm.GlobalResourceConfig"] == text


def test_a1_5_remote_cache_accessible_in_the_options() -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    assert config.enable_cache_manager is True
    assert config.gen_options().get(REMOTE) is None
    config.enable_remote_cache_accessible = False
    assert config.gen_options()[REMOTE] == "0"
    config.enable_remote_cache_accessible = True
    assert config.gen_options()[REMOTE] == "1"


def test_a1_6_assorted_values_pass_setter_and_init_check() -> None:
    config = LLMConfig()
    config.sync_kv_timeout = "3000"
    config.rdma_traffic_class = config.rdma_service_level = 100
    config.link_total_time = 1000
    config.link_retry_count = 80
    config.deploy_res_path = "./"
    config.ge_options = {"ge.exec.rankId": "1"}
    options = config.generate_options()
    assert options["ge.exec.rankId"] == "1"
    assert Settings.from_options(options, {}).sync_kv_timeout_ms == 3000


def test_a1_7_caller_may_change_the_options() -> None:
    options = LLMConfig().generate_options()
    options["ge.flowGraphMemMaxSize"] = "10240"
    options["llm.SyncKvCacheWaitTime"] = "5"
    assert Settings.from_options(options, {}).sync_kv_timeout_ms == 5
