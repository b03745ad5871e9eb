"""docs/llm_datadist.md, the rows of init, links and roles. The numbers are in the names."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guide_rows import DESC, Own, status_of
from peer import Namespace, StartPeer, prefix

from shmkv import LLMClusterInfo, LLMConfig, LLMDataDist, LLMParamError, LLMRole, LLMStatusCode

pytestmark = pytest.mark.timeout(120)
Here = Callable[..., Any]


def cluster(cluster_id: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("10.1.2.3", 1)
    info.append_remote_ip_info("10.1.2.4", 2)
    return info


@pytest.fixture
def fresh(namespace: Namespace) -> Iterator[LLMDataDist]:
    """A prompt that is not initialised."""
    dist = LLMDataDist(LLMRole.PROMPT, 4)
    yield dist
    dist.finalize()


def test_l1_two_entries_in_the_callers_dict_and_no_file(fresh: LLMDataDist, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    options: dict[str, str] = {}
    fresh.init(options)
    assert options == {"llm.Role": "Prompt", "llm.ClusterInfo": '{"cluster_id": 4}'}
    assert list((tmp_path / "empty").iterdir()) == []


def test_l2_neither_device_nor_address_is_needed(fresh: LLMDataDist) -> None:
    fresh.init({})
    assert fresh.kv_cache_manager.allocate_cache(DESC).cache_id == 1


@pytest.mark.parametrize("text", ["nothing", "127.0.0.1", "127.0.0.1:70000"])
def test_l3_the_form_of_an_address_is_checked(fresh: LLMDataDist, text: str) -> None:
    assert status_of(lambda: fresh.init({"llm.listenIpInfo": text})) == LLMStatusCode.LLM_PARAM_INVALID


def test_l4_flow_graph_memory_is_no_limit(fresh: LLMDataDist) -> None:
    for text in ("1,2", "-1", "1.5"):
        assert status_of(lambda text=text: fresh.init({"ge.flowGraphMemMaxSize": text})) == LLMStatusCode.LLM_PARAM_INVALID
    fresh.init({"ge.flowGraphMemMaxSize": "10"})
    fresh.kv_cache_manager.allocate_cache(DESC)


def test_l5_devices_act_as_one(fresh: LLMDataDist) -> None:
    config = LLMConfig()
    config.device_id = [0, 1, 2]
    fresh.init(config.generate_options())
    cache = fresh.kv_cache_manager.allocate_cache(DESC)
    assert [len(addresses) for addresses in cache.per_device_tensor_addrs] == [4]
    assert len(fresh.kv_cache_manager.get_cache_tensors(cache)) == 1


def test_l6_an_id_that_is_in_use(fresh: LLMDataDist, prompt: StartPeer) -> None:
    other = prompt(4)
    assert status_of(lambda: fresh.init({})) == LLMStatusCode.LLM_FAILED
    other.kill()
    fresh.init({})


def test_l7_addresses_are_not_used(prompt: StartPeer, here: Here) -> None:
    prompt(1)
    done = (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    assert here("DECODER", 2).link_clusters([cluster(1)], 10_000) == done


def test_l8_a_link_call_waits_milliseconds_for_another_one(here: Here) -> None:
    dist = here("DECODER", 2)
    first = threading.Thread(target=dist.link_clusters, args=([cluster(9)], 3000))
    first.start()
    status = LLMStatusCode.LLM_SUCCESS
    while first.is_alive() and status != LLMStatusCode.LLM_PROCESSING_LINK:     # until the other call has begun
        status, _ = dist.link_clusters([cluster(9)], 1)
    begin = time.monotonic()
    status, _ = dist.link_clusters([cluster(9)], 200)
    assert status == LLMStatusCode.LLM_PROCESSING_LINK
    assert time.monotonic() - begin >= 0.2
    first.join()


def test_l9_peers_that_cannot_be_linked(here: Here, namespace: Namespace) -> None:
    namespace.start_cluster("DECODER", 3)
    dist = here("DECODER", 2)
    assert dist.link_clusters([cluster(3)], 5000)[1] == [LLMStatusCode.LLM_LINK_FAILED]
    assert dist.link_clusters([cluster(9)], 50)[1] == [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT]


def test_l10_unlinking_the_dead(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2)
    source.kill()
    assert target.call("unlink", ids=[1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]


def test_l11_a_successor_of_a_dead_peer_needs_a_new_link(prompt: StartPeer, decoder: StartPeer) -> None:
    source, target = prompt(1), decoder(2)
    target.call("allocate", name="kv")
    source.kill()
    prompt(1).call("allocate", name="kv", keys=[prefix(1, 3)])
    answer = target.attempt("pull", key=prefix(1, 3), name="kv")
    assert answer.outcome == "LLM_WAIT_PROCESS_TIMEOUT"
    assert answer.ms < 10_000
    target.call("unlink", ids=[1])
    target.call("link", ids=[1])
    target.call("pull", key=prefix(1, 3), name="kv")


@pytest.mark.parametrize(("options", "error"), [(None, TypeError), ({}, LLMParamError)])
def test_l12_a_prompt_needs_listen_ip_info(own: Own, options: dict[str, str] | None, error: type[Exception]) -> None:
    with pytest.raises(error, match="listenIpInfo"):
        own.dist.switch_role(LLMRole.PROMPT, options)


def test_l13_an_address_that_is_none() -> None:
    with pytest.raises(RuntimeError) as caught:
        LLMClusterInfo().append_local_ip_info("300.1.1.1", 1)
    assert isinstance(caught.value, LLMParamError)
