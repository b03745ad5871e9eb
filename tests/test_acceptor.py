"""The cluster that was linked to removes the link: it waits for its turn, and for nobody who is not there."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import memory
import pytest
from handlers import Stop, exit_code_of, fork_here, handler_when
from memory import NO_LIFE_FILE, Pair
from peer import Namespace

from shmkv import _link_record, _members
from shmkv._acceptor import AcceptedLink

PATIENT_MS = 20000
FREE, HELD_BY_THE_READER, WAITERS = 0, 2, 1 << 31
LIVE, BROKEN, REMOVED = _link_record.LIVE, 2, _link_record.REMOVED


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    """The reader's side holds the link's lock."""
    made = Pair(namespace.name)
    word(made).value = HELD_BY_THE_READER
    yield made
    made.close()


def word(pair: Pair) -> Any:
    return memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", "word")


def state(pair: Pair) -> int:
    return int(_link_record.read(pair.owner.region, pair.record)["state"])


def remove(pair: Pair, timeout_ms: int = PATIENT_MS, force: bool = False) -> bool:
    serial = _link_record.read(pair.owner.region, pair.record)["serial"]
    return AcceptedLink(pair.owner.region, pair.owner.members, NO_LIFE_FILE, pair.record, serial).end(timeout_ms, force)


def remove_while(pair: Pair, change: Callable[[], None]) -> bool:
    """What a removal comes to when something happens while it waits."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(remove(pair)))
    thread.start()
    memory.wait_until(lambda: bool(word(pair).value & WAITERS), "the acceptor waits")
    change()
    thread.join()
    return answers[0]


def give(pair: Pair) -> None:
    word(pair).value = FREE


def test_link_is_removed_when_it_is_the_acceptors_turn(pair: Pair) -> None:
    assert remove_while(pair, lambda: give(pair))
    assert (state(pair), word(pair).value) == (REMOVED, FREE)


def test_link_that_its_reader_removes_meanwhile_is_gone(pair: Pair) -> None:
    assert remove_while(pair, pair.handle.force_remove)
    assert (state(pair), word(pair).value) == (REMOVED, HELD_BY_THE_READER)


def test_reader_that_dies_meanwhile_is_not_waited_for(pair: Pair) -> None:
    assert remove_while(pair, lambda: _members.clear(pair.owner.members, 1))
    assert (state(pair), word(pair).value) == (BROKEN, HELD_BY_THE_READER)


def test_word_that_nobody_writes_is_not_waited_for(pair: Pair) -> None:
    def scribble() -> None:
        word(pair).value = 77

    assert remove_while(pair, scribble)
    assert (state(pair), word(pair).value) == (BROKEN, 77)


@pytest.mark.parametrize("timeout_ms", [0, 50])
def test_link_stays_when_its_turn_does_not_come_in_time(pair: Pair, timeout_ms: int) -> None:
    assert not remove(pair, timeout_ms)
    assert (state(pair), word(pair).value) == (LIVE, HELD_BY_THE_READER)


def test_force_and_a_dead_reader_need_no_turn(pair: Pair) -> None:
    assert remove(pair, force=True)
    assert state(pair) == REMOVED
    other = pair.owner.claim(2, 0xC3, 3)
    memory.word(pair.owner.region, "LinkRecord", other, "LinkRecord", "word").value = HELD_BY_THE_READER
    _members.clear(pair.owner.members, 2)
    serial = _link_record.read(pair.owner.region, other)["serial"]
    assert AcceptedLink(pair.owner.region, pair.owner.members, NO_LIFE_FILE, other, serial).end(PATIENT_MS, False)


def test_exception_of_a_signal_handler_comes_out(pair: Pair) -> None:
    def stop() -> None:
        raise Stop

    with handler_when(lambda: bool(word(pair).value & WAITERS), stop), pytest.raises(Stop):
        remove(pair)
    assert (state(pair), word(pair).value) == (LIVE, HELD_BY_THE_READER)


@pytest.mark.parametrize("child_raises", [False, True])
def test_child_of_a_signal_handler_removes_nothing(pair: Pair, child_raises: bool) -> None:
    """The call goes on in the child, or has an exception; neither the wait nor the link is the child's."""
    parent, seen = os.getpid(), []

    def fork() -> None:
        child = fork_here()
        if child == 0:
            if child_raises:
                raise Stop
            return
        seen.append((exit_code_of(child), state(pair), word(pair).value))
        give(pair)

    code = 9
    try:
        with handler_when(lambda: bool(word(pair).value & WAITERS), fork):
            removed = remove(pair)
            code = 9 if removed else 7
            assert removed or os.getpid() != parent
    except Stop:
        code = 8
    finally:
        if os.getpid() != parent:
            os._exit(code)
    assert seen == [(8 if child_raises else 7, LIVE, HELD_BY_THE_READER | WAITERS)]
    assert state(pair) == REMOVED
