"""The cold lock: whatever fails at its byte, the mutex of this process is given back."""
from __future__ import annotations

import logging
import time

import pytest

from shmkv._cold import ColdLock
from shmkv._mutex import Mutex

NO_DESCRIPTOR = -1


def test_a_byte_that_cannot_be_locked_gives_the_mutex_back(caplog: pytest.LogCaptureFixture) -> None:
    mutex = Mutex()
    for _ in range(2):                  # the second time would wait for the first for ever
        with caplog.at_level(logging.WARNING, logger="shmkv"), pytest.raises(OSError, match="cannot lock byte 0"), \
                ColdLock(mutex, NO_DESCRIPTOR, time.monotonic() + 20, "here"):
            pytest.fail("there is no such file")
        assert not mutex.is_mine
    assert "the cold lock of namespace 'here' stays with this process" in caplog.text
