"""What happens when the last reference to something goes."""
from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from shmkv._drop import DropQueue, OnDrop


def test_the_item_is_queued_when_the_object_goes() -> None:
    queue: Any = deque()
    kept = OnDrop(queue, "cache 7")
    assert not queue
    del kept
    assert queue == deque(["cache 7"])


def test_nothing_is_queued_of_one_that_was_disarmed() -> None:
    queue: Any = deque()
    kept = OnDrop(queue, "cache 7")
    kept.disarm()
    del kept
    assert not queue


def test_only_queues_that_cannot_fail_are_taken() -> None:
    with pytest.raises(TypeError, match="must be a deque or a DropQueue"):
        OnDrop([], "cache 7")
    with pytest.raises(TypeError, match=r"memory_freed of .* cannot be called"):
        DropQueue(object())
