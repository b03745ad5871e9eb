"""A forward waits for the layer that it has come to, and for no other."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from vllm_ends import DEADLINE_S, Consumer, StartConsumer, StartProducer, wait_until
from vllm_parts import NAMES, hashes, load

BLOCKS, OURS = [5, 6, 7], [3, 9, 0]


class HeldLayer:
    """Pulls of one layer stand until they are let go."""

    def __init__(self, endpoint: Any, layer: int, patch: pytest.MonkeyPatch) -> None:
        self.stands, self.goes_on = threading.Event(), threading.Event()
        pull = endpoint.pull

        def held(wanted: Any, into: Any, number: int) -> None:
            if number == layer:
                self.stands.set()
                assert self.goes_on.wait(DEADLINE_S)
            pull(wanted, into, number)

        patch.setattr(endpoint, "pull", held)


def in_a_thread(what: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=what, args=arguments, daemon=True)
    thread.start()
    return thread


def test_a_layer_is_waited_for_and_those_behind_it_are_not(producer: StartProducer, consumer: StartConsumer,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    p, names = producer(), hashes(len(BLOCKS))
    p.store(names, BLOCKS)
    c = consumer()
    c.wait_for(p.cluster_id)

    def is_there(layer: int) -> bool:
        return np.array_equal(c.layers.arrays[layer][OURS], p.layers.arrays[layer][BLOCKS])

    held = HeldLayer(c.shared.endpoint, 1, monkeypatch)
    try:
        c.worker.start_loads(load(names, OURS))
        first = in_a_thread(c.worker.wait_for_layer, NAMES[0])
        first.join(DEADLINE_S)
        assert not first.is_alive()
        assert is_there(0)                      # while nobody lets layer 1 go on
        assert held.stands.wait(DEADLINE_S)
        second = in_a_thread(c.worker.wait_for_layer, NAMES[1])
        wait_until(lambda: waiters(c) > 0 or not second.is_alive())
        assert second.is_alive()
        assert not is_there(1)
    finally:
        held.goes_on.set()
    second.join(DEADLINE_S)
    assert not second.is_alive()
    assert is_there(1)
    c.worker.wait_for_layer(NAMES[2])
    assert is_there(2)
    assert c.worker.take_failed_blocks() == set()


def waiters(consumer: Consumer) -> int:
    """Threads that wait for the load of this step."""
    job = consumer.worker._job
    assert job is not None
    waiting: Any = job._moved
    return len(waiting._waiters)
