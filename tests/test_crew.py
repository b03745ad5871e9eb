"""The crew: how many threads a copy may use, when they are made, and what a fork leaves of them."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import memory
import numpy as np
import pytest
from memory import Pair
from peer import SHM, Namespace

from shmkv import _attached, _copy, _crew

NBYTES = 16 << 20
THRESHOLD = 8 << 20

# A copy of so many bytes; prints how many threads of the crew exist before and after, and in a forked child.
PROGRAM = """
import os, sys, threading
from shmkv import _copy, _crew, _local, _pull, segment
from shmkv._mapping import Region
name, NBYTES = sys.argv[1], int(sys.argv[3])
fd = segment.create(name, 2 * NBYTES, 2 * NBYTES)
region = Region.map(fd, 2 * NBYTES)
os.close(fd)
segment.unlink(name)
_copy.configure(threads=int(sys.argv[2]))
src = _local.LocalCache(region, [(0, NBYTES, 1, 1, NBYTES)])
dst = _local.LocalCache(region, [(NBYTES, NBYTES, 1, 1, NBYTES)])
def copy():
    assert _pull.copy(src, dst, (-1, 0, 0, 0, 0, 0, -1, 0, -1, 0), 60000) == 0
    return _crew.current()["started"]
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()              # those of numpy among them
print(_crew.current()["started"], copy(), copy(), threads() - before, flush=True)
child = os.fork()
if child == 0:
    print(_crew.current()["started"], copy(), threads() - 1, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(copy(), flush=True)
"""


NO_CREW = ["0 0 0 0", "0 0 0", "0"]
CREW_OF_TWO = ["0 2 2 2", "0 2 2", "2"]


@pytest.mark.parametrize(("threads", "nbytes", "said"), [
    (1, NBYTES, NO_CREW), (3, NBYTES, CREW_OF_TWO), (3, THRESHOLD, CREW_OF_TWO), (3, THRESHOLD - 1, NO_CREW),
])
def test_threads_are_made_on_first_need_and_again_after_fork(threads: int, nbytes: int, said: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, f"crew-{os.getpid()}", str(threads), str(nbytes)],
                           capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout.splitlines(), ended.stderr, ended.returncode) == (said, "", 0)


def test_default_is_one_thread_a_processor_up_to_four() -> None:
    before = _crew.current()["threads"]
    try:
        _crew.configure(None)
        assert _crew.current()["threads"] == min(_crew.DEFAULT_LIMIT, len(os.sched_getaffinity(0)))
    finally:
        _crew.configure(before)


@pytest.mark.parametrize("threads", [0, -1, _crew.MAX_LIMIT + 1])
def test_number_of_threads_has_bounds(threads: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {_crew.MAX_LIMIT}"):
        _crew.configure(threads)
    with pytest.raises(ValueError, match=f"1 to {_crew.MAX_LIMIT}"):
        _copy.configure("auto", None, threads)


@pytest.fixture
def cut_off(namespace: Namespace) -> Iterator[Pair]:
    """A reader by system calls; of its peer's segment only the first half is left. Three threads."""
    before = _crew.current()["threads"]
    made = Pair(namespace.name, by_pread=True)
    source = made.add(np.zeros((1, 1, 1, NBYTES), np.uint8))
    assert memory.pull(made.handle, memory.destination(1, 1, 1, NBYTES)[0], memory.by_id(source.cache_id), memory.select()) == 0
    os.truncate(SHM / source.path, NBYTES // 2)
    _crew.configure(3)
    yield made
    _crew.configure(before)
    made.close()


@pytest.mark.parametrize("round_", range(10))
def test_copy_ends_at_the_first_share_that_fails_whoever_had_it(cut_off: Pair, round_: int) -> None:
    want, cache = memory.select(), memory.destination(1, 1, 1, NBYTES)[0]
    status = memory.pull(cut_off.handle, cache, memory.by_id(cut_off.sources[0].cache_id), want)
    assert "size" in _attached.describe(status)
