"""One sleep for several waits."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from memory import Owner

from shmkv import _link
from shmkv._wait import EventWait
from shmkv._wait_any import sleep_any

LONG_S = 20


@pytest.fixture
def waits() -> Iterator[list[EventWait]]:
    """Counted in on two words of one directory, with their words seen."""
    owner = Owner()
    made = [EventWait(owner.region) for _ in range(2)]
    made[0].count_in_for_memory()
    made[1].count_in_for_keys()
    for each in made:
        each.see()
    yield made
    for each in made:
        each.count_out()
    owner.close()


def deadline_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_the_deadline_ends_it(waits: list[EventWait]) -> None:
    until = deadline_ns(0.05)
    while sleep_any(waits, until, True) != _link.TIMEOUT:
        assert time.monotonic_ns() < until + LONG_S * 10**9
    assert time.monotonic_ns() >= until


@pytest.mark.parametrize("place", [0, 1])
def test_news_of_any_of_them_end_it(waits: list[EventWait], place: int) -> None:
    began = time.monotonic()
    waker = threading.Thread(target=waits[place].wake)
    waker.start()
    while not waits[place].has_news:
        assert sleep_any(waits, deadline_ns(LONG_S), True) == 0
    waker.join()
    assert time.monotonic() - began < LONG_S / 2


def test_one_that_is_not_counted_in_any_more_has_news(waits: list[EventWait]) -> None:
    """Nobody would wake it."""
    waits[1].count_out()
    began = time.monotonic()
    assert sleep_any(waits, deadline_ns(LONG_S), True) == 0
    assert time.monotonic() - began < LONG_S / 2
    assert waits[1].has_news
