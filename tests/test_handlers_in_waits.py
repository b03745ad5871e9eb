"""What a signal handler does while its thread waits for a link: raises, gives the lock on, pulls itself, forks.

The one that waits leaves nothing behind, and a child that the handler forked touches nothing of its parent's.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import memory
import pytest
from handlers import Stop, exit_code_of, fork_here, handler_when
from memory import destination, request, select
from peer import Namespace
from reference import Geometry, noise

from shmkv import _link, _pull
from shmkv._blocks import FROM_ROW, BlockLists
from shmkv._futex import LockWord
from shmkv.keys import CacheKey

PATIENT_MS = 20000
SHAPE = Geometry(1, 1, 2, 16)
FREE, HELD_BY_THE_OTHER, WAITERS = 0, 1, 1 << 31
CHILD_WAS_REFUSED, CHILD_RAISED, CHILD_DID_SOMETHING = 7, 8, 9


class Waiting:
    """A pair whose link is held by the owner's side."""

    def __init__(self, namespace: str) -> None:
        self.pair = memory.pair_with_keys(namespace, noise(SHAPE, seed=5))
        self.other = LockWord(self.pair.owner.region, self.pair.handle.address + memory.OFFSETS["LinkRecord", "word"], 0)
        assert self.other.acquire(0)
        self.cache, _ = destination(*SHAPE)

    @property
    def word(self) -> int:
        return int(self.other.value)

    def is_waited_for(self) -> bool:
        return bool(self.word & WAITERS)

    def pull(self) -> int:
        return memory.pull(self.pair.handle, self.cache, request(0), select(), timeout_ms=PATIENT_MS)

    def pull_many(self) -> int:
        packed = CacheKey(1, 0).packed
        return int(_pull.pull_many(self.pair.handle, [(self.cache, packed, select(), False)] * 2, PATIENT_MS)[1])

    def pull_blocks(self) -> int:
        """A row into one block."""
        lists = BlockLists([0], [1], FROM_ROW)
        return int(_pull.pull(self.pair.handle, self.cache, CacheKey(1, 0).packed, select(), False, PATIENT_MS, lists=lists))

    def lend(self) -> int:
        return int(_pull.lend(self.pair.handle, CacheKey(1, 0).packed, select(), False, PATIENT_MS, 192)[0])

    def remove(self) -> int:
        return int(self.pair.handle.remove(PATIENT_MS))

    def prepared(self) -> Any:
        """A prepared pull that has been called once, so that it knows its link."""
        made = _pull.PreparedPull(self.cache, select(), False, PATIENT_MS, (CacheKey,), lambda *_: self.pair.handle, None, None)
        made(CacheKey(1, 0))
        return made


@pytest.fixture
def waiting(namespace: Namespace) -> Iterator[Waiting]:
    made = Waiting(namespace.name)
    yield made
    made.pair.close()


def raise_stop() -> None:
    raise Stop


@pytest.mark.parametrize("call", ["pull", "pull_many", "pull_blocks", "lend", "remove", "prepared"])
def test_exception_of_a_handler_comes_out_and_nothing_is_kept(waiting: Waiting, call: str) -> None:
    prepared = waiting.prepared()
    work: Callable[[], Any] = (lambda: prepared(CacheKey(1, 0))) if call == "prepared" else getattr(waiting, call)
    with handler_when(waiting.is_waited_for, raise_stop), pytest.raises(Stop):
        work()
    assert (waiting.word, waiting.pair.handle.users) == (HELD_BY_THE_OTHER, 0)
    waiting.other.release()
    assert waiting.pull() == 0


def test_lock_that_is_given_to_one_who_gives_up_is_passed_on(waiting: Waiting) -> None:
    def give_and_raise() -> None:
        waiting.other.release()
        raise Stop

    with handler_when(waiting.is_waited_for, give_and_raise), pytest.raises(Stop):
        waiting.pull()
    assert (waiting.word, waiting.pair.handle.users) == (FREE, 0)


def test_turn_in_the_queue_of_one_who_gives_up_is_passed_on(waiting: Waiting) -> None:
    """The thread in front ends, which makes it the main thread's turn, which has an exception on its way."""
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(waiting.pull()))
    first.start()
    memory.wait_until(waiting.is_waited_for, "the first thread at the word")

    def end_and_raise() -> None:
        waiting.other.release()
        first.join()
        raise Stop

    with handler_when(lambda: waiting.pair.handle.users == 2, end_and_raise), pytest.raises(Stop):
        waiting.pull()
    assert (answers, waiting.pair.handle.users) == ([0], 0)
    assert waiting.pull() == 0


def test_handler_that_wants_the_core_again_is_refused(waiting: Waiting) -> None:
    said: list[int] = []

    def pull_and_copy() -> None:
        said.append(waiting.pull())
        said.append(int(_pull.copy(waiting.cache, waiting.cache, select(), PATIENT_MS)))
        waiting.other.release()

    with handler_when(waiting.is_waited_for, pull_and_copy):
        assert waiting.pull() == 0
    assert said == [_link.BUSY, _link.BUSY]


def forking(child_raises: bool, afterwards: Callable[[], None], seen: list[int]) -> Callable[[], None]:
    """A handler that forks. In the child the interrupted call goes on, or gets an exception; the parent waits for it."""
    def handle() -> None:
        child = fork_here()
        if child == 0:
            if child_raises:
                raise Stop
            return
        seen.append(exit_code_of(child))
        afterwards()

    return handle


def call_and_end_the_child(work: Callable[[], int], refused: int) -> int:
    """The call of the parent; what it comes to in a child is the child's exit code."""
    parent, code = os.getpid(), CHILD_DID_SOMETHING
    try:
        status = work()
        code = CHILD_WAS_REFUSED if status == refused else CHILD_DID_SOMETHING
    except Stop:
        code, status = CHILD_RAISED, 0
    finally:
        if os.getpid() != parent:
            os._exit(code)
    return status


@pytest.mark.parametrize("child_raises", [False, True])
@pytest.mark.parametrize("place", ["word", "queue"])
def test_child_of_a_handler_leaves_its_parents_wait_alone(waiting: Waiting, place: str, child_raises: bool) -> None:
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(waiting.pull()))
    wanted_users = 1
    if place == "queue":
        first.start()
        memory.wait_until(waiting.is_waited_for, "the first thread at the word")
        wanted_users = 2
    seen: list[int] = []

    def look_and_give() -> None:
        seen.append(waiting.word)
        waiting.other.release()

    handle = forking(child_raises, look_and_give, seen)
    with handler_when(lambda: waiting.is_waited_for() and waiting.pair.handle.users == wanted_users, handle):
        status = call_and_end_the_child(waiting.pull, _link.FORKED)
    if place == "queue":
        first.join()
        assert answers == [0]
    assert seen == [CHILD_RAISED if child_raises else CHILD_WAS_REFUSED, HELD_BY_THE_OTHER | WAITERS], "the mark is the parent's"
    assert (status, waiting.pair.handle.users) == (0, 0)


def test_child_of_a_handler_has_links_of_its_own(namespace: Namespace, waiting: Waiting) -> None:
    """In the middle of a pull of its parent, whose link is none of its business."""
    seen: list[int] = []

    def fork() -> None:
        child = fork_here()
        if child == 0:
            code = CHILD_DID_SOMETHING
            try:
                own = Waiting(f"{namespace.name}-child")
                own.other.release()
                code = CHILD_WAS_REFUSED if (waiting.pull(), own.pull()) == (_link.FORKED, 0) else CHILD_DID_SOMETHING
                own.pair.close()
            finally:
                os._exit(code)
        seen.append(exit_code_of(child))
        waiting.other.release()

    with handler_when(waiting.is_waited_for, fork):
        assert waiting.pull() == 0
    assert seen == [CHILD_WAS_REFUSED]


def test_child_cannot_use_its_parents_link(waiting: Waiting) -> None:
    waiting.other.release()
    child = fork_here()
    if child == 0:
        code = CHILD_DID_SOMETHING
        try:
            code = CHILD_WAS_REFUSED if waiting.pull() == waiting.remove() == _link.FORKED else CHILD_DID_SOMETHING
        finally:
            os._exit(code)
    assert exit_code_of(child) == CHILD_WAS_REFUSED
    assert waiting.pull() == 0
