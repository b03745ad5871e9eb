"""Contract, appendix B6, B7 and B17: how long caches, keys and segments live."""
from __future__ import annotations

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, by_id, padding, prefix, req
from reference import NOT_EXIST, SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
AT_ONCE = {"SHMKV_RECYCLE_BYTES": "0"}
WANTED = pattern(geometry(4, [2, 8], 2), 1)
LISTEN = {"llm.listenIpInfo": "127.0.0.1:1111"}
SUCCESS_OF_ONE = ["LLM_SUCCESS", ["LLM_SUCCESS"]]


class Scene:
    """A prompt with the cache "kv" (id 1) of two keyed rows, a decoder, and the segment of that cache."""

    def __init__(self, namespace: Namespace, p: Peer, d: Peer) -> None:
        self.p, self.d, self.namespace = p, d, namespace
        d.call("allocate", name="kv")
        before = namespace.segments()
        assert p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2)]) == 1
        p.call("fill", name="kv", generation=1)
        self.segment = namespace.segments() - before
        assert len(self.segment) == 1

    def pull(self, key: list[object]) -> str:
        return self.d.outcome("pull", key=key, name="kv")

    def is_freed(self) -> bool:
        """Whether the cache's segment is gone once its owner has had the occasion to free it."""
        self.p.call("collect")
        return not self.segment & self.namespace.segments()


@pytest.fixture
def scene(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> Scene:
    return Scene(namespace, prompt(1, env=AT_ONCE), decoder(2))


@pytest.mark.parametrize("way", ["deallocate", "drop"])
def test_b6_last_consume_frees_a_deallocated_cache(scene: Scene, way: str) -> None:
    scene.p.call(way, name="kv")
    assert not scene.is_freed()
    assert scene.pull(req(1, 2)) == SUCCESS
    np.testing.assert_array_equal(scene.d.read("kv")[:, :, 0], WANTED[:, :, 1])
    assert not scene.is_freed()
    assert scene.pull(req(1, 1)) == SUCCESS
    np.testing.assert_array_equal(scene.d.read("kv")[:, :, 0], WANTED[:, :, 0])
    assert scene.is_freed()
    assert scene.pull(by_id(1, 1)) == NOT_EXIST


def test_b6_deallocated_cache_with_keys_is_pulled_by_id(scene: Scene) -> None:
    scene.p.call("deallocate", name="kv")
    assert scene.pull(by_id(1, 1, 1)) == SUCCESS
    np.testing.assert_array_equal(scene.d.read("kv")[:, :, 0], WANTED[:, :, 1])
    assert scene.pull(req(1, 2)) == NOT_EXIST
    assert scene.pull(by_id(1, 1, 1)) == SUCCESS
    assert not scene.is_freed()
    assert scene.pull(by_id(1, 1, 0)) == SUCCESS
    assert scene.is_freed()


def test_b6_removed_keys_free_a_deallocated_cache(scene: Scene) -> None:
    scene.p.call("deallocate", name="kv")
    scene.p.call("remove_key", key=req(1, 1))
    assert not scene.is_freed()
    scene.p.call("remove_key", key=req(1, 2))
    assert scene.is_freed()


def test_b6_deallocate_after_the_keys_are_gone(scene: Scene) -> None:
    assert scene.pull(req(1, 1)) == SUCCESS
    scene.p.call("remove_key", key=req(1, 2))
    assert not scene.is_freed()
    scene.p.call("deallocate", name="kv")
    assert scene.is_freed()


def test_b6_cache_without_keys_is_freed_at_once(scene: Scene, namespace: Namespace) -> None:
    before = namespace.segments()
    scene.p.call("allocate", name="bare")
    scene.p.call("allocate", name="padded", keys=[padding()])
    for name in ("bare", "padded"):
        scene.p.call("deallocate", name=name)
    scene.p.call("collect")
    assert namespace.segments() == before


def test_b7_dropped_cache_without_keys_is_freed(scene: Scene) -> None:
    scene.p.call("remove_key", key=req(1, 1))
    scene.p.call("remove_key", key=req(1, 2))
    assert not scene.is_freed()
    scene.p.call("drop", name="kv")
    assert scene.is_freed()


@pytest.mark.parametrize("recycle", ["0", "1000000000"])
def test_b7_finalize_removes_every_name(namespace: Namespace, prompt: StartPeer, recycle: str) -> None:
    p = prompt(1, env={"SHMKV_RECYCLE_BYTES": recycle})
    for number in range(5):
        p.call("allocate", name=f"kv{number}", keys=[req(1, number), prefix(1, number)])
    p.call("deallocate", name="kv1")
    p.call("deallocate", name="kv2")
    assert len(namespace.segments()) >= 5
    p.call("finalize")
    assert namespace.names() == set()


def test_b7_finalize_removes_its_segments_beside_a_living_peer(scene: Scene) -> None:
    scene.p.call("finalize")
    assert not scene.segment & scene.namespace.segments()
    assert scene.pull(req(1, 1)) == "LLM_WAIT_PROCESS_TIMEOUT"
    scene.d.call("finalize")
    assert scene.namespace.names() == set()


def test_b7_killed_prompt_leaves_nothing_after_the_next_init(namespace: Namespace, prompt: StartPeer) -> None:
    p = prompt(1)
    for number in range(3):
        p.call("allocate", name=f"kv{number}", keys=[req(1, number)])
    left = namespace.segments()
    assert len(left) == 3
    p.kill()
    heir = prompt(1)
    assert not left & namespace.segments()
    heir.call("finalize")
    assert namespace.names() == set()


def test_b7_next_init_keeps_what_the_living_own(scene: Scene, namespace: Namespace,
                                                prompt: StartPeer) -> None:
    victim = prompt(5)
    before = namespace.segments()
    victim.call("allocate", name="kv")
    victim.kill()
    prompt(6)
    assert namespace.segments() == before
    assert scene.pull(req(1, 1)) == SUCCESS
    np.testing.assert_array_equal(scene.d.read("kv")[:, :, 0], WANTED[:, :, 0])


def test_b7_id_of_a_dead_process_is_taken_over(namespace: Namespace, prompt: StartPeer,
                                               decoder: StartPeer) -> None:
    p = prompt(1)
    p.kill()
    heir = prompt(1)
    heir.call("allocate", name="kv", keys=[req(1, 1)])
    heir.call("fill", name="kv", generation=1)
    d = decoder(2)
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], WANTED[:, :, 0])


def test_b7_id_of_a_living_process_is_refused(scene: Scene, namespace: Namespace) -> None:
    second = namespace.start()
    answer = second.attempt("init", role="PROMPT", cluster_id=1, options={}, raw={})
    assert answer.outcome == "LLM_FAILED"
    assert scene.pull(req(1, 1)) == SUCCESS
    np.testing.assert_array_equal(scene.d.read("kv")[:, :, 0], WANTED[:, :, 0])


def test_b17_caches_and_keys_survive_a_change_of_role(prompt: StartPeer, decoder: StartPeer) -> None:
    p = prompt(1, enable_switch_role=True)
    p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2)])
    p.call("fill", name="kv", generation=1)
    p.call("switch_role", role="DECODER")
    p.call("allocate", name="own")
    p.call("pull", key=req(1, 1), name="own")
    np.testing.assert_array_equal(p.read("own")[:, :, 0], WANTED[:, :, 0])
    p.call("switch_role", role="PROMPT", options=LISTEN)
    d = decoder(2)
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 1), name="kv") == NOT_EXIST
    assert d.outcome("pull", key=req(1, 2), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], WANTED[:, :, 1])


def test_b17_change_of_role_with_a_link(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1, enable_switch_role=True), decoder(2, enable_switch_role=True)
    assert d.outcome("switch_role", role="PROMPT", options=LISTEN) == "LLM_EXIST_LINK"
    assert p.outcome("switch_role", role="DECODER") == "LLM_EXIST_LINK"
    p.call("allocate", name="kv", keys=[req(1, 1)])
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
    assert d.call("unlink", ids=[1]) == SUCCESS_OF_ONE
    p.call("switch_role", role="DECODER")
    d.call("switch_role", role="PROMPT", options=LISTEN)
    assert p.call("link", ids=[2]) == SUCCESS_OF_ONE


@pytest.mark.parametrize(("role", "options"), [
    ("DECODER", None), ("PROMPT", None), ("PROMPT", {}), ("PROMPT", {"llm.listenIpInfo": "x"}),
], ids=str)
def test_b17_failed_change_leaves_the_role(scene: Scene, decoder: StartPeer, role: str,
                                           options: dict[str, str] | None) -> None:
    d = decoder(3, enable_switch_role=True)
    d.call("allocate", name="kv")
    assert d.outcome("switch_role", role=role, options=options) != SUCCESS
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
