"""Python signal handlers that run exactly while the main thread waits in a call of the core."""
from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import memory


class Stop(Exception):
    """What a handler raises."""


@contextmanager
def handler_when(condition: Callable[[], bool], handle: Callable[[], None]) -> Iterator[None]:
    """`handle` runs in the main thread, in a signal handler, once the condition holds."""
    before = signal.signal(signal.SIGUSR1, lambda *_: handle())
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        memory.wait_until(condition, "the main thread waits")
        signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def fork_here() -> int:
    """os.fork, also while threads wait: the child makes no other thread and ends by os._exit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
