"""Link records: claimed, ended, and used again only when nobody can still be in them."""
from __future__ import annotations

import threading
from collections.abc import Iterator

import memory
import pytest
from memory import ACCEPTOR, INITIATOR, NO_LIFE_FILE, Owner

from shmkv import _layout, _link, _link_record, _members
from shmkv._acceptor import AcceptedLink

FREE, LIVE, BROKEN, REMOVED = range(4)
PATIENT_MS = 20000


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


def read(owner: Owner, record: int) -> dict[str, object]:
    return dict(_link_record.read(owner.region, record))


def word(owner: Owner, record: int, value: int | None = None) -> int:
    found = memory.word(owner.region, "LinkRecord", record, "LinkRecord", "word")
    if value is not None:
        found.value = value
    return int(found.value)


def set_state(owner: Owner, record: int, state: int) -> None:
    found = memory.word(owner.region, "LinkRecord", record, "LinkRecord", "state")
    found.value = found.value & ~0xFF | state


def close_side(owner: Owner, record: int, side: int = INITIATOR) -> None:
    owner.side(record, side, "open").value = 0


def remove(owner: Owner, record: int, timeout_ms: int = PATIENT_MS, force: bool = False) -> bool:
    serial = _link_record.read(owner.region, record)["serial"]
    return bool(AcceptedLink(owner.region, owner.members, NO_LIFE_FILE, record, serial).end(timeout_ms, force))


def test_abandoned_record_is_over_and_can_be_claimed_again(owner: Owner) -> None:
    record = owner.claim()
    _link_record.abandon(owner.region, record)
    found = read(owner, record)
    assert (found["state"], found["sides"][INITIATOR]["open"]) == (REMOVED, 0)      # type: ignore[index]
    assert owner.claim() == record


def test_claimed_record_names_both_sides(owner: Owner) -> None:
    record = owner.claim(slot=3, incarnation=0xB2, cluster_id=20)
    found = read(owner, record)
    acceptor, initiator = found["sides"]        # type: ignore[misc]
    assert (found["state"], found["serial"], found["word"]) == (LIVE, 1, 0)
    assert (acceptor["slot"], acceptor["incarnation"], acceptor["cluster_id"], acceptor["open"]) == (0, 0xA1, 1, 0)
    assert (initiator["slot"], initiator["incarnation"], initiator["cluster_id"], initiator["open"]) == (3, 0xB2, 20, 1)
    assert _link_record.find(owner.region, 20) == [(record, 1)]
    assert _link_record.find(owner.region, 21) == []
    assert _link_record.address(owner.region, record) == owner.region.base + memory.TABLES["LinkRecord"][1] + record * 4096


def test_record_in_use_is_not_claimed_twice(owner: Owner) -> None:
    records = [owner.claim(slot=1 + n, incarnation=0xB0 + n, cluster_id=10 + n) for n in range(4)]
    assert records == [0, 1, 2, 3]
    assert _link_record.claim(owner.region, NO_LIFE_FILE, owner.members, [(0, 1, 1), (9, 2, 2)]) is None


def test_table_of_links_grows(owner: Owner) -> None:
    for _ in range(3):
        _link_record.reserve_more(owner.region, owner._reserve)
    assert _link_record.links_reserved(owner.region) == 32
    assert owner.reserved[-1] == (memory.TABLES["LinkRecord"][1] + 16 * 4096, 16 * 4096)
    for _ in range(10):
        _link_record.reserve_more(owner.region, owner._reserve)
    assert _link_record.links_reserved(owner.region) == _layout.LINKS_LIMIT
    assert owner.claim() == 0


def test_full_table_of_links_does_not_grow(owner: Owner) -> None:
    reserved = memory.word(owner.region, "", 0, "DirectoryHeader", "links_reserved")
    reserved.value = 512
    asked: list[tuple[int, int]] = []
    _link_record.reserve_more(owner.region, lambda offset, nbytes: asked.append((offset, nbytes)))
    assert [nbytes for _, nbytes in asked] == [0]
    assert reserved.value == 512


def test_closed_record_is_used_again_under_a_new_serial(owner: Owner) -> None:
    record = owner.claim()
    owner.side(record, INITIATOR, "counters").value = 5
    assert remove(owner, record)
    close_side(owner, record)
    assert owner.claim(slot=2, incarnation=0xD4, cluster_id=40) == record
    found = read(owner, record)
    assert (found["serial"], found["state"]) == (2, LIVE)
    assert found["sides"][INITIATOR]["counters"][0] == 0     # type: ignore[index]
    assert found["sides"][INITIATOR]["cluster_id"] == 40     # type: ignore[index]


@pytest.mark.parametrize(("side", "field", "number"), [
    (INITIATOR, "hazard", 0), (INITIATOR, "leases", 0), (INITIATOR, "leases", 191), (ACCEPTOR, "hazard", 0),
    (ACCEPTOR, "leases", 17), (ACCEPTOR, "open", 0)])
def test_record_that_somebody_may_still_use_is_left(owner: Owner, side: int, field: str, number: int) -> None:
    record = owner.claim()
    assert remove(owner, record)
    close_side(owner, record)
    owner.side(record, side, field, number).value = 1
    assert owner.claim(slot=2, incarnation=0xD4, cluster_id=40) != record


def test_record_of_a_dead_initiator_is_cleared_and_used_again(owner: Owner) -> None:
    record = owner.claim()
    owner.side(record, INITIATOR, "hazard").value = 8
    owner.side(record, INITIATOR, "leases", 100).value = 9
    word(owner, record, 2)
    assert _link_record.initiator_lives(owner.region, record, NO_LIFE_FILE, owner.members)
    _members.clear(owner.members, 1)
    assert not _link_record.initiator_lives(owner.region, record, NO_LIFE_FILE, owner.members)
    assert _link_record.dead_initiators(owner.region, NO_LIFE_FILE, owner.members) == [(record, 1)]
    before = owner.directory.reaped_count
    assert owner.claim(slot=2, incarnation=0xD4, cluster_id=40) == record
    initiator = read(owner, record)["sides"][INITIATOR]     # type: ignore[index]
    assert (initiator["hazard"], initiator["leases"], word(owner, record)) == (0, 0, 0)
    assert owner.directory.reaped_count == before + 1
    assert _link_record.dead_initiators(owner.region, NO_LIFE_FILE, owner.members) == []


def test_successor_in_a_member_slot_is_not_the_dead_one(owner: Owner) -> None:
    record = owner.claim(slot=1, incarnation=0xB2)
    owner.add_member(1, 0xE5, 2)
    assert not _link_record.initiator_lives(owner.region, record, NO_LIFE_FILE, owner.members)


def test_slot_beyond_the_table_is_dead(owner: Owner) -> None:
    record = owner.claim()
    owner.side(record, INITIATOR, "slot").value = _layout.MEMBERS_LIMIT
    assert not _link_record.initiator_lives(owner.region, record, NO_LIFE_FILE, owner.members)


def test_cluster_of_this_process_lives_without_a_look(owner: Owner) -> None:
    record = owner.claim(slot=1, incarnation=0xB2)
    _members.clear(owner.members, 1)
    try:
        _link_record.set_own(0xB2)
        assert _link_record.initiator_lives(owner.region, record, NO_LIFE_FILE, owner.members)
    finally:
        _link_record.set_own(0)
    assert not _link_record.initiator_lives(owner.region, record, NO_LIFE_FILE, owner.members)


def test_living_links_and_those_whose_reader_is_in_a_cache(owner: Owner) -> None:
    first = owner.claim(slot=3, incarnation=0xB2, cluster_id=20)
    second = owner.claim(slot=4, incarnation=0xB3, cluster_id=30)
    assert _link_record.living(owner.region) == [(first, 1, 20, 3, 0xB2), (second, 1, 30, 4, 0xB3)]
    assert _link_record.busy(owner.region) == []
    owner.side(first, INITIATOR, "hazard").value = 9
    set_state(owner, first, REMOVED)
    assert _link_record.living(owner.region) == [(second, 1, 30, 4, 0xB3)]
    assert _link_record.busy(owner.region) == [first], "its reader is still in the cache"
    assert _link_record.REMOVED == REMOVED


def test_removed_link_is_not_found_and_keeps_its_serial(owner: Owner) -> None:
    record = owner.claim()
    assert remove(owner, record)
    assert (read(owner, record)["state"], read(owner, record)["serial"]) == (REMOVED, 1)
    assert _link_record.find(owner.region, 2) == []
    assert word(owner, record) == 0


def test_remove_waits_its_turn_at_the_word(owner: Owner) -> None:
    record = owner.claim()
    word(owner, record, 2)                  # held by the initiator
    assert not remove(owner, record, timeout_ms=40)
    assert read(owner, record)["state"] == LIVE
    assert word(owner, record) == 2         # no waiters bit left behind
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(remove(owner, record)))
    thread.start()
    memory.wait_until(lambda: bool(word(owner, record) >> 31), "the waiters bit")
    word(owner, record, 3)                  # the initiator gives the word to the waiter
    thread.join()
    assert done == [True]
    assert (read(owner, record)["state"], word(owner, record)) == (REMOVED, 0)


def test_forced_remove_waits_for_nobody(owner: Owner) -> None:
    record = owner.claim()
    word(owner, record, 2)
    assert remove(owner, record, timeout_ms=0, force=True)
    assert (read(owner, record)["state"], word(owner, record)) == (REMOVED, 2)


def test_link_of_a_dead_holder_is_removed_at_once(owner: Owner) -> None:
    record = owner.claim()
    word(owner, record, 2)
    _members.clear(owner.members, 1)
    assert remove(owner, record, timeout_ms=0)
    assert read(owner, record)["state"] == REMOVED


@pytest.mark.parametrize("state", [FREE, BROKEN, REMOVED])
def test_only_a_living_link_can_end(owner: Owner, state: int) -> None:
    record = owner.claim()
    set_state(owner, record, state)
    assert remove(owner, record, force=True)
    assert read(owner, record)["state"] == state


def used_again(owner: Owner, record: int) -> None:
    """The link in a record ends, and another cluster takes the record."""
    _members.clear(owner.members, 1)
    assert owner.claim(slot=5, incarnation=0xE5, cluster_id=50) == record


@pytest.mark.parametrize("force", [False, True])
def test_remove_leaves_the_next_link_of_its_record_alone(owner: Owner, force: bool) -> None:
    record = owner.claim()
    [(slot, serial)] = _link_record.find(owner.region, 2)
    used_again(owner, record)
    assert AcceptedLink(owner.region, owner.members, NO_LIFE_FILE, slot, serial).end(PATIENT_MS, force)
    assert _link_record.find(owner.region, 50) == [(record, serial + 1)]


def opened(owner: Owner, record: int) -> int:
    return int(owner.side(record, ACCEPTOR, "open").value)


def test_record_is_not_used_again_while_its_acceptor_waits_in_it(owner: Owner) -> None:
    record = owner.claim()
    word(owner, record, 2)                  # held by the initiator, which dies
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(remove(owner, record)))
    thread.start()
    memory.wait_until(lambda: bool(word(owner, record) >> 31), "the waiters bit")
    assert opened(owner, record) == 1
    _members.clear(owner.members, 1)
    other = owner.claim(slot=5, incarnation=0xE5, cluster_id=50)
    assert other != record
    thread.join()
    assert (done, opened(owner, record)) == ([True], 0)
    assert _link_record.find(owner.region, 50) == [(other, 1)]
    assert owner.claim(slot=6, incarnation=0xF6, cluster_id=60) == record       # nobody is in it any more


@pytest.mark.parametrize("force", [False, True])
def test_acceptor_shuts_its_side_after_a_remove(owner: Owner, force: bool) -> None:
    record = owner.claim()
    assert remove(owner, record, force=force)
    assert (opened(owner, record), word(owner, record)) == (0, 0)


def test_remove_in_vain_shuts_the_side_and_lets_pushes_in_again(owner: Owner) -> None:
    record = owner.claim()
    link = AcceptedLink(owner.region, owner.members, NO_LIFE_FILE, record, 1)
    word(owner, record, 2)
    assert not link.end(1, False)
    assert (opened(owner, record), word(owner, record), link.users, link.state()) == (0, 2, 0, 0)


def test_late_call_with_an_old_serial_leaves_the_side_of_the_next_link_as_it_is(owner: Owner) -> None:
    record = owner.claim()
    late = AcceptedLink(owner.region, owner.members, NO_LIFE_FILE, record, 1)
    used_again(owner, record)
    owner.side(record, ACCEPTOR, "open").value = 1          # a thread that pushes over the new link
    assert late.end(PATIENT_MS, False)
    assert opened(owner, record) == 1
    assert _link_record.find(owner.region, 50) == [(record, 2)]


def test_links_of_a_record_that_names_no_member_are_over(owner: Owner) -> None:
    record = owner.claim()
    owner.side(record, INITIATOR, "slot").value = 1 << 20
    link = AcceptedLink(owner.region, owner.members, NO_LIFE_FILE, record, 1)
    assert link.look() == _link.PEER_GONE
    assert link.end(PATIENT_MS, False)
