"""The worker's side, between processes: blocks of a producer come byte for byte, or it is known that they did not."""
from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer import Namespace
from vllm_parts import BLOCK_NBYTES, IDENTITY, NAMES, hashes, load, places, random_layers, run_step, store

from shmkv import LLMException, LLMParamError
from shmkv.cli.ls import look
from shmkv.integrations.vllm.block_keys import cache_key, key_words
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.plans import StepPlan, Store
from shmkv.integrations.vllm.publisher import ROWS_OF_A_CACHE, most_blocks
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import Shared, open_shared
from shmkv.integrations.vllm.taint import Taint
from shmkv.integrations.vllm.worker import WorkerSide

PROGRAM = Path(__file__).with_name("vllm_producer.py")
DEADLINE_S = 20.0
ROW = BLOCK_NBYTES * len(NAMES)
HEADER = 4096                                   # of a segment
Producer = Callable[..., "ProducerProcess"]


class ProducerProcess:
    """vllm_producer.py in a process of its own; its blocks are `layers`."""

    def __init__(self, namespace: Namespace, settings: dict[str, Any], identity: dict[str, Any], seed: int) -> None:
        self.layers = random_layers(16, np.random.default_rng(seed))
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), json.dumps([settings, identity, seed])],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=namespace.environment({}))
        self.cluster_id: int = self._answer()

    def call(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def store(self, block_hashes: list[bytes], block_ids: list[int]) -> None:
        self.call("store", [each.hex() for each in block_hashes], block_ids)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate("", timeout=DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


class Consumer:
    """A worker's side in this process."""

    def __init__(self, settings: dict[str, Any], rng: np.random.Generator, *, produces: bool = False) -> None:
        self.shared = open_shared(ConnectorSettings.of({"look_ms": 20, **settings}), IDENTITY, consumes=True, produces=produces)
        self.layers = random_layers(16, rng)
        self.worker = WorkerSide(self.shared, self.layers, IDENTITY, 0, consumes=True, produces=produces)

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.shared.counters.take().items() if not name.endswith("_ns")}

    def has(self, source: Layers, theirs: list[int], ours: list[int]) -> bool:
        return all(np.array_equal(mine[ours], other[theirs])
                   for mine, other in zip(self.layers.arrays, source.arrays, strict=True))

    def wait_for(self, cluster_id: int) -> None:
        wait_until(lambda: cluster_id in self.shared.peers.usable)

    def close(self) -> None:
        self.worker.close()
        self.shared.close()


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def producer(namespace: Namespace) -> Iterator[Producer]:
    """producer(settings, identity, seed): a process."""
    made: list[ProducerProcess] = []

    def start(settings: dict[str, Any] | None = None, identity: dict[str, Any] | None = None, seed: int = 1) -> ProducerProcess:
        made.append(ProducerProcess(namespace, settings or {}, identity or {}, seed))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.close()


@pytest.fixture
def consumer(namespace: Namespace, rng: np.random.Generator) -> Iterator[Callable[..., Consumer]]:
    """consumer(settings, produces): in this process, one at a time."""
    made: list[Consumer] = []

    def start(settings: dict[str, Any] | None = None, *, produces: bool = False) -> Consumer:
        made.append(Consumer(settings or {}, rng, produces=produces))
        return made[-1]

    yield start
    for each in made:
        each.close()


def found(shared: Shared, block_hash: bytes) -> bool:
    return shared.peers.find(key_words(block_hash, 0)) is not None


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_come_byte_for_byte(producer: Producer, consumer: Callable[..., Consumer], is_async: bool) -> None:
    p, names = producer(), hashes(12)
    p.store(names, list(range(3, 15)))
    c = consumer()
    c.wait_for(p.cluster_id)
    assert all(found(c.shared, name) for name in names)
    before = [array.copy() for array in c.layers.arrays]
    ours = [9, 0, 15, 4, 1, 2, 3, 14, 13, 12, 11, 10]
    run_step(c.worker, load(names, ours, is_async=is_async))
    finished: set[str] = set()
    wait_until(lambda: not is_async or bool(finished.update(c.worker.take_finished()) or finished))
    assert finished == ({"l"} if is_async else set())
    assert c.has(p.layers, list(range(3, 15)), ours)
    rest = [block for block in range(16) if block not in ours]
    assert all(np.array_equal(array[rest], old[rest]) for array, old in zip(c.layers.arrays, before, strict=True))
    assert c.worker.take_failed_blocks() == set()
    assert c.counts() == {"loaded_blocks": 12, "loaded_bytes": 12 * ROW}
    assert p.call("state")["published_blocks"] == 12


def test_a_producer_that_comes_later_is_found(producer: Producer, consumer: Callable[..., Consumer]) -> None:
    c, names = consumer(), hashes(1)
    assert not found(c.shared, names[0])
    p = producer()
    p.store(names, [5])
    c.wait_for(p.cluster_id)
    run_step(c.worker, load(names, [0]))
    assert c.has(p.layers, [5], [0])


def test_blocks_of_several_producers_in_one_load(producer: Producer, consumer: Callable[..., Consumer]) -> None:
    one, other, names = producer(seed=1), producer(seed=2), hashes(4)
    one.store(names[:2], [1, 2])
    other.store(names[2:], [3, 4])
    c = consumer()
    wait_until(lambda: len(c.shared.peers.usable) == 3)
    run_step(c.worker, load(names, [0, 1, 2, 3]))
    assert c.has(one.layers, [1, 2], [0, 1])
    assert c.has(other.layers, [3, 4], [2, 3])


@pytest.mark.parametrize("identity", [{"block_size": 8}, {"num_layers": 4}, {"cache_dtype": "float16"}, {"model": "other"}])
def test_a_producer_of_another_kind_is_refused_with_both_named(producer: Producer, consumer: Callable[..., Consumer],
                                                               identity: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    p, names = producer(identity=identity), hashes(1)
    p.store(names, [5])
    c = consumer()
    wait_until(lambda: "are not used" in caplog.text)
    (name, value), = identity.items()
    assert f"{name}: {value!r} instead of {getattr(IDENTITY, name)!r}" in caplog.text
    assert c.counts() == {"refused_peers": 1}
    assert not found(c.shared, names[0])
    for _ in range(5):
        c.shared.peers.look()
    assert c.counts() == {}                     # told once


def test_a_member_that_is_no_producer_is_left_alone(prompt: Callable[..., Any], consumer: Callable[..., Consumer]) -> None:
    prompt(1)
    c = consumer()
    for _ in range(3):
        c.shared.peers.look()
    assert c.shared.peers.usable == (c.shared.endpoint.cluster_id,)
    assert c.counts() == {}


def test_a_block_that_went_meanwhile_is_told_and_computed(producer: Producer, consumer: Callable[..., Consumer]) -> None:
    p, names = producer(), hashes(3)
    p.store(names, [5, 6, 7])
    c = consumer()
    c.wait_for(p.cluster_id)
    p.call("forget")
    c.wait_for(p.cluster_id)                    # the card is there again
    run_step(c.worker, load(names, [0, 1, 2]))
    assert c.worker.take_failed_blocks() == {0, 1, 2}
    assert c.worker.take_failed_blocks() == set()
    assert c.counts() == {"failed_blocks": 3}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_producer_that_is_killed_is_told_and_forgotten(producer: Producer, consumer: Callable[..., Consumer],
                                                         namespace: Namespace, is_async: bool) -> None:
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c = consumer({"look_ms": 60_000})
    c.wait_for(p.cluster_id)
    p.kill()
    wait_until(lambda: not c.shared.endpoint.is_usable(p.cluster_id))
    run_step(c.worker, load(names, [3, 4], is_async=is_async))
    finished: set[str] = set()
    wait_until(lambda: not is_async or bool(finished.update(c.worker.take_finished()) or finished))
    assert c.worker.take_failed_blocks() == {3, 4}
    c.shared.peers.look()
    assert p.cluster_id not in c.shared.peers.usable
    # One that comes in its place, with the same blocks, is as good.
    again = producer(seed=3)
    again.store(names, [1, 2])
    c.shared.peers.look()
    run_step(c.worker, load(names, [3, 4]))
    assert c.has(again.layers, [1, 2], [3, 4])
    namespace.somebody_died = True


def test_a_load_has_a_deadline_of_its_own(producer: Producer, consumer: Callable[..., Consumer],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c = consumer({"timeout_ms": 50})
    c.wait_for(p.cluster_id)
    pull = c.shared.endpoint.pull

    def slow(wanted: Any, into: Any, layer: int) -> None:
        time.sleep(0.06)
        pull(wanted, into, layer)

    monkeypatch.setattr(c.shared.endpoint, "pull", slow)
    run_step(c.worker, load(names, [3, 4]))
    assert c.worker.take_failed_blocks() == {3, 4}


def test_whatever_goes_wrong_in_a_load_ends_it(producer: Producer, consumer: Callable[..., Consumer],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    p, names = producer(), hashes(1)
    p.store(names, [5])
    c = consumer()
    c.wait_for(p.cluster_id)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(c.shared.endpoint, "pull", broken)
        run_step(c.worker, load(names, [3]))
    assert c.worker.take_failed_blocks() == {3}
    run_step(c.worker, load(names, [3]))        # and the next one goes
    assert c.worker.take_failed_blocks() == set()
    assert c.has(p.layers, [5], [3])


# -- publishing -------------------------------------------------------------------------------------------------------

def test_nobody_gets_in_before_the_step_is_over(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer(produces=True), hashes(2)
    plan = store(names, [4, 5])
    for name in NAMES:
        c.worker.save_layer(plan, name)
        assert not found(c.shared, names[0])
    c.worker.end_step(plan)
    assert all(found(c.shared, name) for name in names)
    run_step(c.worker, load(names, [0, 1]))     # out of the own cluster
    assert c.has(c.layers, [4, 5], [0, 1])


def test_a_step_that_ends_too_early_publishes_nothing(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer(produces=True), hashes(1)
    plan = store(names, [4])
    c.worker.save_layer(plan, NAMES[0])
    c.worker.end_step(plan)
    assert not found(c.shared, names[0])
    assert c.counts() == {"dropped_blocks": 1}
    assert c.shared.endpoint.manager.stats()["caches"] == 1     # the card
    run_step(c.worker, store(names, [4]))
    assert found(c.shared, names[0])


def test_what_is_there_is_not_published_twice(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer(produces=True), hashes(3)
    run_step(c.worker, store(names[:2], [4, 5]))
    run_step(c.worker, store([*names, names[2]], [4, 5, 6, 7]))
    assert c.counts() == {"published_blocks": 3, "published_bytes": 3 * ROW}


@pytest.mark.parametrize("blocks", [0, 1, ROWS_OF_A_CACHE, ROWS_OF_A_CACHE + 1, 15])
def test_as_many_blocks_as_the_capacity_has_room_for_stay(consumer: Callable[..., Consumer], blocks: int) -> None:
    capacity = -(-blocks // ROWS_OF_A_CACHE) * HEADER + blocks * ROW
    assert most_blocks(capacity, BLOCK_NBYTES, len(NAMES)) == blocks
    assert most_blocks(max(0, capacity - 1), BLOCK_NBYTES, len(NAMES)) == max(0, blocks - 1)
    c, names = consumer({"capacity_bytes": capacity}, produces=True), hashes(16)
    run_step(c.worker, store(names[:blocks], list(range(blocks))))
    assert [found(c.shared, name) for name in names] == [True] * blocks + [False] * (16 - blocks)


def test_the_least_recently_used_go_first(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer({"capacity_bytes": 3 * (HEADER + ROW)}, produces=True), hashes(4)
    for place in range(3):
        run_step(c.worker, store([names[place]], [place]))
    run_step(c.worker, load([names[0]], [9]))
    run_step(c.worker, store([names[3]], [3]))
    assert [found(c.shared, name) for name in names] == [True, False, True, True]


def test_without_memory_nothing_is_published_and_nothing_else_happens(consumer: Callable[..., Consumer],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    c, names = consumer(produces=True), hashes(1)
    manager = c.shared.endpoint.manager

    def full(*_: object, **__: object) -> None:
        raise LLMException("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(manager, "allocate_cache", full)
        run_step(c.worker, store(names, [4]))
    assert c.counts() == {"dropped_blocks": 1}
    assert not found(c.shared, names[0])


def test_keys_go_when_their_time_is_over(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer({"key_ttl_ms": 300}, produces=True), hashes(2)
    run_step(c.worker, store(names, [4, 5]))
    wait_until(lambda: c.shared.endpoint.manager.stats()["caches"] == 1)        # the thread collects, too
    assert not found(c.shared, names[0])


def test_forgetting_keeps_the_card(producer: Producer, consumer: Callable[..., Consumer]) -> None:
    p, names = producer(), hashes(1)
    p.store(names, [5])
    p.call("forget")
    assert p.call("state")["keys"] == 1
    c = consumer()
    c.wait_for(p.cluster_id)
    assert not found(c.shared, names[0])


def test_what_was_computed_from_a_failed_load_is_not_published(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer(produces=True), hashes(3)
    garbage = StepPlan(load(names[:1], [4]).loads, (Store("r", places(names[1:2], [5]), (4,), (5,)),))
    run_step(c.worker, garbage)
    assert c.worker.take_failed_blocks() == {4}
    assert not found(c.shared, names[1])
    # A step that was under way already relies on both.
    run_step(c.worker, StepPlan(stores=(Store("r", places(names[2:], [6]), (4, 5), (6,)),)))
    assert not found(c.shared, names[2])
    # Then they are computed.
    run_step(c.worker, StepPlan(stores=(Store("r", places(names, [4, 5, 6]), (), (4, 5, 6)),)))
    assert all(found(c.shared, name) for name in names)


def test_taint_spreads_and_ends() -> None:
    taint = Taint()

    def spoils(relied_on: tuple[int, ...], computed: tuple[int, ...]) -> bool:
        return taint.spoils(Store("r", (), relied_on, computed))

    taint.failed([1])
    assert not spoils((2,), (3,))
    assert spoils((1, 2), (4,))
    assert spoils((4,), (5,))
    assert not spoils((2,), (1, 4))
    assert not spoils((1, 4), (6,))
    assert spoils((5,), (7,))
    taint.loaded([5, 7])
    assert not spoils((5, 7), (8,))


# -- shapes and lives ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("tensors", "said"), [
    ({}, "no layers"),
    ({"a": np.zeros((4, 8), np.uint8), "b": np.zeros((4, 9), np.uint8)}, "layer 'b'"),
    ({"a": np.zeros((4, 8), np.uint16)}, "uint16"),
    ({"a": np.zeros((4, 8, 2), np.uint8)}, "layer 'a'"),
    ({"a": np.zeros((4, 16), np.uint8)[:, ::2]}, "not lie in one piece"),
])
def test_tensors_that_cannot_be_moved_are_refused(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(LLMParamError, match=said):
        Layers(tensors)


def test_two_sides_of_a_process_share_a_cluster_until_the_last_one_ends(namespace: Namespace) -> None:
    settings = ConnectorSettings()
    one, other = (open_shared(settings, IDENTITY, consumes=True, produces=False) for _ in range(2))
    assert one is other
    with pytest.raises(LLMException, match="has a connector already"):
        open_shared(settings, IDENTITY, consumes=True, produces=True)
    one.close()
    assert len(look(namespace.name).clusters) == 1
    other.close()
    assert look(namespace.name).clusters == []
    again = open_shared(settings, IDENTITY, consumes=False, produces=True)
    again.close()


IN_A_CHILD = """
import multiprocessing, sys
from vllm_parts import IDENTITY
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import open_shared

def engine():
    open_shared(ConnectorSettings(), IDENTITY, consumes=True, produces=True)
    sys.exit(0)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=engine)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_process_of_multiprocessing_that_ends_leaves_nothing(namespace: Namespace, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_A_CHILD)
    environment = namespace.environment({"PYTHONPATH": str(PROGRAM.parent)})
    done = subprocess.run([sys.executable, str(program)], env=environment, timeout=DEADLINE_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert namespace.names() == set()


def test_a_namespace_that_cannot_be_is_said_at_once(namespace: Namespace) -> None:
    with pytest.raises(LLMParamError, match=r"shmkv\.Namespace must be"):
        open_shared(ConnectorSettings(namespace="a b"), IDENTITY, consumes=True, produces=False)


def test_leaving_leaves_no_lease_and_no_link(producer: Producer, consumer: Callable[..., Consumer], namespace: Namespace) -> None:
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c = consumer()
    c.wait_for(p.cluster_id)
    run_step(c.worker, load(names, [0, 1]))
    c.close()
    (cluster,) = look(namespace.name).clusters
    assert [link["state"] for link in cluster.links] in ([], ["removed"], ["free"])
    assert sum(link[side]["leases"] for link in cluster.links for side in ("initiator", "acceptor")) == 0


def test_keys_are_those_that_others_can_pull_by(consumer: Callable[..., Consumer]) -> None:
    c, names = consumer(produces=True), hashes(1)
    run_step(c.worker, store(names, [4]))
    key = cache_key(c.shared.endpoint.cluster_id, key_words(names[0], 0))
    assert c.shared.endpoint.manager.contains(key)
