"""What the owner does while a pull copies, and what the pull says then: the copy is long enough to be met in the middle."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import memory
import numpy as np
import pytest
from memory import INITIATOR, TABLES, Pair, destination, request, select
from peer import Namespace

from shmkv import _attached, _lookup

MIB = 1 << 20
BIG = (4, 1, 1, 8 * MIB)
ROUNDS = 20


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = Pair(namespace.name)
    made.add(np.full(BIG, 7, np.uint8))
    made.owner.directory.bind(made.sources[0].slot, 0, request(0))
    yield made
    made.close()


def during_a_pull(pair: Pair, change: Callable[[], None]) -> tuple[int, int, bool]:
    """(hazard seen in the middle of a pull, what the pull said, was it still copying after the change)."""
    hazard = pair.owner.side(pair.record, INITIATOR, "hazard")
    cache, _ = destination(*BIG)
    said: list[int] = []
    thread = threading.Thread(target=lambda: said.append(memory.pull(pair.handle, cache, request(0), select())))
    thread.start()
    while not (seen := int(hazard.value)) and thread.is_alive():
        pass
    if seen:
        change()
    in_time = bool(hazard.value)
    thread.join()
    return seen, said[0], in_time


def met_in_the_middle(pair: Pair, change: Callable[[], None], undo: Callable[[], None]) -> tuple[int, int]:
    """(hazard, status) of a pull during which `change` came: tried until it did."""
    for _ in range(ROUNDS):
        seen, said, in_time = during_a_pull(pair, change)
        if seen and in_time:
            return seen, said
        undo()
    pytest.fail(f"no pull of {ROUNDS} was met in the middle")


def test_hazard_names_the_cache_while_its_bytes_are_read(pair: Pair) -> None:
    seen, said = met_in_the_middle(pair, lambda: None, lambda: None)
    assert (seen, said) == (pair.sources[0].generation, 0)


def test_cache_that_is_retired_during_a_pull_keeps_its_bytes_for_it(pair: Pair) -> None:
    slot = pair.sources[0].slot
    word = memory.word(pair.owner.region, "CacheRecord", slot, "CacheRecord", "word")
    live = word.value

    def undo() -> None:
        word.value = live

    assert met_in_the_middle(pair, lambda: pair.owner.directory.retire(slot), undo)[1] == 0


def test_key_that_is_removed_during_a_pull_is_not_there(pair: Pair) -> None:
    slot, directory = pair.sources[0].slot, pair.owner.directory
    said = met_in_the_middle(pair, lambda: directory.remove(slot, 0), lambda: directory.bind(slot, 0, request(0)))[1]
    assert said == _lookup.REMOVED


def test_key_that_another_reader_consumes_during_a_pull_is_a_success(pair: Pair) -> None:
    slot, directory = pair.sources[0].slot, pair.owner.directory

    def consume() -> None:
        directory.mark_pulled(slot, 0, directory.row_generation(slot, 0), 0, BIG[0])
        assert directory.settle(slot) == 0

    assert met_in_the_middle(pair, consume, lambda: directory.bind(slot, 0, request(0)))[1] == 0


def test_coverage_of_another_binding_is_left_alone(pair: Pair) -> None:
    width, start = TABLES["coverage line"]
    coverage = memory.content(pair.owner.region, start, width).view(np.uint64)
    other = np.uint64((pair.owner.directory.row_generation(pair.sources[0].slot, 0) + 1) << 32)
    coverage[0] = other
    cache, _ = destination(1, *BIG[1:])
    assert memory.pull(pair.handle, cache, request(0), select(src_count=1, dst_count=1), consumes=True) == 0
    assert coverage[0] == other


@pytest.mark.parametrize("more", [4096, -4096])
def test_recorded_size_that_is_not_the_mapped_one_is_refused(pair: Pair, more: int) -> None:
    cache, _ = destination(*BIG)
    assert memory.pull(pair.handle, cache, request(0), select()) == 0
    memory.word(pair.owner.region, "CacheRecord", pair.sources[0].slot, "CacheRecord", "segment_nbytes").value += more
    status = memory.pull(pair.handle, cache, request(0), select())
    assert "size is not the one recorded" in _attached.describe(status)
