"""Which blocks of a step others may read, from when, and for how long."""
from __future__ import annotations

import numpy as np
import pytest
from vllm_ends import HEADER, ROW, StartConsumer, StartProducer, found, wait_until
from vllm_parts import GROUP, NAMES, hashes, load, places, random_layers, run_step, store

from shmkv import LLMException
from shmkv.integrations.vllm.block_keys import cache_key, key_words
from shmkv.integrations.vllm.endpoint import Piece
from shmkv.integrations.vllm.plans import StepPlan, Store
from shmkv.integrations.vllm.publisher import ROWS_OF_A_CACHE, most_blocks
from shmkv.integrations.vllm.taint import Taint


def test_nobody_gets_in_before_the_step_is_over(consumer: StartConsumer) -> None:
    c, names = consumer(produces=True), hashes(2)
    plan = store(names, [4, 5])
    for name in NAMES:
        c.worker.save_layer(plan, name)
        assert not found(c.shared, names[0])
    c.worker.end_step(plan)
    assert all(found(c.shared, name) for name in names)
    run_step(c.worker, load(names, [0, 1]))     # out of the own cluster
    assert c.has(c.layers, [4, 5], [0, 1])


def test_each_layer_can_be_pulled_as_soon_as_the_forward_has_it(consumer: StartConsumer, rng: np.random.Generator) -> None:
    c, names = consumer(produces=True), hashes(1)
    endpoint, plan, there = c.shared.endpoint, store(names, [4]), random_layers(1, rng)
    piece = Piece(cache_key(endpoint.cluster_id, key_words(names[0], 0, 0)), 0)
    into = endpoint.manager.register_cache(there.desc(1), there.arrays)
    for layer, name in enumerate(NAMES[:-1]):
        with pytest.raises(LLMException, match="published"):
            endpoint.pull([piece], into, layer)
        c.worker.save_layer(plan, name)
        endpoint.pull([piece], into, layer)
        assert np.array_equal(there.arrays[layer][0], c.layers.arrays[layer][4])
    c.worker.save_layer(plan, NAMES[-1])
    c.worker.end_step(plan)


def test_a_step_that_ends_too_early_publishes_nothing(consumer: StartConsumer) -> None:
    c, names = consumer(produces=True), hashes(1)
    plan = store(names, [4])
    c.worker.save_layer(plan, NAMES[0])
    c.worker.end_step(plan)
    assert not found(c.shared, names[0])
    assert c.counts() == {"dropped_blocks": 1}
    assert c.shared.endpoint.manager.stats()["caches"] == 1     # the card
    run_step(c.worker, store(names, [4]))
    assert found(c.shared, names[0])


def test_what_is_there_is_not_published_twice(consumer: StartConsumer) -> None:
    c, names = consumer(produces=True), hashes(3)
    run_step(c.worker, store(names[:2], [4, 5]))
    run_step(c.worker, store([*names, names[2]], [4, 5, 6, 7]))
    assert c.counts() == {"published_blocks": 3, "published_bytes": 3 * ROW}


@pytest.mark.parametrize("blocks", [0, 1, ROWS_OF_A_CACHE, ROWS_OF_A_CACHE + 1, 15])
def test_as_many_blocks_as_the_capacity_has_room_for_stay(consumer: StartConsumer, blocks: int) -> None:
    capacity = -(-blocks // ROWS_OF_A_CACHE) * HEADER + blocks * ROW
    assert most_blocks(capacity, [GROUP]) == blocks
    assert most_blocks(max(0, capacity - 1), [GROUP]) == max(0, blocks - 1)
    c, names = consumer({"capacity_bytes": capacity}, produces=True), hashes(16)
    run_step(c.worker, store(names[:blocks], list(range(blocks))))
    assert [found(c.shared, name) for name in names] == [True] * blocks + [False] * (16 - blocks)


def test_the_least_recently_used_go_first(consumer: StartConsumer) -> None:
    c, names = consumer({"capacity_bytes": 3 * (HEADER + ROW)}, produces=True), hashes(4)
    for place in range(3):
        run_step(c.worker, store([names[place]], [place]))
    run_step(c.worker, load([names[0]], [9]))
    run_step(c.worker, store([names[3]], [3]))
    assert [found(c.shared, name) for name in names] == [True, False, True, True]


def test_without_memory_nothing_is_published_and_nothing_else_happens(consumer: StartConsumer,
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


def test_keys_go_when_their_time_is_over(consumer: StartConsumer) -> None:
    c, names = consumer({"key_ttl_ms": 300}, produces=True), hashes(2)
    run_step(c.worker, store(names, [4, 5]))
    wait_until(lambda: c.shared.endpoint.manager.stats()["caches"] == 1)        # the thread collects, too
    assert not found(c.shared, names[0])


def test_forgetting_keeps_the_card(producer: StartProducer, consumer: StartConsumer) -> None:
    p, names = producer(), hashes(1)
    p.store(names, [5])
    p.call("forget")
    assert p.call("state")["keys"] == 1
    c = consumer()
    c.wait_for(p.cluster_id)
    assert not found(c.shared, names[0])


def test_a_step_that_forgets_does_so_before_it_loads(consumer: StartConsumer) -> None:
    """The bytes that were published before are of other weights: neither they nor a part of them may come."""
    c, names = consumer(produces=True), hashes(2)
    run_step(c.worker, store(names, [4, 5]))
    for array in c.layers.arrays:
        array ^= 0xFF                           # computed anew
    before = [array.copy() for array in c.layers.arrays]
    plan = StepPlan(load(names, [0, 1]).loads, store(names, [4, 5]).stores, forget=True)
    c.worker.start_loads(plan)
    assert c.worker._job is not None
    c.worker._job.wait()                        # it had all the time that it wants
    run_step(c.worker, plan)
    assert c.worker.take_failed_blocks() == {0, 1}
    assert all(np.array_equal(array, old) for array, old in zip(c.layers.arrays, before, strict=True))
    run_step(c.worker, load(names, [0, 1]))
    assert c.has(c.layers, [4, 5], [0, 1])


def test_a_step_forgets_once_wherever_its_loads_begin(consumer: StartConsumer) -> None:
    """Loads beside the batch are begun when the forward is over, and its blocks are there then."""
    c, names = consumer(produces=True), hashes(3)
    run_step(c.worker, store(names[:1], [4]))
    for _ in range(2):
        plan = StepPlan(stores=store(names[1:], [5, 6]).stores, forget=True)
        for name in NAMES:
            c.worker.save_layer(plan, name)
        c.worker.start_loads(plan)
        c.worker.end_step(plan)
        assert [found(c.shared, name) for name in names] == [False, True, True]


def test_what_was_computed_from_a_failed_load_is_not_published(consumer: StartConsumer) -> None:
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


def test_keys_are_those_that_others_can_pull_by(consumer: StartConsumer) -> None:
    c, names = consumer(produces=True), hashes(1)
    run_step(c.worker, store(names, [4]))
    key = cache_key(c.shared.endpoint.cluster_id, key_words(names[0], 0, 0))
    assert c.shared.endpoint.manager.contains(key)
