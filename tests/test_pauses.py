"""Pauses between two looks: short at first, then 40 a second at the most, never longer than there is time."""
from __future__ import annotations

import pytest

from shmkv.pauses import LONGEST_S, Pauses


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    asked: list[float] = []
    monkeypatch.setattr("shmkv.pauses.time.sleep", asked.append)
    return asked


def test_pauses_get_longer_up_to_a_limit(slept: list[float]) -> None:
    wait = Pauses()
    for _ in range(20):
        wait.sleep()
    assert slept == sorted(slept)
    assert slept[0] == 0.001
    assert slept[-1] == LONGEST_S == 0.025
    assert slept.count(LONGEST_S) >= 14


def test_a_pause_ends_with_the_time_that_is_left(slept: list[float]) -> None:
    wait = Pauses()
    wait.sleep(0.0001)
    wait.sleep(-1)
    assert slept == [0.0001, 0]
