"""The free ranges of a table against a plain set of numbers."""
from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmkv._ranges import RangeAllocator

LIMIT = 40


class Ranges(RuleBasedStateMachine):
    """Whatever is taken and given back, no number is given out twice and none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = RangeAllocator(LIMIT)
        self.taken: list[tuple[int, int]] = []
        self.highest = 0

    def used(self) -> list[int]:
        return [number for first, count in self.taken for number in range(first, first + count)]

    def first_gap(self, count: int) -> int | None:
        used = set(self.used())
        fits = (first for first in range(LIMIT - count + 1) if used.isdisjoint(range(first, first + count)))
        return next(fits, None)

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        expected = self.first_gap(count)
        try:
            first = self.allocator.take(count)
        except MemoryError:
            assert expected is None
            return
        assert first == expected
        self.taken.append((first, count))
        self.highest = max(self.highest, first + count)

    @precondition(lambda self: self.taken)
    @rule(position=st.integers(0, 100))
    def give(self, position: int) -> None:
        first, count = self.taken.pop(position % len(self.taken))
        self.allocator.give(first, count)

    @precondition(lambda self: self.taken)
    @rule()
    def give_everything(self) -> None:
        for first, count in self.taken:
            self.allocator.give(first, count)
        self.taken.clear()
        assert self.allocator.take(max(1, self.highest)) == 0
        self.allocator.give(0, max(1, self.highest))

    @invariant()
    def end_is_the_highest_in_use(self) -> None:
        """So that a table that failed to grow is not looked at where it has no pages."""
        assert self.allocator.end == max(self.used(), default=-1) + 1

    @invariant()
    def numbers_are_given_out_once(self) -> None:
        assert len(self.used()) == len(set(self.used()))


Ranges.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


class TestRanges(Ranges.TestCase):  # type: ignore[misc,name-defined]
    """The machine as a test; it asserts in its rules and invariants."""


def test_ranges_are_handed_out_from_the_lowest() -> None:
    allocator = RangeAllocator(100)
    assert [allocator.take(count) for count in (3, 1, 4)] == [0, 3, 4]
    allocator.give(3, 1)
    assert allocator.take(2) == 8
    assert allocator.take(1) == 3


def test_neighbours_join_on_both_sides() -> None:
    allocator = RangeAllocator(12)
    assert [allocator.take(4) for _ in range(3)] == [0, 4, 8]
    for first in (0, 8, 4):
        allocator.give(first, 4)
    assert allocator.take(12) == 0


def test_free_end_of_a_table_joins_what_was_never_used() -> None:
    allocator = RangeAllocator(10)
    assert [allocator.take(count) for count in (5, 3)] == [0, 5]
    allocator.give(5, 3)
    assert allocator.take(4) == 5
    assert allocator.end == 9


def test_full_table_says_what_is_left() -> None:
    allocator = RangeAllocator(10)
    allocator.take(7)
    with pytest.raises(MemoryError, match="4 more records wanted, 3 of 10 left"):
        allocator.take(4)
    assert allocator.limit == 10
    assert allocator.take(3) == 7
    assert allocator.end == 10


def test_empty_range_changes_nothing() -> None:
    allocator = RangeAllocator(4)
    first = allocator.take(0)
    allocator.give(first, 0)
    assert (allocator.take(4), allocator.end) == (0, 4)
