"""The owner's tables: records taken and given back, generations, coverage, reasons, pins, and what readers are told."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import futexes
import memory
import pytest
from memory import ACCEPTOR, INITIATOR, Owner, prefix, request

from shmkv import _layout, _lookup, _members

ROW_LIVE, ROW_CONSUMED, ROW_REMOVED, ROW_CONSUMED_OUT, ROW_REMOVED_OUT = 1, 2, 3, 4, 5
RING = 64


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


def row_word(owner: Owner, row: int = 0) -> int:
    return int(memory.word(owner.region, "RowRecord", row, "RowRecord", "word").value)


def header(owner: Owner, name: str) -> int:
    return int(memory.word(owner.region, "DirectoryHeader", 0, "DirectoryHeader", name).value)


def test_directory_begins_small_and_valid(owner: Owner) -> None:
    assert sum(nbytes for _, nbytes in owner.reserved) <= 64 << 10
    assert owner.used_nbytes() <= 64 << 10
    assert _members.header_fault(owner.region, "directory", owner.incarnation) == ""
    assert _members.directory_is_open(owner.region)
    assert "incarnation 0xa1, expected 0x7" in _members.header_fault(owner.region, "directory", 7)


def test_closed_directory_says_so(owner: Owner) -> None:
    assert _members.directory_role(owner.region) == 1
    owner.directory.set_role(2)
    assert _members.directory_role(owner.region) == 2
    owner.directory.close()
    assert not _members.directory_is_open(owner.region)


def test_generations_of_caches_never_repeat(owner: Owner) -> None:
    generations = []
    for _ in range(50):
        slot, generation, _ = owner.insert()
        generations.append(generation)
        owner.directory.retire(slot)
        owner.directory.release(slot)
    assert generations == sorted(set(generations))
    assert 0 not in generations


def test_records_of_a_released_cache_are_used_again(owner: Owner) -> None:
    slots = [owner.insert(4, 3)[0] for _ in range(5)]
    before = (header(owner, "rows_reserved"), header(owner, "tensors_reserved"))
    for slot in slots:
        owner.directory.retire(slot)
        owner.directory.release(slot)
    assert [owner.insert(4, 3)[0] for _ in range(5)] == slots
    assert (header(owner, "rows_reserved"), header(owner, "tensors_reserved")) == before


def test_tables_grow_where_they_are(owner: Owner) -> None:
    base = owner.region.base
    caches = [owner.insert(3, 7) for _ in range(200)]
    for number, (slot, _, _) in enumerate(caches):
        owner.directory.bind(slot, 6, request(number))
    assert header(owner, "caches_reserved") >= 200
    assert header(owner, "rows_reserved") >= 1400
    assert header(owner, "tensors_reserved") >= 600
    assert owner.region.base == base
    assert [owner.directory.find(request(n)) for n in range(200)] == [(slot, 6) for slot, _, _ in caches]
    spans = sorted((at, at + nbytes) for at, nbytes in owner.reserved)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= _layout.DIRECTORY_SIZE


@pytest.mark.parametrize("failing", range(4))
def test_insert_without_memory_leaves_nothing(owner: Owner, failing: int) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, request(1))
    owner.full_after = failing
    with pytest.raises(OSError, match="no space left"):
        owner.insert(4000, 400, inner=1)
    owner.full_after = None
    assert owner.directory.find(request(1)) == (slot, 0)
    more, _, _ = owner.insert(70, 40)
    owner.directory.bind(more, 39, request(2))
    assert owner.directory.find(request(2)) == (more, 39)


def test_row_generation_counts_bindings(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    first = owner.directory.row_generation(slot, 0)
    seen = [first]
    for number in range(3):
        owner.directory.bind(slot, 0, request(number))
        seen.append(owner.directory.row_generation(slot, 0))
        assert owner.directory.row_key(slot, 0) == request(number)
    owner.directory.unbind(slot, 0)
    seen.append(owner.directory.row_generation(slot, 0))
    assert owner.directory.row_key(slot, 0) is None
    assert seen == sorted(set(seen))


def test_removed_key_leaves_the_generation(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, request(1))
    before = owner.directory.row_generation(slot, 0)
    owner.directory.remove(slot, 0)
    assert owner.directory.row_generation(slot, 0) == before
    assert owner.directory.find(request(1)) is None
    owner.directory.remove(slot, 0)
    assert header(owner, "ended_count") == 1


def test_row_generation_goes_on_in_the_next_cache(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, request(1))
    before = owner.directory.row_generation(slot, 0)
    owner.directory.remove(slot, 0)
    owner.directory.retire(slot)
    owner.directory.release(slot)
    again, _, _ = owner.insert()
    assert again == slot
    assert owner.directory.row_generation(again, 0) > before
    owner.directory.mark_pulled(again, 0, before, 0, 1)
    owner.directory.bind(again, 0, request(2))
    owner.directory.mark_pulled(again, 0, before, 0, 1)
    assert owner.directory.find(request(2)) == (again, 0)


@pytest.mark.parametrize("num_tensors", [1, 31, 32, 33, 64, 511, 512, 513, 1100])
def test_key_is_consumed_when_every_tensor_was_pulled(owner: Owner, num_tensors: int) -> None:
    slot, _, _ = owner.insert(num_tensors, 2, inner=1)
    owner.directory.bind(slot, 1, request(5))
    generation = owner.directory.row_generation(slot, 1)
    for first in range(0, num_tensors - 1, 100):
        owner.directory.mark_pulled(slot, 1, generation, first, min(100, num_tensors - 1 - first))
        assert owner.directory.find(request(5)) == (slot, 1)
    owner.directory.mark_pulled(slot, 1, generation, num_tensors - 1, 1)
    assert owner.directory.find(request(5)) is None
    assert owner.directory.why_ended(request(5)) == _lookup.CONSUMED
    assert owner.directory.noticed_slots() == [slot]
    assert owner.directory.noticed_slots() == []


def test_coverage_begins_anew_with_each_binding(owner: Owner) -> None:
    slot, _, _ = owner.insert(2)
    for number in range(3):
        owner.directory.bind(slot, 0, request(number))
        owner.directory.mark_pulled(slot, 0, owner.directory.row_generation(slot, 0), 0, 1)
        assert owner.directory.find(request(number)) == (slot, 0)
    owner.directory.mark_pulled(slot, 0, owner.directory.row_generation(slot, 0), 1, 1)
    assert owner.directory.find(request(2)) is None


def test_prefix_key_is_never_consumed(owner: Owner) -> None:
    slot, _, _ = owner.insert(2)
    owner.directory.bind(slot, 0, prefix(5))
    owner.directory.mark_pulled(slot, 0, owner.directory.row_generation(slot, 0), 0, 2)
    assert owner.directory.settle(slot) == 1
    assert owner.directory.find(prefix(5)) == (slot, 0)


def cover_by_hand(owner: Owner, slot: int, num_tensors: int) -> None:
    """What a reader leaves that died after its last mark and before its swap."""
    generation = owner.directory.row_generation(slot, 0)
    words = memory.content(owner.region, memory.TABLES["coverage line"][1], 128).view("u8")
    words[0] = generation << 32 | (1 << num_tensors) - 1


def test_settle_consumes_rows_that_a_dead_reader_left_full(owner: Owner) -> None:
    slot, _, _ = owner.insert(3)
    owner.directory.bind(slot, 0, request(1))
    assert owner.directory.settle(slot) == 1
    cover_by_hand(owner, slot, 3)
    assert owner.directory.find(request(1)) == (slot, 0)
    assert owner.directory.settle(slot) == 0
    assert owner.directory.find(request(1)) is None
    assert owner.directory.why_ended(request(1)) == _lookup.CONSUMED


def test_settle_keeps_a_full_prefix_row(owner: Owner) -> None:
    slot, _, _ = owner.insert(3)
    owner.directory.bind(slot, 0, prefix(1))
    cover_by_hand(owner, slot, 3)
    assert owner.directory.settle(slot) == 1


def test_ring_remembers_the_last_ended_keys(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    for number in range(RING + 10):
        owner.directory.bind(slot, 0, request(number))
        if number % 2:
            owner.directory.mark_pulled(slot, 0, owner.directory.row_generation(slot, 0), 0, 1)
            owner.directory.settle(slot)
        else:
            owner.directory.remove(slot, 0)
    reasons = [owner.directory.why_ended(request(number)) for number in range(RING + 10)]
    assert reasons[:10] == [_lookup.NEVER] * 10
    assert reasons[10:] == [_lookup.REMOVED, _lookup.CONSUMED] * (RING // 2)


def test_ring_tells_the_latest_end_of_a_key(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, request(1))
    owner.directory.remove(slot, 0)
    owner.directory.bind(slot, 0, request(1))
    owner.directory.mark_pulled(slot, 0, owner.directory.row_generation(slot, 0), 0, 1)
    owner.directory.settle(slot)
    assert owner.directory.why_ended(request(1)) == _lookup.CONSUMED


def test_row_that_left_the_index_still_says_how_its_key_ended(owner: Owner) -> None:
    """A reader that is in the row goes by it: consumed by another is a success, removed is none."""
    slot, _, _ = owner.insert(rows=2)
    for row in range(2):
        owner.directory.bind(slot, row, request(row))
    owner.directory.mark_pulled(slot, 0, owner.directory.row_generation(slot, 0), 0, 1)
    owner.directory.remove(slot, 1)
    assert owner.directory.settle(slot) == 0
    assert [row_word(owner, row) & 0xFF for row in range(2)] == [ROW_CONSUMED_OUT, ROW_REMOVED_OUT]


def test_row_beyond_its_cache_is_refused(owner: Owner) -> None:
    slot, _, _ = owner.insert(rows=2)
    owner.insert(rows=2)
    with pytest.raises(IndexError, match="row 2 of 2"):
        owner.directory.bind(slot, 2, request(1))


@pytest.mark.parametrize("slot", [5, 1 << 16, (1 << 32) - 1])
def test_slot_without_a_cache_is_refused(owner: Owner, slot: int) -> None:
    for call in (owner.directory.generation, owner.directory.retire, owner.directory.release, owner.directory.settle):
        with pytest.raises(IndexError, match=f"no cache in slot {slot}"):
            call(slot)


def test_generation_of_a_slot_is_that_of_its_cache(owner: Owner) -> None:
    slot, generation, _ = owner.insert(1, 1)
    assert owner.directory.generation(slot) == generation


def test_unbound_row_is_unpublished(owner: Owner) -> None:
    slot, _, _ = owner.insert(3)
    owner.directory.bind(slot, 0, request(1))
    assert owner.directory.progress(slot, 0) == 3
    owner.directory.unbind(slot, 0)
    assert owner.directory.progress(slot, 0) == 0


SAME, OTHER = True, False
CHANGES = {
    "first key": (["bind"], SAME), "first key, removed": (["bind", "remove"], SAME), "published": (["publish"], SAME),
    "unbound": (["unbind"], OTHER), "unbound, published": (["unbind", "publish"], OTHER),
    "unbound, bound": (["unbind", "bind"], OTHER),
    "bound, unbound": (["bind", "unbind"], OTHER), "bound twice": (["bind", "bind"], OTHER),
    "bound, removed, bound": (["bind", "remove", "bind"], OTHER), "unbound twice": (["unbind", "unbind"], OTHER),
}


@pytest.mark.parametrize(("changes", "same"), CHANGES.values(), ids=list(CHANGES))
def test_row_without_a_key_is_the_same_row_until_it_is_unbound_or_bound_again(owner: Owner, changes: list[str], same: bool) -> None:
    slot, _, _ = owner.insert(1, 3)
    calls = {"bind": lambda: owner.directory.bind(slot, 1, request(1)), "unbind": lambda: owner.directory.unbind(slot, 1),
             "remove": lambda: owner.directory.remove(slot, 1), "publish": lambda: owner.directory.publish(slot, 1, 1)}
    for others in ([1], [0, 1, 2]):
        seen = owner.directory.row_words(slot, others)
        assert owner.directory.are_same_rows(slot, others, seen)
    for change in changes:
        calls[change]()
    assert owner.directory.are_same_rows(slot, [0, 1, 2], seen) is same


def test_rebinding_a_row_ends_its_old_key(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, request(1))
    owner.directory.bind(slot, 0, request(2))
    assert owner.directory.find(request(1)) is None
    assert owner.directory.find(request(2)) == (slot, 0)
    assert owner.directory.why_ended(request(1)) == _lookup.REMOVED
    assert row_word(owner) & 0xFF == ROW_LIVE


@pytest.mark.parametrize(("side", "field", "number"), [
    (INITIATOR, "hazard", 0), (INITIATOR, "leases", 0), (INITIATOR, "leases", 191)])
def test_cache_is_pinned_by_a_hazard_or_lease(owner: Owner, side: int, field: str, number: int) -> None:
    _, generation, _ = owner.insert()
    record = owner.claim()
    assert not owner.pinned(generation)
    owner.side(record, side, field, number).value = generation
    assert owner.pinned(generation)
    assert not owner.pinned(generation + 1)
    memory.word(owner.region, "LinkRecord", record, "LinkRecord", "state").value += 2   # REMOVED: hazards keep counting
    assert owner.pinned(generation)
    _members.clear(owner.members, 1)
    assert not owner.pinned(generation)


def test_own_side_of_a_foreign_record_pins(owner: Owner) -> None:
    other = Owner(incarnation=0xC3, cluster_id=3)
    try:
        record = other.claim(slot=1, incarnation=0xB2)
        other.side(record, ACCEPTOR, "hazard").value = 12
        assert owner.directory.pinned(12, memory.NO_LIFE_FILE, other.members, [(other.region, record)])
        assert not owner.directory.pinned(13, memory.NO_LIFE_FILE, other.members, [(other.region, record)])
        assert not owner.directory.pinned(12, memory.NO_LIFE_FILE, other.members, [])
    finally:
        other.close()


def test_progress_is_published_row_by_row(owner: Owner) -> None:
    slot, _, _ = owner.insert(4, 3, published=0)
    owner.directory.publish(slot, 1, 2)
    assert [owner.directory.progress(slot, row) for row in range(3)] == [0, 2, 0]


def test_every_change_of_a_key_moves_the_event_word(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    seen = [header(owner, "key_event")]
    for change in (lambda: owner.directory.bind(slot, 0, request(1)), lambda: owner.directory.remove(slot, 0),
                   lambda: owner.directory.bind(slot, 0, request(2)), lambda: owner.directory.unbind(slot, 0)):
        change()
        seen.append(header(owner, "key_event"))
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(("table", "waiters", "event"), [("DirectoryHeader", "key_waiters", "key_event"),
                                                         ("RowRecord", "progress_waiters", "event")])
def test_who_sleeps_until_a_key_or_a_row_changes_is_woken(owner: Owner, table: str, waiters: str, event: str) -> None:
    """As the layout has it for a reader that waits: it counts itself in and sleeps on the word."""
    slot, _, _ = owner.insert(4, published=0)
    memory.word(owner.region, table, 0, table, waiters).value = 1
    word = memory.word(owner.region, table, 0, table, event)
    woken: list[int] = []
    sleeper = threading.Thread(target=lambda: woken.append(futexes.wait(word, word.value, memory.LIVENESS_S)))
    sleeper.start()
    memory.wait_until(lambda: futexes.sleeps_in(sleeper, word), "the sleeper in the kernel")
    if table == "RowRecord":
        owner.directory.publish(slot, 0, 4)
    else:
        owner.directory.bind(slot, 0, request(1))
    sleeper.join()
    assert woken == [0]


@pytest.mark.parametrize("change", ["publish", "bind", "unbind", "remove", "cache_added", "retire", "release", "memory_freed"])
def test_nobody_is_woken_while_nobody_is_counted_in(owner: Owner, change: str) -> None:
    """Threads sleep on the words, and no count says so: if the owner called the kernel all the same, they would be awake. They are
    still there to be woken by the test."""
    slot, _, _ = owner.insert(4, 2)
    owner.directory.bind(slot, 1, request(1))
    words = [memory.word(owner.region, table, 0, table, name) for table, name in (
        ("RowRecord", "event"), ("DirectoryHeader", "key_event"), ("DirectoryHeader", "memory_event"))]
    woken: list[int] = []
    sleepers = [threading.Thread(target=lambda word=word: woken.append(futexes.wait(word, word.value, memory.LIVENESS_S)))
                for word in words]
    for sleeper, word in zip(sleepers, words, strict=True):
        sleeper.start()
        memory.wait_until(lambda sleeper=sleeper, word=word: futexes.sleeps_in(sleeper, word), "the sleeper in the kernel")
    arguments = {"publish": (slot, 0, 4), "bind": (slot, 0, request(2)), "unbind": (slot, 0), "remove": (slot, 1),
                 "retire": (slot,), "release": (slot,)}
    if change == "release":
        owner.directory.retire(slot)
    getattr(owner.directory, change)(*arguments.get(change, ()))
    assert [futexes.wake(word, 2) for word in words] == [1, 1, 1]
    for sleeper in sleepers:
        sleeper.join()
    assert woken == [0, 0, 0]


def test_key_in_a_cache_that_another_process_has_overwritten_is_not_ours(owner: Owner) -> None:
    slot, _, _ = owner.insert()
    owner.directory.bind(slot, 0, request(1))
    assert owner.directory.find(request(1)) == (slot, 0)
    memory.word(owner.region, "CacheRecord", slot, "CacheRecord", "word").value += 1 << 8
    assert owner.directory.find(request(1)) is None


def test_unlinked_segments_are_counted_in_a_ring(owner: Owner) -> None:
    for serial in range(1, 600):
        owner.directory.note_unlinked(serial)
    assert header(owner, "segments_unlinked") == 599
    at = memory.TABLES["EndedKey"][1] + RING * 64
    ring = memory.content(owner.region, at, 512 * 8).view("u8")
    assert [int(ring[number % 512]) for number in range(598 - 511, 599)] == list(range(88, 600))
