"""The futex system call itself, on words that the library sleeps on: as a process without the library would make it."""
from __future__ import annotations

import ctypes
import platform
import threading
from pathlib import Path
from typing import Any

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
WAIT, WAKE = 0, 1           # without the private flag


def _call(word: Any, operation: int, value: int, timeout_s: float) -> int:
    """The result, or -errno."""
    time_out = (ctypes.c_long * 2)(int(timeout_s), 0)
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(SYS_FUTEX, ctypes.byref(word), operation, ctypes.c_uint32(value),
                              time_out if operation == WAIT else None, None, 0))
    return result if result >= 0 else -ctypes.get_errno()


def wait(word: Any, value: int, timeout_s: float) -> int:
    """Sleep while the word (a ctypes object in shared memory) has this value."""
    return _call(word, WAIT, value, timeout_s)


def wake(word: Any, count: int) -> int:
    """How many sleepers were woken."""
    return _call(word, WAKE, count, 0)


def sleeps_in(thread: threading.Thread, word: Any = None) -> bool:
    """Does a thread sleep in that system call, on this word if one is given, or at least sleep, where the kernel does not say in
    which call?"""
    folder = Path(f"/proc/self/task/{thread.native_id}")
    try:
        call, *arguments = (folder / "syscall").read_text().split()
        return call == str(SYS_FUTEX) and (word is None or int(arguments[0], 16) == ctypes.addressof(word))
    except OSError:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "S"
