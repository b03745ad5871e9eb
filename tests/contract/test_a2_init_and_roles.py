"""Contract, appendix A2: init, finalize and roles, as far as they concern the mode without cache manager."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from peer import WATCHDOG_S, Namespace

from shmkv import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("namespace")]
Here = Callable[..., Any]
LISTEN = {"llm.listenIpInfo": "127.0.0.1:1111"}


@pytest.fixture
def fresh() -> Any:
    """An instance that nobody has initialised; finalized afterwards, which is allowed in any state."""
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    yield dist
    dist.finalize()


def test_a2_1_init_and_finalize_may_be_repeated(fresh: LLMDataDist) -> None:
    fresh.finalize()
    fresh.init(LLMConfig().generate_options())
    fresh.init(LLMConfig().generate_options())
    assert LLMDataDist.llm_engine_instance is fresh
    fresh.finalize()
    fresh.finalize()
    assert LLMDataDist.llm_engine_instance is None


def test_a2_1_another_instance_may_follow(fresh: LLMDataDist, here: Here) -> None:
    fresh.init(LLMConfig().generate_options())
    fresh.finalize()
    second = here("DECODER", 1)
    assert LLMDataDist.llm_engine_instance is second


def test_a2_2_second_living_instance_is_refused(fresh: LLMDataDist, here: Here) -> None:
    first = here("PROMPT", 1)
    with pytest.raises(LLMException) as refusal:
        fresh.init(LLMConfig().generate_options())
    assert refusal.value.status_code == LLMStatusCode.LLM_FAILED
    fresh.finalize()
    assert first.kv_cache_manager.is_initialized()
    assert LLMDataDist.llm_engine_instance is first


def test_a2_3_memory_size_has_to_be_text(fresh: LLMDataDist) -> None:
    with pytest.raises(TypeError):
        fresh.init({"ge.flowGraphMemMaxSize": 123})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["1024,2048", "1.23", "-1"])
def test_a2_3_memory_size_has_to_be_digits(fresh: LLMDataDist, text: str) -> None:
    with pytest.raises(LLMParamError):
        fresh.init({"ge.flowGraphMemMaxSize": text})
    assert LLMDataDist.llm_engine_instance is None


def test_a2_3_good_memory_size_without_cache_manager(fresh: LLMDataDist) -> None:
    fresh.init({"ge.flowGraphMemMaxSize": "10000000", "llm.EnableCacheManager": "0"})
    assert fresh.kv_cache_manager.is_initialized()


@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.DECODER])
def test_a2_4_cluster_info_alone_is_enough(role: LLMRole) -> None:
    dist = LLMDataDist(role, 1)
    dist.init({"llm.ClusterInfo": '{"cluster_id": 7, "logic_device_id": ["0:0:0:0"]}'})
    assert dist.kv_cache_manager.is_initialized()
    assert dist.cluster_id == 1
    dist.finalize()


def test_a2_5_two_devices_and_the_callers_dict(fresh: LLMDataDist) -> None:
    config = LLMConfig()
    config.device_id = [1, 2]
    config.listen_ip_info = "127.0.0.1:26000;127.0.0.1:26001"
    options = config.generate_options()
    fresh.init(options)
    assert isinstance(options["llm.ClusterInfo"], str)
    assert options["llm.Role"] == "Prompt"


def test_a2_6_transfer_backend_needs_the_cache_manager(fresh: LLMDataDist) -> None:
    with pytest.raises(LLMException, match="EnableCacheManager"):
        fresh.init({"llm.TransferBackend": "hixl"})


def test_a2_6_local_comm_res_contradicts_no_cache_manager(fresh: LLMDataDist) -> None:
    with pytest.raises(LLMParamError, match="EnableCacheManager"):
        fresh.init({"llm.LocalCommRes": "{}", "llm.EnableCacheManager": "0"})


def test_a2_6_bad_listen_ip_info_is_refused(fresh: LLMDataDist) -> None:
    for text in ("127.0.0.1", "127.0.0.1:", "nowhere:26000", "127.0.0.1:65536", "127.0.0.1:x"):
        with pytest.raises(LLMParamError):
            fresh.init({"llm.listenIpInfo": text})
    assert LLMDataDist.llm_engine_instance is None


def test_a2_7_names_of_roles_and_cluster_id() -> None:
    names = [LLMDataDist._role_to_str(role) for role in (LLMRole.PROMPT, LLMRole.DECODER, LLMRole.MIX)]
    assert names == ["Prompt", "Decoder", "Mix"]
    assert LLMDataDist(LLMRole.MIX, 2**64 - 1).cluster_id == 2**64 - 1


def test_a2_7_constructor_checks_its_arguments() -> None:
    for role in ("PROMPT", 1, None):
        with pytest.raises(TypeError):
            LLMDataDist(role, 0)  # type: ignore[arg-type]
    for cluster_id in ("1", 1.0, None):
        with pytest.raises(TypeError):
            LLMDataDist(LLMRole.PROMPT, cluster_id)  # type: ignore[arg-type]
    for cluster_id in (-1, 2**64):
        with pytest.raises(LLMParamError):
            LLMDataDist(LLMRole.PROMPT, cluster_id)


def test_a2_8_cache_manager_belongs_to_the_other_mode(here: Here) -> None:
    dist = here("PROMPT")
    with pytest.raises(LLMParamError):
        _ = dist.cache_manager


@pytest.mark.parametrize("use", [
    lambda dist: dist.kv_cache_manager, lambda dist: dist.cache_manager, lambda dist: dist.link_clusters([]),
    lambda dist: dist.unlink_clusters([]), lambda dist: dist.check_link_status(2),
    lambda dist: dist.switch_role(LLMRole.DECODER),
], ids=["kv_cache_manager", "cache_manager", "link_clusters", "unlink_clusters", "check_link_status",
        "switch_role"])
def test_a2_9_use_before_init(fresh: LLMDataDist, use: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError) as refusal:
        use(fresh)
    assert isinstance(refusal.value, LLMException)
    assert refusal.value.status_code == LLMStatusCode.LLM_FAILED


def test_a2_9_options_have_to_be_a_dict(fresh: LLMDataDist) -> None:
    for options in (None, "options", [("llm.SyncKvCacheWaitTime", "1")]):
        with pytest.raises(TypeError):
            fresh.init(options)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        fresh.init(None)  # type: ignore[arg-type]


def test_a2_9_kept_manager_says_that_the_engine_is_finalized(here: Here) -> None:
    dist = here("PROMPT")
    manager = dist.kv_cache_manager
    dist.finalize()
    assert not manager.is_initialized()
    with pytest.raises(LLMException) as refusal:
        manager.allocate_cache(CacheDesc(1, [1, 8], DataType.DT_INT8))
    assert refusal.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED


def test_a2_9_ids_start_again_after_finalize(here: Here) -> None:
    dist = here("PROMPT")
    desc = CacheDesc(1, [1, 8], DataType.DT_INT8)
    kept = [dist.kv_cache_manager.allocate_cache(desc) for _ in range(3)]
    assert [cache.cache_id for cache in kept] == [1, 2, 3]
    dist.finalize()
    dist.init(LLMConfig().generate_options())
    assert dist.kv_cache_manager.allocate_cache(desc).cache_id == 1


def test_a2_10_switch_role_has_to_be_enabled(here: Here) -> None:
    dist = here("PROMPT")
    with pytest.raises(LLMException) as refusal:
        dist.switch_role(LLMRole.DECODER)
    assert refusal.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert _allocates_with_keys(dist)


def test_a2_10_switch_to_the_same_role(here: Here) -> None:
    dist = here("DECODER", enable_switch_role=True)
    with pytest.raises(LLMParamError):
        dist.switch_role(LLMRole.DECODER)
    assert not _allocates_with_keys(dist)


def test_a2_10_switch_to_prompt_needs_listen_ip_info(here: Here) -> None:
    dist = here("DECODER", enable_switch_role=True)
    with pytest.raises(LLMParamError, match="listenIpInfo"):
        dist.switch_role(LLMRole.PROMPT, {})
    for text in ("127.0.0.1", "no ip:1111", "127.0.0.1:no port"):
        with pytest.raises(LLMParamError):
            dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": text})
    with pytest.raises(TypeError):
        dist.switch_role(LLMRole.PROMPT, None)
    assert not _allocates_with_keys(dist)


def test_a2_11_mix_to_decoder_to_prompt(here: Here) -> None:
    dist = here("MIX", enable_switch_role=True)
    assert not _allocates_with_keys(dist)
    dist.switch_role(LLMRole.DECODER)
    assert not _allocates_with_keys(dist)
    dist.switch_role(LLMRole.PROMPT, dict(LISTEN))
    assert _allocates_with_keys(dist)
    dist.switch_role(LLMRole.DECODER)
    assert not _allocates_with_keys(dist)


def test_a2_13_switch_role_wants_a_role_and_a_dict(here: Here) -> None:
    dist = here("PROMPT", enable_switch_role=True)
    for role in ("not_a_role", 2, None):
        with pytest.raises(TypeError):
            dist.switch_role(role)
    with pytest.raises(TypeError):
        dist.switch_role(LLMRole.DECODER, "not_dict")
    assert _allocates_with_keys(dist)


def _allocates_with_keys(dist: LLMDataDist) -> bool:
    """Only role PROMPT may bind keys, so this shows the role that the manager really goes by."""
    desc, keys = CacheDesc(1, [1, 8], DataType.DT_INT8), [CacheKey(1, 4711)]
    try:
        dist.kv_cache_manager.allocate_cache(desc, keys)
    except LLMParamError:
        return False
    dist.kv_cache_manager.remove_cache_key(keys[0])
    return True


# The witness is registered before the library's own handler, so it runs after it.
WITNESS = """
import atexit, os, sys
def witness():
    left = [name for name in os.listdir("/dev/shm") if name.startswith(os.environ["SHMKV_NAMESPACE"])]
    print("instance", shmkv.LLMDataDist.llm_engine_instance, "left", len(left))
atexit.register(witness)
import shmkv
from shmkv import *
dist = LLMDataDist(LLMRole.PROMPT, 1)
"""
INITIALISED = WITNESS + """
dist.init(LLMConfig().generate_options())
cache = dist.kv_cache_manager.allocate_cache(CacheDesc(2, [2, 8], DataType.DT_INT8), [CacheKey(1, 1)])
"""


def _run(namespace: Namespace, text: str) -> tuple[int, str, str]:
    script = namespace.workdir / "ends.py"
    script.write_text(text)
    ended = subprocess.run([sys.executable, str(script)], env=namespace.environment({}), capture_output=True,
                           text=True, timeout=WATCHDOG_S, check=False)
    return ended.returncode, ended.stdout.strip(), ended.stderr


@pytest.mark.parametrize(("text", "code"), [
    (INITIALISED, 0), (WITNESS, 0), (INITIALISED + "sys.exit(3)", 3),
    (INITIALISED + "knot = [dist, cache]; knot.append(knot)", 0),
    (INITIALISED + "dist.finalize()", 0),
], ids=["falls off the end", "never initialised", "exit code", "reference cycle", "finalized before"])
def test_a2_14_exit_finalizes_the_living_instance(namespace: Namespace, text: str, code: int) -> None:
    assert _run(namespace, text) == (code, "instance None left 0", "")


def test_a2_14_exit_swallows_an_error_of_finalize(namespace: Namespace) -> None:
    namespace.somebody_died = True  # nothing is freed when finalize is broken
    code, _, complaint = _run(namespace, INITIALISED + """
def broken(self):
    raise LLMException("broken on purpose", status_code=LLMStatusCode.LLM_FAILED)
LLMDataDist.finalize = broken
""")
    assert (code, complaint) == (0, "")
