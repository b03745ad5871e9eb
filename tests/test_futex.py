"""The two-sided lock word: over real shared memory, from two threads and from two processes."""
from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import futexes
import memory
import pytest
from scripts import Script

from shmkv._futex import LockWord
from shmkv._mapping import Region

FREE, HELD, OFFERED, WAITERS = 0, 1, 3, 0x80000000
SLICE_S = 0.020
PATIENT_MS = 20000
OTHER_SIDE = """
import sys
from shmkv._futex import LockWord
from shmkv._mapping import Region

path, taken, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
regions = [Region.attach(path, writable=True) for _ in range(2)]
region = next(each for each in regions if each.base != taken)
lock = LockWord(region, region.base, 1)
print(region.base, flush=True)
for _ in range(rounds):
    sys.stdin.readline()
    print("took" if lock.acquire(20000) else "timed out", flush=True)
    sys.stdin.readline()
    lock.release()
    print("gave", flush=True)
"""


class Word:
    """A word of shared memory and its two sides."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.sides = [LockWord(region, region.base, side) for side in range(2)]
        self.raw = ctypes.c_uint32.from_address(region.base)

    @property
    def value(self) -> int:
        return int(self.sides[0].value)

    @value.setter
    def value(self, value: int) -> None:
        self.raw.value = value


@pytest.fixture
def word() -> Word:
    return Word(memory.anonymous(4096))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "word"
    path.touch(0o600)
    os.truncate(path, 4096)
    return path


def wait_for_waiter(word: Word) -> None:
    memory.wait_until(lambda: bool(word.value & WAITERS), "a waiter")


def start(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_word_names_the_side_that_holds_it(word: Word) -> None:
    for side in range(2):
        assert word.sides[side].acquire(0)
        assert word.value == HELD + side
        assert not word.sides[1 - side].acquire(0)
        word.sides[side].release()
        assert word.value == FREE


def test_two_sides_exclude_each_other(word: Word) -> None:
    counter = memory.content(word.region, 64, 8).view("u8")
    failures: list[str] = []

    def work(side: int) -> None:
        for _ in range(300):
            if not word.sides[side].acquire(PATIENT_MS):
                failures.append(f"side {side} timed out")
                return
            seen = int(counter[0])
            time.sleep(0)               # lets the other thread run with the count in hand
            counter[0] = seen + 1
            word.sides[side].release()

    threads = [start(lambda side=side: work(side)) for side in range(2)]
    for thread in threads:
        thread.join()
    assert failures == []
    assert counter[0] == 600
    assert word.value & ~WAITERS in (FREE, OFFERED, OFFERED + 1)


def test_waiter_gets_the_word_that_is_released(word: Word) -> None:
    assert word.sides[0].acquire(0)
    got: list[bool] = []
    thread = start(lambda: got.append(word.sides[1].acquire(PATIENT_MS)))
    wait_for_waiter(word)
    word.sides[0].release()
    assert not word.sides[0].acquire(0)     # offered to side 1 or held by it: either way not ours
    thread.join()
    assert got == [True]
    assert word.value & ~WAITERS == HELD + 1


def test_released_word_is_offered_to_the_waiting_side(word: Word) -> None:
    word.value = HELD | WAITERS
    word.sides[0].release()
    assert word.value == OFFERED + 1
    assert not word.sides[0].acquire(0)
    assert word.sides[1].acquire(0)
    assert word.value == HELD + 1


def test_stopped_waiter_keeps_the_word_for_one_slice_only(word: Word) -> None:
    word.value = HELD | WAITERS
    began = time.monotonic()
    word.sides[0].release()
    assert word.sides[0].acquire(PATIENT_MS)
    took = time.monotonic() - began
    assert SLICE_S * 0.9 <= took < PATIENT_MS / 2000
    assert word.value == HELD


def test_late_waiter_does_not_take_what_was_retaken(word: Word) -> None:
    word.value = HELD | WAITERS
    word.sides[0].release()
    assert word.sides[0].acquire(PATIENT_MS)
    assert not word.sides[1].acquire(0)
    word.sides[0].release()
    assert word.sides[1].acquire(PATIENT_MS)


def test_giving_up_takes_the_waiters_bit_back(word: Word) -> None:
    assert word.sides[0].acquire(0)
    began = time.monotonic()
    assert not word.sides[1].acquire(50)
    assert time.monotonic() - began >= 0.050
    assert word.value == HELD
    word.sides[0].release()
    assert word.value == FREE


def test_impatient_side_never_strands_the_word(word: Word) -> None:
    taken = [0, 0]

    def work(side: int) -> None:
        for _ in range(400):
            if word.sides[side].acquire(side):      # side 0 never waits, side 1 for one millisecond
                taken[side] += 1
                time.sleep(0)
                word.sides[side].release()

    threads = [start(lambda side=side: work(side)) for side in range(2)]
    for thread in threads:
        thread.join()
    assert all(taken)
    for side in range(2):
        assert word.sides[side].acquire(PATIENT_MS)
        word.sides[side].release()


@pytest.mark.parametrize("value", [5, 6, 0x7FFFFFFF, WAITERS | 5, 0xFFFFFFFF, 1 << 16])
def test_value_that_nobody_writes_is_an_error(word: Word, value: int) -> None:
    word.value = value
    for side in range(2):
        with pytest.raises(ValueError, match=f"lock word {value:#x} names no side"):
            word.sides[side].acquire(PATIENT_MS)
    assert word.value == value


def test_number_that_is_added_to_waits_for_the_other_side(word: Word) -> None:
    assert word.sides[0].acquire(0)
    thread = start(lambda: word.sides[1].add_under(word.region.base + 64, 3))
    wait_for_waiter(word)
    time.sleep(1.5 * SLICE_S)           # a slice ends without the word
    word.sides[0].release()
    thread.join()
    assert memory.content(word.region, 64, 8).view("u8")[0] == 3
    assert word.value == FREE


def test_waiter_notices_a_scribbled_word(word: Word) -> None:
    assert word.sides[0].acquire(0)
    heard: list[str] = []

    def wait() -> None:
        try:
            word.sides[1].acquire(PATIENT_MS)
        except ValueError as error:
            heard.append(str(error))

    thread = start(wait)
    wait_for_waiter(word)
    word.value = 77
    thread.join()
    assert heard == ["lock word 0x4d names no side"]


def test_release_leaves_a_word_alone_that_is_not_ours(word: Word) -> None:
    for value in (77, HELD + 1, HELD + 1 | WAITERS, FREE):
        word.value = value
        word.sides[0].release()
        assert word.value == value


def test_side_and_address_are_checked() -> None:
    region = memory.anonymous(4096)
    for address, side in [(region.base, 2), (region.base + 2, 0), (0, 0)]:
        with pytest.raises(ValueError, match="side must be 0 or 1 and address aligned"):
            LockWord(region, address, side)


def test_uncontended_pairs_leave_the_word_free(word: Word) -> None:
    assert word.sides[0].pairs(1000) > 0
    assert word.value == FREE


def test_fr_065_waiter_of_another_process_sleeps_on_the_shared_word(file: Path) -> None:
    word = Word(Region.attach(str(file), writable=True))
    with Script(OTHER_SIDE, file, word.region.base, 1) as other:
        assert int(other.hear()) != word.region.base
        assert word.sides[0].acquire(0)
        other.say()
        wait_for_waiter(word)
        memory.wait_until(lambda: futexes.wake(word.raw, 1) == 1, "a sleeper that our wake reaches")
        word.sides[0].release()
        assert other.hear() == "took"


def test_fr_065_release_of_another_process_wakes_the_shared_word(file: Path) -> None:
    word = Word(Region.attach(str(file), writable=True))
    with Script(OTHER_SIDE, file, word.region.base, 1) as other:
        assert int(other.hear()) != word.region.base
        other.say()
        assert other.hear() == "took"
        word.value = HELD + 1 | WAITERS
        woken: list[int] = []
        thread = start(lambda: woken.append(futexes.wait(word.raw, HELD + 1 | WAITERS, memory.LIVENESS_S)))
        memory.wait_until(lambda: futexes.sleeps_in(thread), "our thread asleep in the kernel")
        other.say()
        thread.join()
        assert woken == [0]
        assert word.value == OFFERED


def test_fr_065_hundred_hand_overs_between_processes_at_different_addresses(file: Path) -> None:
    word = Word(Region.attach(str(file), writable=True))
    slowest = 0.0
    with Script(OTHER_SIDE, file, word.region.base, 100) as other:
        assert int(other.hear()) != word.region.base
        for _ in range(100):
            assert word.sides[0].acquire(PATIENT_MS)
            other.say()
            wait_for_waiter(word)
            released = time.monotonic()
            word.sides[0].release()
            assert other.hear() == "took"
            slowest = max(slowest, time.monotonic() - released)
            other.say()
            assert other.hear() == "gave"
        assert slowest < PATIENT_MS / 2000
    assert word.value == FREE
