"""The worker's side, between processes: blocks of a producer come byte for byte, or it is known that they did not."""
from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from peer import Namespace
from vllm_ends import DEADLINE_S, ROW, StartConsumer, StartProducer, finished_of, found, wait_until
from vllm_parts import GROUP, IDENTITY, hashes, load, random_layers, run_step

from shmkv.integrations.vllm import loader
from shmkv.integrations.vllm.block_keys import key_words
from shmkv.integrations.vllm.plans import StepPlan
from shmkv.integrations.vllm.worker import WorkerSide


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_come_byte_for_byte(producer: StartProducer, consumer: StartConsumer, is_async: bool) -> None:
    p, names = producer(), hashes(12)
    p.store(names, list(range(3, 15)))
    c = consumer()
    c.wait_for(p.cluster_id)
    assert all(found(c.shared, name) for name in names)
    before = [array.copy() for array in c.layers.arrays]
    ours = [9, 0, 15, 4, 1, 2, 3, 14, 13, 12, 11, 10]
    run_step(c.worker, load(names, ours, is_async=is_async))
    assert finished_of(c.worker, is_async) == ({"l"} if is_async else set())
    assert c.has(p.layers, list(range(3, 15)), ours)
    rest = [block for block in range(16) if block not in ours]
    assert all(np.array_equal(array[rest], old[rest]) for array, old in zip(c.layers.arrays, before, strict=True))
    assert c.worker.take_failed_blocks() == set()
    assert c.counts() == {"loaded_blocks": 12, "loaded_bytes": 12 * ROW}
    assert p.call("state")["published_blocks"] == 12


def test_a_producer_that_comes_later_is_found(producer: StartProducer, consumer: StartConsumer) -> None:
    c, names = consumer(), hashes(1)
    assert not found(c.shared, names[0])
    p = producer()
    p.store(names, [5])
    c.wait_for(p.cluster_id)
    run_step(c.worker, load(names, [0]))
    assert c.has(p.layers, [5], [0])


def test_blocks_of_several_producers_in_one_load(producer: StartProducer, consumer: StartConsumer) -> None:
    one, other, names = producer(seed=1), producer(seed=2), hashes(4)
    one.store(names[:2], [1, 2])
    other.store(names[2:], [3, 4])
    c = consumer()
    wait_until(lambda: len(c.shared.peers.usable) == 3)
    run_step(c.worker, load(names, [0, 1, 2, 3]))
    assert c.has(one.layers, [1, 2], [0, 1])
    assert c.has(other.layers, [3, 4], [2, 3])


@pytest.mark.parametrize("produces", [False, True])
def test_a_block_is_looked_for_first_where_the_last_one_was(producer: StartProducer, consumer: StartConsumer,
                                                            monkeypatch: pytest.MonkeyPatch, namespace: Namespace,
                                                            produces: bool) -> None:
    one, other, names = producer(seed=1), producer(seed=2), hashes(4)
    one.store(names[:1], [1])
    other.store(names[1:3], [3, 4])
    c = consumer(produces=produces)
    wait_until(lambda: len(c.shared.peers.usable) == 3)
    asked: list[tuple[int, ...]] = []
    holder = c.shared.endpoint.holder

    def noting(words: tuple[int, int], cluster_ids: tuple[int, ...]) -> int | None:
        asked.append(cluster_ids)
        return holder(words, cluster_ids)

    monkeypatch.setattr(c.shared.endpoint, "holder", noting)
    clusters = [one.cluster_id, other.cluster_id, other.cluster_id, None, one.cluster_id]
    for name, cluster_id in zip([*names, names[0]], clusters, strict=True):
        assert c.shared.peers.find(key_words(name, 0, 0)) == cluster_id
    everybody = {one.cluster_id, other.cluster_id} | ({c.shared.endpoint.cluster_id} if produces else set())
    assert all(set(each) == everybody and len(each) == len(everybody) for each in asked)
    assert [each[0] for each in asked[1:]] == [one.cluster_id] + [other.cluster_id] * 3
    # One that died has nothing, and the next one is asked.
    one.store(names[3:], [2])
    other.store(names[3:], [5])
    other.kill()
    assert c.shared.peers.find(key_words(names[3], 0, 0)) == one.cluster_id
    assert c.shared.peers.find(key_words(names[1], 0, 0)) is None
    namespace.somebody_died = True


def test_each_rank_publishes_and_pulls_its_own_part_of_a_block(producer: StartProducer, consumer: StartConsumer,
                                                               rng: np.random.Generator) -> None:
    one, other, names = producer(seed=1), producer(seed=2, shard=1), hashes(2)
    one.store(names, [5, 6])
    other.store(names[:1], [7])
    c, layers = consumer(), random_layers(16, rng)
    second = WorkerSide(c.shared, [layers], IDENTITY, 1, consumes=True, produces=False)
    wait_until(lambda: len(c.shared.peers.usable) == 3)
    for worker in (c.worker, second):
        run_step(worker, load(names[:1], [9]))
    assert c.has(one.layers, [5], [9])
    assert all(np.array_equal(mine[9], theirs[7]) for mine, theirs in zip(layers.arrays, other.layers.arrays, strict=True))
    run_step(second, load(names[1:], [10]))             # its rank has published one block only
    assert (c.worker.take_failed_blocks(), second.take_failed_blocks()) == (set(), {10})
    second.close()


@pytest.mark.parametrize("identity", [{"block_size": 8}, {"num_layers": 4}, {"cache_dtype": "float16"}, {"model": "other"},
                                      {"layout": "NHD"}, {"window": 8}])
def test_a_producer_of_another_kind_is_refused_with_both_named(producer: StartProducer, consumer: StartConsumer,
                                                               identity: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    p, names = producer(identity=identity), hashes(1)
    p.store(names, [5])
    c = consumer()
    wait_until(lambda: "are not used" in caplog.text)
    (name, value), = identity.items()
    own = getattr(IDENTITY, name) if hasattr(IDENTITY, name) else getattr(GROUP, name)
    assert re.search(rf"{name}( of group 0)?: {value!r} instead of {own!r}", caplog.text)
    assert c.counts() == {"refused_peers": 1}
    assert not found(c.shared, names[0])
    for _ in range(5):
        c.shared.peers.look()
    assert c.counts() == {}                     # told once


def test_a_member_that_is_no_producer_is_left_alone(prompt: Callable[..., Any], consumer: StartConsumer) -> None:
    prompt(1)
    c = consumer()
    for _ in range(3):
        c.shared.peers.look()
    assert c.shared.peers.usable == (c.shared.endpoint.cluster_id,)
    assert c.counts() == {}


def test_a_block_that_went_meanwhile_is_told_and_computed(producer: StartProducer, consumer: StartConsumer) -> None:
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
def test_a_producer_that_is_killed_is_told_and_forgotten(producer: StartProducer, consumer: StartConsumer,
                                                         namespace: Namespace, is_async: bool) -> None:
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c = consumer({"look_ms": 60_000})
    c.wait_for(p.cluster_id)
    p.kill()
    wait_until(lambda: not c.shared.endpoint.is_usable(p.cluster_id))
    run_step(c.worker, load(names, [3, 4], is_async=is_async))
    finished_of(c.worker, is_async)
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


def test_a_load_has_a_deadline_of_its_own(producer: StartProducer, consumer: StartConsumer,
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


@dataclass
class HeldLoad:
    """The first pull stands until it is let go; time is what the test says."""

    now: float = 0.0
    pulled: list[int] = field(default_factory=list)
    stands: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def install(self, endpoint: Any, patch: pytest.MonkeyPatch) -> None:
        pull = endpoint.pull

        def held(wanted: Any, into: Any, layer: int) -> None:
            self.pulled += [piece.row for piece in wanted]
            self.stands.set()
            assert self.goes_on.wait(DEADLINE_S)
            pull(wanted, into, layer)

        patch.setattr(endpoint, "pull", held)
        patch.setattr(loader, "time", SimpleNamespace(monotonic=lambda: self.now, perf_counter_ns=time.perf_counter_ns))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_time_of_a_load_beside_the_batch_begins_with_its_turn(producer: StartProducer, consumer: StartConsumer,
                                                                  monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """However long those before it take. That of a load which a step waits for begins when it is asked for."""
    p, names = producer(), hashes(3)
    p.store(names, [5, 6, 7])
    c, first = consumer({"timeout_ms": 2000}), HeldLoad()
    c.wait_for(p.cluster_id)
    first.install(c.shared.endpoint, monkeypatch)
    c.worker.start_loads(load(names[:1], [3], is_async=True, request_id="first"))
    assert first.stands.wait(DEADLINE_S)
    loading = c.worker._beside_steps
    assert loading is not None
    jobs = [loading.begin(load([name], [row], is_async=is_async).loads) for name, row in zip(names[1:], (4, 5), strict=True)]
    first.now = 2.5
    first.goes_on.set()
    for job in jobs:
        job.wait()
    assert finished_of(c.worker) == {"first"}
    assert c.worker.take_failed_blocks() == {3}
    assert [bool(job.failed) for job in jobs] == [not is_async] * 2
    assert c.has(p.layers, [6, 7], [4, 5]) == is_async


@pytest.mark.parametrize("produces", [False, True])
def test_a_load_that_is_under_way_when_all_is_forgotten_has_failed(producer: StartProducer, consumer: StartConsumer,
                                                                   monkeypatch: pytest.MonkeyPatch, produces: bool) -> None:
    """Its blocks were published before; those of the next load are not."""
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c, first = consumer(produces=produces), HeldLoad()
    c.wait_for(p.cluster_id)
    first.install(c.shared.endpoint, monkeypatch)
    c.worker.start_loads(load(names[:1], [3], is_async=True, request_id="first"))
    assert first.stands.wait(DEADLINE_S)
    run_step(c.worker, StepPlan(forget=True))
    first.goes_on.set()
    assert finished_of(c.worker) == {"first"}
    assert c.worker.take_failed_blocks() == {3}
    run_step(c.worker, load(names, [3, 4], is_async=True, request_id="second"))
    assert finished_of(c.worker) == {"second"}
    assert c.worker.take_failed_blocks() == set()
    assert c.has(p.layers, [5, 6], [3, 4])


def test_an_engine_that_ends_waits_for_the_load_under_way_alone(producer: StartProducer, consumer: StartConsumer,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c, first = consumer(), HeldLoad()
    c.wait_for(p.cluster_id)
    first.install(c.shared.endpoint, monkeypatch)
    for name, row in zip(names, (3, 4), strict=True):
        c.worker.start_loads(load([name], [row], is_async=True, request_id=str(row)))
    assert first.stands.wait(DEADLINE_S)
    loading = c.worker._beside_steps
    assert loading is not None
    closing = threading.Thread(target=c.worker.close)
    closing.start()
    assert loading._closing.wait(DEADLINE_S)
    first.goes_on.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert set(first.pulled) == {3}
    assert c.has(p.layers, [5], [3])
    assert c.worker.take_finished() == {"3", "4"}
    assert c.worker.take_failed_blocks() == {4}


def test_whatever_goes_wrong_in_a_load_ends_it(producer: StartProducer, consumer: StartConsumer,
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
