"""The key index as its owner writes it: growth, tombstones, pages given back, and readers that still walk an old table."""
from __future__ import annotations

import random
from collections.abc import Iterator

import memory
import pytest
from memory import NO_LIFE_FILE, Owner, prefix, request

from shmkv import _layout, _lookup, _members
from shmkv._index import KeyIndex

SMALLEST = 256


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


def give_back(owner: Owner) -> None:
    owner.directory.index.give_back_old_parts(NO_LIFE_FILE, owner.members)


def test_index_begins_small(owner: Owner) -> None:
    assert isinstance(owner.directory.index, KeyIndex)
    assert owner.directory.index.capacity == SMALLEST
    assert owner.directory.find(request(1)) is None


def test_thousands_of_keys_are_found_while_the_index_grows(owner: Owner) -> None:
    slot, _, _ = owner.insert(rows=5000, inner=1)
    capacities = set()
    for row in range(5000):
        owner.directory.bind(slot, row, request(row * 7919, model_id=row % 3))
        capacities.add(owner.directory.index.capacity)
    assert len(capacities) >= 2 or min(capacities) >= 10000
    assert owner.directory.index.capacity >= 10000
    for row in range(5000):
        assert owner.directory.find(request(row * 7919, model_id=row % 3)) == (slot, row)
        assert owner.directory.find(request(row * 7919, model_id=3)) is None


def test_caches_inserted_one_by_one_make_the_index_grow(owner: Owner) -> None:
    slots = [owner.insert()[0] for _ in range(700)]
    for number, slot in enumerate(slots):
        owner.directory.bind(slot, 0, request(number))
    assert owner.directory.index.capacity >= 2800
    assert [owner.directory.find(request(number)) for number in range(700)] == [(slot, 0) for slot in slots]


def test_caches_are_found_by_id_after_the_index_has_grown(owner: Owner) -> None:
    ids = [owner.insert(num_tensors=1 + number % 3)[2] for number in range(40)]
    slot, _, _ = owner.insert(rows=300, inner=1)
    for row in range(300):
        owner.directory.bind(slot, row, request(row))
    assert owner.directory.index.capacity > SMALLEST
    found = [_lookup.describe(owner.region, (0, cache_id, 0, 0), 0) for cache_id in ids]
    assert [each and each[0] for each in found] == [1 + number % 3 for number in range(40)]


def test_tombstones_do_not_make_the_index_grow(owner: Owner) -> None:
    slot, _, _ = owner.insert(rows=20)
    for number in range(20_000):
        owner.directory.bind(slot, number % 20, request(number))
    assert owner.directory.index.capacity == SMALLEST
    assert [owner.directory.find(request(number)) for number in range(19_980, 20_000)] == [(slot, row) for row in range(20)]
    assert owner.directory.find(request(0)) is None


def test_caches_that_come_and_go_do_not_make_the_index_grow(owner: Owner) -> None:
    slots = set()
    for number in range(2000):
        slot, _, _ = owner.insert()
        slots.add(slot)
        owner.directory.bind(slot, 0, request(number))
        owner.directory.remove(slot, 0)
        owner.directory.retire(slot)
        owner.directory.release(slot)
    assert owner.directory.index.capacity == SMALLEST
    assert slots == {0}


def test_index_shrinks_when_most_keys_have_gone(owner: Owner) -> None:
    slot, _, _ = owner.insert(rows=3000, inner=1)
    for row in range(3000):
        owner.directory.bind(slot, row, request(row))
    grown = owner.directory.index.capacity
    for row in range(10, 3000):
        owner.directory.unbind(slot, row)
    for number in range(2 * grown):
        owner.directory.bind(slot, 10 + number % 10, prefix(number))
    assert owner.directory.index.capacity < grown
    assert [owner.directory.find(request(row)) for row in range(10)] == [(slot, row) for row in range(10)]


def test_random_binds_agree_with_a_dict(owner: Owner) -> None:
    draw = random.Random(11)
    slot, _, _ = owner.insert(rows=300, inner=1)
    bound: dict[int, int] = {}
    for _ in range(6000):
        row, number = draw.randrange(300), draw.randrange(2000)
        if number in bound.values():
            continue
        if draw.random() < 0.3:
            owner.directory.unbind(slot, row)
            bound.pop(row, None)
        else:
            owner.directory.bind(slot, row, request(number))
            bound[row] = number
    expected = {number: (slot, row) for row, number in bound.items()}
    assert {n: owner.directory.find(request(n)) for n in range(2000)} == {n: expected.get(n) for n in range(2000)}


def grow(owner: Owner) -> int:
    """Bind until the index has replaced a table of many pages: bytes in use before that table is given back."""
    slot, _, _ = owner.insert(rows=20_000, inner=1)
    for row in range(20_000):
        owner.directory.bind(slot, row, request(row))
    before = owner.directory.index.capacity
    owner.insert(rows=60_000, inner=1)
    assert owner.directory.index.capacity > before >= 80_000
    assert owner.directory.find(request(19_999)) == (slot, 19_999)
    return owner.used_nbytes()


def test_pages_of_replaced_tables_are_given_back(owner: Owner) -> None:
    before = grow(owner)
    give_back(owner)
    assert owner.used_nbytes() < before
    assert owner.directory.find(request(123)) is not None
    between = owner.used_nbytes()
    give_back(owner)
    assert owner.used_nbytes() == between


def test_pages_stay_while_a_living_reader_is_inside(owner: Owner) -> None:
    record = owner.claim()
    word = memory.word(owner.region, "LinkRecord", record, "LinkRecord", "word")
    before = grow(owner)
    word.value = 2                      # held by the initiator
    give_back(owner)
    assert owner.used_nbytes() == before
    word.value = 0
    give_back(owner)
    assert owner.used_nbytes() < before


def test_dead_reader_keeps_no_pages(owner: Owner) -> None:
    record = owner.claim(slot=1)
    before = grow(owner)
    memory.word(owner.region, "LinkRecord", record, "LinkRecord", "word").value = 2
    _members.clear(owner.members, 1)
    give_back(owner)
    assert owner.used_nbytes() < before


def test_full_shared_memory_leaves_the_index_as_it_was(owner: Owner) -> None:
    slot, _, _ = owner.insert(rows=100, inner=1)
    for row in range(100):
        owner.directory.bind(slot, row, request(row))
    owner.full_after = 0
    with pytest.raises(OSError, match="no space left"):
        owner.insert(rows=1000, inner=1)
    owner.full_after = None
    assert owner.directory.index.capacity in (SMALLEST, 2 * SMALLEST)
    assert [owner.directory.find(request(row)) for row in range(100)] == [(slot, row) for row in range(100)]


def test_version_in_the_index_word_changes_with_each_table(owner: Owner) -> None:
    word = memory.word(owner.region, "DirectoryHeader", 0, "DirectoryHeader", "index_word")
    before = word.value
    owner.insert(rows=1000, inner=1)
    assert (word.value >> 16, word.value & 0xFF) == ((before >> 16) + 1, (4008).bit_length())
    assert word.value >> 8 & 1 != before >> 8 & 1


def test_all_parts_of_the_index_lie_in_the_directory() -> None:
    entries = {name: (nbytes, count, offset) for name, nbytes, count, offset in _layout.tables()}["index entry"]
    nbytes, count, offset = entries
    assert offset + nbytes * count == _layout.DIRECTORY_SIZE
    assert count == 2 * sum(1 << log2 for log2 in range(8, 23))


def test_index_has_a_maximum_and_says_so(owner: Owner) -> None:
    with pytest.raises(MemoryError, match="the key index is at its maximum of"):
        owner.directory.make_room(2**32 - 1)
    assert owner.directory.index.capacity == SMALLEST
