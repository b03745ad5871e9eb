"""The queue of one process's threads before a link's word: whoever leaves it, from wherever, nobody behind or before is lost."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import memory
import pytest
from memory import Pair, destination, request, select
from peer import Namespace
from reference import Geometry, noise

from shmkv import _link

PATIENT_MS = 20000
SHAPE = Geometry(1, 1, 3, 16)
CONTENT = noise(SHAPE, seed=3)
HELD_BY_THE_OTHER, OFFERED_TO_US, WAITERS = 1, 4, 1 << 31


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = memory.pair_with_keys(namespace.name, CONTENT)
    yield made
    made.close()


def pull(pair: Pair, timeout_ms: int = PATIENT_MS) -> int:
    return memory.pull(pair.handle, destination(*SHAPE)[0], request(0), select(), timeout_ms=timeout_ms)


def link_word(pair: Pair) -> Any:
    return memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", "word")


def start(pair: Pair, answers: list[int]) -> threading.Thread:
    """A thread that pulls, counted in already."""
    users = pair.handle.users
    thread = threading.Thread(target=lambda: answers.append(pull(pair)))
    thread.start()
    memory.wait_until(lambda: pair.handle.users == users + 1, "one more thread in a call")
    return thread


def test_last_in_the_queue_gives_up_and_the_one_before_it_keeps_its_place(pair: Pair) -> None:
    link_word(pair).value = HELD_BY_THE_OTHER
    answers: list[int] = []
    threads = [start(pair, answers)]
    memory.wait_until(lambda: bool(link_word(pair).value & WAITERS), "the first thread at the word")
    threads.append(start(pair, answers))
    assert pull(pair, timeout_ms=50) == _link.TIMEOUT
    threads.append(start(pair, answers))
    link_word(pair).value = OFFERED_TO_US
    for thread in threads:
        thread.join()
    assert answers == [0, 0, 0]
    assert (pair.handle.users, link_word(pair).value) == (0, 0)


@pytest.mark.parametrize("round_", range(3))
def test_thread_that_comes_when_the_queue_has_just_run_empty_gets_its_turn(pair: Pair, round_: int) -> None:
    link_word(pair).value = HELD_BY_THE_OTHER
    answers: list[int] = []
    threads = [start(pair, answers)]
    memory.wait_until(lambda: bool(link_word(pair).value & WAITERS), "the first thread at the word")
    threads.append(start(pair, answers))
    # The first thread offers the word to the other side, which does not want it: the second waits for a slice.
    link_word(pair).value = OFFERED_TO_US | WAITERS
    memory.wait_until(lambda: pair.handle.users == 1, "the end of the first call")
    assert pull(pair) == 0
    for thread in threads:
        thread.join()
    assert answers == [0, 0]
