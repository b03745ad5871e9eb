"""Leases in a link's record: taken by number, counted by nobody, scanned by the owner."""
from __future__ import annotations

from collections.abc import Iterator

import memory
import pytest
from memory import INITIATOR, Owner

from shmkv import _layout, _lease, _link_record, _members
from shmkv._link_handle import LinkHandle


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


def put(owner: Owner, record: int, number: int, generation: int) -> None:
    owner.side(record, INITIATOR, "leases", number).value = generation


@pytest.mark.parametrize("number", [0, 1, 95, _lease.MOST - 1])
def test_any_lease_keeps_the_cache_that_it_names(owner: Owner, number: int) -> None:
    (_, first, _), (_, second, _) = owner.insert(), owner.insert()
    record = owner.claim()
    put(owner, record, number, first)
    assert (owner.pinned(first), owner.pinned(second)) == (True, False)
    put(owner, record, number, second)
    assert (owner.pinned(first), owner.pinned(second)) == (False, True)


@pytest.mark.parametrize("state", ["LIVE", "REMOVED", "BROKEN"])
def test_leases_count_whatever_became_of_the_link(owner: Owner, state: str) -> None:
    _, generation, _ = owner.insert()
    record = owner.claim()
    put(owner, record, 7, generation)
    word = memory.word(owner.region, "LinkRecord", record, "LinkRecord", "state")
    assert word.value & 0xFF == _link_record.LIVE
    word.value += {"LIVE": 0, "BROKEN": 1, "REMOVED": _link_record.REMOVED - _link_record.LIVE}[state]
    assert owner.pinned(generation)
    owner.side(record, INITIATOR, "open").value = 0
    assert owner.pinned(generation), "nor of its side"


def test_leases_of_the_dead_do_not_count(owner: Owner) -> None:
    _, generation, _ = owner.insert()
    record = owner.claim(slot=4)
    put(owner, record, 0, generation)
    put(owner, record, _lease.MOST - 1, generation)
    _members.clear(owner.members, 4)
    assert not owner.pinned(generation)
    assert owner.claim(slot=5, incarnation=0xE5, cluster_id=6) == record
    assert _link_record.read(owner.region, record)["sides"][INITIATOR]["leases"] == 0, "cleared before the next one has them"


def test_a_handle_counts_its_own(owner: Owner) -> None:
    record = owner.claim()
    handle = LinkHandle(owner.region, owner.members, memory.NO_LIFE_FILE, record, b"/dev/shm/none.")
    for taken, number in enumerate((3, 0, _lease.MOST - 1), 1):
        put(owner, record, number, 5)
        assert handle.leases == taken
        assert _link_record.read(owner.region, record)["sides"][INITIATOR]["leases"] == taken


def test_the_layout_has_room_for_as_many_as_are_allowed() -> None:
    widths = {(struct, name): width for struct, name, _, width in _layout.fields()}
    assert widths["LinkSide", "leases"] == 8 * _lease.MOST
