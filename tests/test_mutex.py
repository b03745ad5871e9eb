"""The mutex of Python code: no signal handler leaves it taken, and nobody waits for itself."""
from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import FrameType

import pytest

from shmkv._mutex import Mutex

# A handler that raises, as fast as the timer allows, over a loop that does nothing but take and give.
INTERRUPTED = """
import signal, time
from shmkv._mutex import Mutex
class Stop(Exception):
    pass
def handler(*_):
    raise Stop
signal.signal(signal.SIGALRM, handler)
mutex, count, end = Mutex(), 0, time.monotonic() + 2
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)    # once: no second one while the first is dealt with
        while True:
            with mutex:
                pass
    except Stop:
        count += 1
with mutex:
    print("free", count > 100)
"""


def test_interrupts_never_leave_it_taken() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("free True\n", "", 0)


def test_thread_that_has_it_is_refused() -> None:
    mutex = Mutex(busy=KeyError)
    with mutex:
        assert mutex.is_mine
        with pytest.raises(KeyError, match="signal handler"), mutex:
            pytest.fail("entered twice")
        assert mutex.is_mine
    assert not mutex.is_mine
    with mutex:
        assert mutex.is_mine


def test_deadline_of_a_wait() -> None:
    mutex, taken, over = Mutex(), threading.Event(), threading.Event()

    def hold() -> None:
        with mutex:
            taken.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(20)
    with pytest.raises(TimeoutError, match=r"0\.050 s"), mutex.within(0.05):
        pytest.fail("two have it")
    over.set()
    with mutex.within(20):
        assert mutex.is_mine
    thread.join()


def test_wait_is_interruptible() -> None:
    mutex, taken, over = Mutex(), threading.Event(), threading.Event()

    def hold() -> None:
        with mutex:
            taken.set()
            over.wait(20)

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise InterruptedError

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(20)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError), mutex:
            pytest.fail("two have it")
    finally:
        signal.signal(signal.SIGALRM, before)
        over.set()
        thread.join()
    with mutex:
        assert mutex.is_mine


def test_check_gives_it_back_when_it_raises() -> None:
    calls: list[bool] = []

    def check() -> None:
        calls.append(mutex.is_mine)
        if len(calls) == 1:
            raise ValueError("not now")

    mutex = Mutex(check)
    with pytest.raises(ValueError, match="not now"), mutex:
        pytest.fail("the check was not asked")
    with mutex:
        assert calls == [True, True]


@pytest.mark.parametrize("callables", [{"busy": None}, {"check": 7}])
def test_what_it_calls_is_looked_at_when_it_is_made(callables: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        Mutex(**callables)
