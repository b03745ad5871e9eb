"""Tables that grow in place: what a failed growth leaves."""
from __future__ import annotations

import errno

import memory
import pytest

from shmkv import _layout
from shmkv._tables import Tables


def test_failed_growth_leaves_no_record_without_pages() -> None:
    full = False

    def reserve(offset: int, nbytes: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space left")

    tables = Tables(memory.anonymous(_layout.DIRECTORY_SIZE), reserve)
    slots = [tables.take((1, 1, 1, 1))[0] for _ in range(8)]
    full = True

    def fill() -> None:
        for _ in range(1000):
            slots.append(tables.take((1, 1, 1, 1))[0])

    with pytest.raises(OSError, match="no space left"):
        fill()
    assert tables.cache_slots == len(slots)
    full = False
    assert tables.take((1, 1, 1, 1))[0] == len(slots)
