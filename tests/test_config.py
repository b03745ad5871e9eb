"""LLMConfig at both ends of every range, and Settings: options and environment, good and bad."""
from __future__ import annotations

import copy
import json
import os
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from shmkv import _copy
from shmkv.checks import shown
from shmkv.cluster import choose_kernel
from shmkv.config import LLMConfig, LlmConfig, MemPool, Settings
from shmkv.errors import LLMNoneError, LLMParamError

U32 = 2**32 - 1
ENDS = [(0, "0"), (U32, str(U32))]
I32 = 2**31 - 1

# attribute, option key, (good value, text of the option or None if it is left out), out of range, wrong types
TEXTS: list[Any] = [b"x", 1, ["x"], {}, None]
BOOLS: list[Any] = [0, 1, "1", None]
RULES: list[tuple[str, str, list[tuple[Any, str | None]], list[Any], list[Any]]] = [
    (
        "device_id", "ge.exec.deviceId",
        [(0, "0"), (I32, str(I32)), ([0, 1], "0;1"), ((3, 4), "3;4"), (True, "1")],
        [-1, 2**31, [], (), [0, -1], [2**31]], ["0", 1.0, [0, "1"], np.int32(1), [None], None, {0}],
    ),
    ("listen_ip_info", "llm.listenIpInfo", [("1.2.3.4:5", "1.2.3.4:5"), ("x", "x"), ("", None)], [], TEXTS),
    (
        "sync_kv_timeout", "llm.SyncKvCacheWaitTime",
        [(1, "1"), (I32, str(I32)), ("1", "1"), ("3000", "3000"), (str(I32), str(I32))],
        [0, -1, 2**31, "0", "-1", "1.5", " 5", "", "x", str(2**31), "9" * 5000, "\u0665"],
        [1.0, None, [1], b"1"],
    ),
    ("enable_switch_role", "llm.EnableSwitchRole", [(True, "1"), (False, None)], [], BOOLS),
    (
        "mem_utilization", "llm.MemoryUtilization", [(0.0, "0.0"), (0.5, "0.5"), (1.0, "1.0")],
        [-0.1, 1.5, float("nan"), float("inf")], [0, 1, "0.5", None],
    ),
    ("buf_pool_cfg", "llm.BufPoolCfg", [("{", "{"), ("", None)], [], TEXTS),
    (
        "cluster_info", "llm.ClusterInfo", [('{"a": 1}', '{"a": 1}'), ("[]", "[]")],
        ["", "{", "[" * 10**5], TEXTS,
    ),
    ("output_max_size", "llm.OutputMaxSize", [(0, "0"), (2**40, str(2**40))], [], ["1", 1.0, None]),
    ("deploy_res_path", "llm.deployResPath", [("./", "./"), ("", None)], [], TEXTS),
    ("enable_cache_manager", "llm.EnableCacheManager", [(True, "1"), (False, "0")], [], BOOLS),
    (
        "enable_remote_cache_accessible", "llm.EnableRemoteCacheAccessible", [(True, "1"), (False, "0")],
        [], BOOLS,
    ),
    ("mem_pool_cfg", "llm.MemPoolConfig", [("no json", "no json"), ("", None)], [], TEXTS),
    ("host_mem_pool_cfg", "llm.HostMemPoolConfig", [("no json", "no json"), ("", None)], [], TEXTS),
    ("local_comm_res", "llm.LocalCommRes", [("{}", "{}"), ("", "")], [], TEXTS),
    ("rdma_traffic_class", "llm.RdmaTrafficClass", [*ENDS], [-1, U32 + 1], ["1", 1.0, None]),
    ("rdma_service_level", "llm.RdmaServiceLevel", [*ENDS], [-1, U32 + 1], ["1", 1.0, None]),
    ("link_total_time", "llm.LinkTotalTime", [*ENDS], [-1, U32 + 1], ["1", 1.0, None]),
    ("link_retry_count", "llm.LinkRetryCount", [(1, "1"), (100, "100")], [0, 101, -1], ["1", 1.0, None]),
    ("transfer_backend", "llm.TransferBackend", [("hixl", "hixl"), ("", None)], [], TEXTS),
    ("global_resource_config", "llm.GlobalResourceConfig", [("{}", "{}"), ("", "")], [], TEXTS),
]
UNSET = {
    "device_id": None, "sync_kv_timeout": None, "enable_switch_role": False, "mem_utilization": 0.95,
    "enable_cache_manager": False, "enable_remote_cache_accessible": False, "rdma_traffic_class": None,
    "rdma_service_level": None, "link_total_time": 0, "link_retry_count": 1,
}
ALWAYS = {"llm.MemoryUtilization": "0.95"}


def test_both_names_are_one_class() -> None:
    assert LlmConfig is LLMConfig


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [(n, k, value, text) for n, k, good, _, _ in RULES for value, text in good]
)
def test_setting_reads_back_and_is_written(name: str, key: str, value: Any, text: str | None) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.generate_options().get(key) == text


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [(n, value, LLMParamError) for n, _, _, bad, _ in RULES for value in bad]
    + [(n, value, TypeError if value is not None else LLMNoneError) for n, *_, bad in RULES for value in bad],
    ids=lambda value: repr(value)[:20],
)
def test_setter_refuses_and_changes_nothing(name: str, value: Any, error: type[Exception]) -> None:
    config = LLMConfig()
    with pytest.raises(error, match=name):
        setattr(config, name, value)
    assert getattr(config, name) == UNSET.get(name, "")
    assert config.generate_options() == ALWAYS


@pytest.mark.parametrize(("name", "key", "value"), [(n, k, good[0][0]) for n, k, good, _, _ in RULES])
def test_what_is_cleared_leaves_the_options(name: str, key: str, value: Any) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert key in config.generate_options()
    delattr(config, name)
    assert getattr(config, name) == UNSET.get(name, "")
    assert config.generate_options() == ALWAYS


def test_every_call_gives_a_new_dict() -> None:
    config = LLMConfig()
    config.generate_options()["llm.listenIpInfo"] = "1.2.3.4:5"
    config.options["x"] = "y"
    assert config.generate_options() == config.gen_options() == config.options == ALWAYS
    assert config.options is not config.options


def test_first_device_is_the_session_device() -> None:
    config = LLMConfig()
    config.device_id = [2, 0]
    assert config.generate_options()["ge.session_device_id"] == "2"
    config.device_id = 7
    assert config.generate_options()["ge.session_device_id"] == "7"


def test_ge_options_come_first_and_lose_against_attributes() -> None:
    config = LLMConfig()
    config.ge_options = {"ge.exec.rankId": "1", "llm.listenIpInfo": "old"}
    config.listen_ip_info = "new"
    assert config.generate_options() == {"ge.exec.rankId": "1", "llm.listenIpInfo": "new", **ALWAYS}
    del config.ge_options
    config.ge_options["a"] = "b"
    assert config.generate_options()["a"] == "b"
    assert LLMConfig().ge_options == {}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, LLMNoneError), ("a", TypeError), ([("a", "b")], TypeError), ({"a": 1}, TypeError),
        ({1: "a"}, TypeError),
    ],
)
def test_ge_options_are_texts(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="ge_options"):
        LLMConfig().ge_options = value


def test_attributes_are_documented() -> None:
    for name, *_ in RULES:
        assert vars(LLMConfig)[name].__doc__


def test_configs_do_not_share_anything_and_can_be_copied() -> None:
    one, two = LLMConfig(), LLMConfig()
    one.sync_kv_timeout = 5
    assert two.sync_kv_timeout is None
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin.generate_options() == one.generate_options()


def settings(options: dict[str, Any] | None = None, **environ: str) -> Settings:
    return Settings.from_options({} if options is None else options, environ)


def test_settings_of_nothing_at_all() -> None:
    assert settings() == Settings(
        namespace=f"shmkv-{os.getuid()}", sync_kv_timeout_ms=1000, enable_switch_role=False,
        cache_manager=False,
        remote_accessible=False, local_comm_res="", mem_pool=None, host_mem_pool=None, listen_ip_info="",
        recycle_bytes=None, kernel="auto", nt_threshold=None, copy_threads=None, copy="memory", async_threads=4, max_leases=192,
        allow_ptrace=False,
    )
    with pytest.raises(FrozenInstanceError):
        settings().kernel = "c"  # type: ignore[misc]


def test_settings_of_everything() -> None:
    config = LLMConfig()
    config.device_id = [0, 1]
    config.listen_ip_info = "127.0.0.1:26000;127.0.0.1:26001"
    config.sync_kv_timeout = "20000"
    config.enable_switch_role = config.enable_cache_manager = config.enable_remote_cache_accessible = True
    config.mem_pool_cfg = json.dumps({"memory_size": 100, "page_shift": 10})
    config.host_mem_pool_cfg = json.dumps({"memory_size": 7, "else": 1})
    config.transfer_backend = "hixl"
    config.ge_options = {"ge.flowGraphMemMaxSize": "10240", "other": "x"}
    made = settings(
        config.generate_options(), SHMKV_NAMESPACE="a_B-9", SHMKV_RECYCLE_BYTES="0", SHMKV_KERNEL="avx2",
        SHMKV_NT_THRESHOLD="4194304", SHMKV_COPY_THREADS="2", SHMKV_COPY="pread", SHMKV_ASYNC_THREADS="9", SHMKV_MAX_LEASES="7",
        SHMKV_ALLOW_PTRACE="1",
    )
    assert made == Settings(
        namespace="a_B-9", sync_kv_timeout_ms=20000, enable_switch_role=True, cache_manager=True,
        remote_accessible=True, local_comm_res="", mem_pool=MemPool(100, 10), host_mem_pool=MemPool(7, 16),
        listen_ip_info="127.0.0.1:26000;127.0.0.1:26001", recycle_bytes=0, kernel="avx2",
        nt_threshold=4194304,
        copy_threads=2, copy="pread", async_threads=9, max_leases=7, allow_ptrace=True,
    )


def test_the_way_to_copy_is_an_option_before_it_is_a_variable() -> None:
    assert settings({"shmkv.Copy": "memory"}, SHMKV_COPY="pread").copy == "memory"
    assert settings({}, SHMKV_COPY="pread").copy == "pread"
    for wrong in ({"shmkv.Copy": "mmap"}, {"shmkv.Copy": ""}):
        with pytest.raises(LLMParamError, match=r'shmkv\.Copy must be "memory" or "pread"'):
            settings(wrong)
    with pytest.raises(LLMParamError, match="SHMKV_COPY must be"):
        settings({}, SHMKV_COPY="PREAD")


def test_the_namespace_is_an_option_before_it_is_a_variable() -> None:
    assert settings({"shmkv.Namespace": "mine"}, SHMKV_NAMESPACE="theirs").namespace == "mine"
    for wrong in ("", "a b", "x" * 101):
        with pytest.raises(LLMParamError, match=r"shmkv\.Namespace must be 1 to 100 characters"):
            settings({"shmkv.Namespace": wrong}, SHMKV_NAMESPACE="theirs")


def test_callers_options_are_left_alone() -> None:
    options = {"llm.EnableCacheManager": "1", "unknown": "x"}
    settings(options)
    assert options == {"llm.EnableCacheManager": "1", "unknown": "x"}


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMKV_NAMESPACE", "from-environ")
    assert Settings.from_options({}).namespace == "from-environ"


@pytest.mark.parametrize(("value", "error"), [(None, LLMNoneError), ([], TypeError), ("{}", TypeError)])
def test_options_must_be_a_dict(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="options"):
        Settings.from_options(value, {})


GOOD_OPTIONS = [
    {"ge.flowGraphMemMaxSize": "0"}, {"ge.flowGraphMemMaxSize": "9" * 5000},
    {"llm.MemoryUtilization": "0.95"},
    {"ge.exec.deviceId": "0"}, {"ge.exec.deviceId": "0;1"}, {"llm.listenIpInfo": "22:33"},
    {"llm.EnableCacheManager": "0"}, {"llm.MemPoolConfig": "no json"}, {"llm.ClusterInfo": "{"},
    {"llm.EnableCacheManager": "1", "llm.MemPoolConfig": ""}, {"llm.TransferBackend": ""},
    {"llm.SyncKvCacheWaitTime": "1"}, {"llm.SyncKvCacheWaitTime": str(I32)}, {"anything": 5},
]


@pytest.mark.parametrize("options", GOOD_OPTIONS, ids=lambda options: str(options)[:60])
def test_options_accepted(options: dict[str, Any]) -> None:
    assert settings(options).mem_pool is None


@pytest.mark.parametrize("key", [
    "ge.flowGraphMemMaxSize", "llm.MemoryUtilization", "llm.listenIpInfo", "ge.exec.deviceId",
    "llm.SyncKvCacheWaitTime", "llm.EnableSwitchRole", "llm.EnableCacheManager", "llm.LocalCommRes",
    "llm.EnableRemoteCacheAccessible", "llm.TransferBackend",
])
def test_used_options_must_be_texts(key: str) -> None:
    with pytest.raises(TypeError, match=key):
        settings({key: 123})
    with pytest.raises(LLMNoneError, match=key):
        settings({key: None})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("ge.flowGraphMemMaxSize", text) for text in ("1024,2048", "-1", "1.23", "", " 1", "1\n")),
        *(("llm.MemoryUtilization", text) for text in ("", "x", "0.5.1")),
        *(("llm.listenIpInfo", text) for text in ("", "1.2.3.4", "host:1", "1.2.3.4:1;", "1.2.3.4:65536")),
        *(("ge.exec.deviceId", text) for text in ("", "-1", "0,1", "0;", "x", str(2**31))),
        *(("llm.SyncKvCacheWaitTime", text) for text in ("", "0", "-1", "1.0", str(2**31), "9" * 5000)),
        *(("llm.EnableSwitchRole", text) for text in ("", "true", "2")),
        *(("llm.EnableCacheManager", text) for text in ("", "true", "2")),
        *(("llm.EnableRemoteCacheAccessible", text) for text in ("", "yes")),
    ],
    ids=lambda value: value[:30],
)
def test_option_texts_refused(key: str, text: str) -> None:
    with pytest.raises(LLMParamError, match=key):
        settings({key: text})


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, (False, False)),
        ({"llm.EnableCacheManager": "1"}, (True, False)),
        ({"llm.EnableCacheManager": "0"}, (False, False)),
        ({"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}, (True, True)),
        ({"llm.LocalCommRes": ""}, (True, True)),
        ({"llm.LocalCommRes": "{}", "llm.EnableRemoteCacheAccessible": "0"}, (True, False)),
        ({"llm.LocalCommRes": "{}", "llm.EnableCacheManager": "1"}, (True, True)),
    ],
)
def test_mode(options: dict[str, str], mode: tuple[bool, bool]) -> None:
    made = settings(options)
    assert (made.cache_manager, made.remote_accessible) == mode
    assert made.local_comm_res == options.get("llm.LocalCommRes", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, "EnableCacheManager"),
        ({"llm.TransferBackend": "hixl", "llm.listenIpInfo": "1.2.3.4:5"}, "EnableCacheManager"),
        (
            {
                "llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1",
                "llm.EnableRemoteCacheAccessible": "0",
            },
            "EnableRemoteCacheAccessible",
        ),
        ({"llm.TransferBackend": "hixl", "llm.LocalCommRes": ""}, "listenIpInfo"),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1"}, "listenIpInfo"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, str], named: str) -> None:
    with pytest.raises(LLMParamError, match=named):
        settings(options)


@pytest.mark.parametrize("key", ["llm.MemPoolConfig", "llm.HostMemPoolConfig"])
@pytest.mark.parametrize(
    "text",
    [
        "no json", "[]", "1", "null", "{}", '{"memory_size": 0}', '{"memory_size": -1}',
        '{"memory_size": "1"}',
        '{"memory_size": 1.5}', '{"memory_size": true}', '{"memory_size": 9223372036854775808}',
        '{"memory_size": 1, "page_shift": 9}', '{"memory_size": 1, "page_shift": 31}',
        '{"memory_size": 1, "page_shift": "16"}', "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_pool_refused_where_it_is_used(key: str, text: str) -> None:
    with pytest.raises(LLMParamError, match=key):
        settings({"llm.EnableCacheManager": "1", key: text})
    assert settings({key: text}).mem_pool is None


@pytest.mark.parametrize("shift", [10, 16, 30])
def test_pool_rounds_up_to_pages(shift: int) -> None:
    pool = MemPool.from_json("llm.MemPoolConfig", json.dumps({"memory_size": 2**63 - 1, "page_shift": shift}))
    page = 1 << shift
    assert pool == MemPool(2**63 - 1, shift)
    assert [pool.rounded(n) for n in (0, 1, page, page + 1)] == [0, page, page, 2 * page]


@pytest.mark.parametrize(
    ("name", "field", "low", "high"),
    [
        ("SHMKV_RECYCLE_BYTES", "recycle_bytes", 0, 2**63 - 1),
        ("SHMKV_NT_THRESHOLD", "nt_threshold", 0, 2**63 - 1),
        ("SHMKV_COPY_THREADS", "copy_threads", 1, 256),
    ],
)
def test_numbers_from_the_environment(name: str, field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(settings(**{name: str(value)}), field) == value
    for text in (str(low - 1), str(high + 1), "", "x", "1.0", " 1", "1_0", "0x10"):
        with pytest.raises(LLMParamError, match=f"{name} must be an integer from {low} to {high}"):
            settings(**{name: text})


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 100])
def test_namespace_accepted(name: str) -> None:
    assert settings(SHMKV_NAMESPACE=name).namespace == name


@pytest.mark.parametrize("name", ["", "x" * 101, "a/b", "a.b", "a b", "a\n", "\u00e4", "..", "a\0"], ids=repr)
def test_namespace_refused(name: str) -> None:
    with pytest.raises(LLMParamError, match="SHMKV_NAMESPACE"):
        settings(SHMKV_NAMESPACE=name)


@pytest.mark.parametrize("name", ["", "AVX2", "Auto", "a b", " c", "../x", "z80", "a" * 4000])
def test_kernel_refused_by_the_names_that_there_are(name: str) -> None:
    before = _copy.current()
    with pytest.raises(LLMParamError) as refused:
        choose_kernel(settings(SHMKV_KERNEL=name))
    names = ", ".join(["auto", *_copy.supported_kernels()])
    assert str(refused.value) == f"SHMKV_KERNEL must be one of {names}, got {shown(name)}"
    assert _copy.current() == before
