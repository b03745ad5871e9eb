"""What a reader finds: keys compared in full, cache ids, reasons, and numbers that no owner writes."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import collisions
import memory
import numpy as np
import pytest
from memory import Owner, Pair, by_id, destination, prefix, request, select
from peer import Namespace

from shmkv import _lookup


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = Pair(namespace.name)
    yield made
    made.close()


def numbered(num_tensors: int, rows: int, inner: int = 16) -> Any:
    """Bytes that tell tensor and row."""
    tensor, row, byte = np.ogrid[:num_tensors, :rows, :inner]
    return ((tensor * 37 + row * 5 + byte * 3) % 251).astype(np.uint8).reshape(num_tensors, 1, rows, inner)


def pull(pair: Pair, words: tuple[int, ...], *, consumes: bool = False, **how: int) -> tuple[int, Any]:
    """(status, destination's row 0) of a pull into two tensors of rows of 16 bytes."""
    cache, content = destination(2, 1, 1, 16)
    status = memory.pull(pair.handle, cache, words, select(**how), consumes=consumes)
    return status, content[:, 0, 0, :]


def test_hash_is_the_one_the_tests_undo() -> None:
    for words in [(1, 0, 0, 0), (1, 5, 2**64 - 1, 7), (2, 2**64 - 1, 9, 1), (3, 2**63, 2**62 + 1, 2**64 - 1)]:
        assert _lookup.hash_of_key(*words) == collisions.hash_of(*words)
        assert collisions.unmix(collisions.mix(words[1])) == words[1]


def test_fr_046_keys_with_one_hash_are_told_apart(pair: Pair) -> None:
    keys = collisions.colliding(128, wanted=0xDEADBEEF12345678)
    assert {_lookup.hash_of_key(*words) for words in keys} == {collisions.hash_of(*keys[0])}
    published, others = keys[::2], keys[1::2]
    bytes_ = numbered(2, 64)
    source = pair.add(bytes_)
    for row, words in enumerate(published):
        pair.owner.directory.bind(source.slot, row, words)
    for row, words in enumerate(published):
        status, got = pull(pair, words)
        assert status == 0
        np.testing.assert_array_equal(got, bytes_[:, 0, row, :])
    for words in others:
        status, got = pull(pair, words)
        assert status == _lookup.NEVER
        assert (got == 0x5A).all()


@pytest.mark.parametrize("wanted", [0, 0x5555555500000000, 2**64 - 1])
def test_fr_046_keys_that_differ_in_req_id_alone(owner: Owner, wanted: int) -> None:
    first, second = collisions.same_but_for_req_id(wanted, model_id=4)
    assert _lookup.hash_of_key(*first) == _lookup.hash_of_key(*second)
    slot, _, _ = owner.insert(rows=2)
    owner.directory.bind(slot, 0, first)
    assert owner.directory.find(second) is None
    owner.directory.bind(slot, 1, second)
    assert (owner.directory.find(first), owner.directory.find(second)) == ((slot, 0), (slot, 1))
    owner.directory.remove(slot, 0)
    assert (owner.directory.find(first), owner.directory.find(second)) == (None, (slot, 1))
    assert owner.directory.why_ended(first) == _lookup.REMOVED


def test_fr_046_keys_that_differ_in_model_id_alone(owner: Owner) -> None:
    first, second = collisions.same_but_for_model_id(0x1234567890ABCDEF, req_id=7)
    assert _lookup.hash_of_key(*first) == _lookup.hash_of_key(*second)
    assert [a != b for a, b in zip(first, second, strict=True)] == [False, False, False, True]
    slot, _, _ = owner.insert(rows=2)
    owner.directory.bind(slot, 0, first)
    assert owner.directory.find(second) is None
    owner.directory.bind(slot, 1, second)
    assert (owner.directory.find(first), owner.directory.find(second)) == ((slot, 0), (slot, 1))


def test_rows_of_a_scribbled_record_end_with_their_table(pair: Pair) -> None:
    """Its first row is right and their number is not: the last of them would lie behind the table of rows."""
    pair.add(numbered(2, 1))
    source = pair.add(numbered(2, 2))
    rows_max = 1 << 21
    memory.word(pair.owner.region, "CacheRecord", source.slot, "CacheRecord", "num_rows").value = rows_max
    cache, _ = destination(2, 1, 1, 16)
    assert memory.pull(pair.handle, cache, by_id(source.cache_id), select(src_row=rows_max - 1)) == _lookup.NEVER


def test_fr_046_each_of_four_fields_counts(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, (1, 10, 20, 30))
    assert owner.directory.find((1, 10, 20, 30)) == (slot, 0)
    for other in [(2, 10, 20, 30), (1, 11, 20, 30), (1, 10, 21, 30), (1, 10, 20, 31)]:
        assert owner.directory.find(other) is None


def test_request_and_prefix_of_one_number_are_two_keys(owner: Owner) -> None:
    slot, _, _ = owner.insert(rows=2)
    owner.directory.bind(slot, 0, request(5))
    assert owner.directory.find(prefix(5)) is None
    owner.directory.bind(slot, 1, prefix(5))
    assert (owner.directory.find(request(5)), owner.directory.find(prefix(5))) == ((slot, 0), (slot, 1))


def test_row_by_cache_id(pair: Pair) -> None:
    bytes_ = numbered(2, 3)
    source = pair.add(bytes_)
    for row in range(3):
        status, got = pull(pair, by_id(source.cache_id), src_row=row)
        assert status == 0
        np.testing.assert_array_equal(got, bytes_[:, 0, row, :])
    assert pull(pair, by_id(source.cache_id), src_row=3)[0] == _lookup.NEVER
    for cache_id in (0, -1, 99, 2**62):
        assert pull(pair, (0, cache_id & 2**64 - 1, 0, 0))[0] == _lookup.NEVER


def test_cache_id_of_a_freed_cache_is_never_another_cache(pair: Pair) -> None:
    first = pair.add(numbered(2, 1))
    pair.owner.directory.retire(first.slot)
    assert pull(pair, by_id(first.cache_id))[0] == _lookup.REMOVED
    pair.owner.directory.release(first.slot)
    second = pair.add(numbered(2, 1))
    assert second.slot == first.slot
    assert pull(pair, by_id(first.cache_id))[0] == _lookup.NEVER
    assert pull(pair, by_id(second.cache_id))[0] == 0


def test_why_a_key_is_not_there(pair: Pair) -> None:
    source = pair.add(numbered(2, 2))
    bind, key = pair.owner.directory.bind, request(1)
    assert pull(pair, key)[0] == _lookup.NEVER
    bind(source.slot, 0, key)
    assert pull(pair, key, consumes=True)[0] == 0
    assert pull(pair, key)[0] == _lookup.CONSUMED
    assert pair.owner.directory.settle(source.slot) == 0
    assert pull(pair, key)[0] == _lookup.CONSUMED
    bind(source.slot, 0, key)
    assert pull(pair, key)[0] == 0
    pair.owner.directory.remove(source.slot, 0)
    assert pull(pair, key)[0] == _lookup.REMOVED
    assert pull(pair, request(2))[0] == _lookup.NEVER


def test_unpublished_row_is_not_there_yet(pair: Pair) -> None:
    source = pair.add(numbered(2, 1), published=0)
    pair.owner.directory.bind(source.slot, 0, request(1))
    for words in (request(1), by_id(source.cache_id)):
        assert pull(pair, words)[0] == _lookup.UNPUBLISHED
    pair.owner.directory.publish(source.slot, 0, 1)
    cache, content = destination(1, 1, 1, 16)
    assert memory.pull(pair.handle, cache, request(1), select(src_count=1)) == 0
    assert (content[0] == numbered(2, 1)[0]).all()
    assert pull(pair, request(1))[0] == _lookup.UNPUBLISHED
    pair.owner.directory.publish(source.slot, 0, 2)
    assert pull(pair, request(1))[0] == 0


def test_index_word_that_no_owner_writes(pair: Pair) -> None:
    pair.owner.directory.bind(pair.add(numbered(2, 1)).slot, 0, request(1))
    word = memory.word(pair.owner.region, "DirectoryHeader", 0, "DirectoryHeader", "index_word")
    good = word.value
    for log2 in (0, 7, 23, 255):
        word.value = good >> 8 << 8 | log2
        assert pull(pair, request(1))[0] == _lookup.DAMAGED
    word.value = good
    assert pull(pair, request(1))[0] == 0


@pytest.mark.parametrize(("name", "value"), [
    ("first_tensor", 2**32 - 1), ("num_tensors", 2**32 - 1), ("first_row", 2**31), ("num_rows", 2**32 - 1),
    ("first_coverage", 2**32 - 1), ("coverage_lines", 0), ("num_rows", 0), ("first_row", 5), ("coverage_lines", 2**32 - 1),
])
def test_cache_record_that_no_owner_writes(pair: Pair, name: str, value: int) -> None:
    source = pair.add(numbered(2, 1))
    pair.owner.directory.bind(source.slot, 0, request(1))
    memory.word(pair.owner.region, "CacheRecord", source.slot, "CacheRecord", name).value = value
    assert pull(pair, request(1))[0] == _lookup.DAMAGED
    assert pull(pair, by_id(source.cache_id))[0] in _lookup.MISSES | {_lookup.DAMAGED, 0}


@pytest.mark.parametrize(("name", "value"), [("cache_slot", 2**32 - 1), ("cache_slot", 40_000), ("batch_index", 9)])
def test_row_record_that_no_owner_writes(pair: Pair, name: str, value: int) -> None:
    source = pair.add(numbered(2, 1))
    pair.owner.directory.bind(source.slot, 0, request(1))
    memory.word(pair.owner.region, "RowRecord", 0, "RowRecord", name).value = value
    assert pull(pair, request(1))[0] == _lookup.DAMAGED


def test_description_for_messages(owner: Owner) -> None:
    slot, _, cache_id = owner.insert(3, 2, outer=5, inner=7)
    owner.directory.bind(slot, 1, request(8))
    assert _lookup.describe(owner.region, request(8), 0) == (3, 5, 2, 7, 1)
    assert _lookup.describe(owner.region, by_id(cache_id), 1) == (3, 5, 2, 7, 1)
    assert _lookup.describe(owner.region, by_id(cache_id), 2) is None
    assert _lookup.describe(owner.region, request(9), 0) is None


def test_misses_are_told_from_damage() -> None:
    assert _lookup.DAMAGED not in _lookup.MISSES
    assert {_lookup.NEVER, _lookup.CONSUMED, _lookup.REMOVED, _lookup.UNPUBLISHED} == _lookup.MISSES
