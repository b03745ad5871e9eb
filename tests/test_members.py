"""Records of the members table, and what is wrong with a table of another build."""
from __future__ import annotations

import memory
import pytest

from shmkv import _layout, _members
from shmkv._mapping import Region


@pytest.fixture
def table() -> Region:
    made = memory.anonymous(_layout.MEMBERS_SIZE)
    _members.create(made)
    return made


def write(table: Region, slot: int, incarnation: int = 9, cluster_id: int = 4, directory: bytes = b"d.9") -> None:
    _members.write(table, slot, incarnation=incarnation, cluster_id=cluster_id, pid=77, role=2, start_time=123,
                   directory=directory)


def test_record_is_read_as_written(table: Region) -> None:
    assert _members.read(table, 5) is None
    write(table, 5, incarnation=2**64 - 1, cluster_id=2**63)
    assert _members.read(table, 5) == (2**64 - 1, 2**63, 77, 2, 123, "d.9")
    _members.set_role(table, 5, 1)
    assert _members.read(table, 5)[3] == 1
    _members.clear(table, 5)
    assert _members.read(table, 5) is None


def test_name_that_fills_its_field_is_cut(table: Region) -> None:
    write(table, 0, directory=b"x" * 40)
    assert _members.read(table, 0)[5] == "x" * 31


def test_first_and_last_slot_stand_apart(table: Region) -> None:
    write(table, 0, incarnation=1)
    write(table, _layout.MEMBERS_LIMIT - 1, incarnation=2)
    assert [_members.read(table, slot)[0] for slot in (0, _layout.MEMBERS_LIMIT - 1)] == [1, 2]
    assert not any(_members.read(table, slot) for slot in range(1, _layout.MEMBERS_LIMIT - 1))


def test_joins_are_counted(table: Region) -> None:
    assert _members.joins(table) == 0
    for _ in range(3):
        _members.count_join(table)
    assert _members.joins(table) == 3


def test_good_header_has_no_fault(table: Region) -> None:
    assert _members.header_fault(table, "members") == ""


@pytest.mark.parametrize(("name", "value", "sentence"), [
    ("version", 0, f"the members is not ready: layout version 0, expected {_layout.VERSION}"),
    ("version", _layout.VERSION + 1, f"has layout version {_layout.VERSION + 1}, expected {_layout.VERSION}"),
    ("magic", 7, "has magic 0x7, expected 0x"),
    ("fingerprint", 1, "has layout fingerprint 0x00000001, expected 0x"),
    ("nbytes", 1, "and says 1, expected"),
    ("incarnation", 3, "belongs to incarnation 0x3, expected 0x0"),
])
def test_fault_says_what_was_found_and_expected(table: Region, name: str, value: int, sentence: str) -> None:
    memory.header_word(table, name).value = value
    assert sentence in _members.header_fault(table, "members")


def test_table_of_another_size_is_at_fault(table: Region) -> None:
    short = memory.anonymous(_layout.MEMBERS_SIZE - 4096)
    memory.content(short)[:] = memory.content(table, 0, short.nbytes)
    assert f"has {short.nbytes} bytes" in _members.header_fault(short, "members")
    assert "not ready" in _members.header_fault(memory.anonymous(8), "members")


def test_clusters_of_another_version_can_be_named(table: Region) -> None:
    write(table, 3, cluster_id=30)
    write(table, 8, cluster_id=80)
    memory.header_word(table, "version").value = 9
    assert _members.foreign_clusters(table) == [30, 80]


@pytest.mark.parametrize(("struct", "name", "value"), [
    ("MembersHeader", "slots", 70_000), ("MembersHeader", "record_nbytes", 23), ("Header", "header_nbytes", 2**64 - 8),
    ("Header", "magic", 1), ("Header", "header_nbytes", _layout.MEMBERS_SIZE - 23),
])
def test_nonsense_in_a_foreign_table_names_nobody(table: Region, struct: str, name: str, value: int) -> None:
    write(table, 3, cluster_id=30)
    memory.word(table, "", 0, struct, name).value = value
    assert _members.foreign_clusters(table) == []


def test_foreign_table_that_is_too_short_names_nobody() -> None:
    assert _members.foreign_clusters(memory.anonymous(64)) == []


def test_foreign_table_cut_off_is_read_to_its_end(table: Region) -> None:
    write(table, 0, cluster_id=10)
    write(table, 500, cluster_id=20)
    short = memory.anonymous(4096 + 128)
    memory.content(short)[:] = memory.content(table, 0, short.nbytes)
    assert _members.foreign_clusters(short) == [10]
