"""What happens to members when files of their namespace or their life bytes go missing."""
from __future__ import annotations

from pathlib import Path

import pytest
from members import MEMBER, files, leave, namespace_of
from scripts import Script

from shmkv import LLMException, _life, segment
from shmkv.membership import Namespace

SHM = Path(segment.SHM_DIR)


def test_life_byte_that_a_close_dropped_is_taken_again(name: str, caplog: pytest.LogCaptureFixture) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    namespace.check_own_life(member)
    assert caplog.records == []
    (SHM / f"{name}.life").read_bytes()
    assert not _life.own(namespace.life_fd, member.slot)
    namespace.check_own_life(member)
    assert _life.own(namespace.life_fd, member.slot)
    assert f"took life byte 0 of {name}.life again" in caplog.text
    leave(namespace, member)


def test_process_that_was_taken_for_dead_is_told(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    (SHM / f"{name}.life").read_bytes()
    with Script(MEMBER, name, 2) as other:
        assert other.hear().split()[0] == "0"
        with pytest.raises(LLMException, match=r"lost its life byte 0 of .* taken for dead: finalize and init again"):
            namespace.check_own_life(member)
        other.say("leave")
        assert other.hear() == "left"
        namespace.life.held.discard(member.slot)
    assert files(name) <= {"life"}
    segment.unlink(f"{name}.life")


def test_process_taken_for_dead_is_told_even_when_its_slot_is_free_again(name: str) -> None:
    """The record that still names us stands in a table that was replaced."""
    namespace, member = Namespace.join(name, 1, 1)
    (SHM / f"{name}.life").read_bytes()
    with Script(MEMBER, name, 2) as first, Script(MEMBER, name, 3) as second:
        assert {first.hear().split()[0], second.hear().split()[0]} == {"0", "1"}
        tenant = first if (namespace_of(name).find(2) or member).slot == member.slot else second
        tenant.say("leave")
        assert tenant.hear() == "left"
        with pytest.raises(LLMException):
            namespace.check_own_life(member)
        other = second if tenant is first else first
        other.say("leave")
        assert other.hear() == "left"
    namespace.life.held.clear()
    segment.unlink(f"{name}.life")


def test_peek_sees_the_namespace_that_has_the_name_now(name: str) -> None:
    for cluster_id in (1, 2):
        with Script(MEMBER, name, cluster_id) as other:
            other.hear()
            looker = namespace_of(name)
            assert [looker.lives(each) for each in looker.members()] == [True]
            assert looker.find(cluster_id) is not None
            assert looker.sweep(dry=True) == []
            other.say("leave")
            assert other.hear() == "left"
        assert files(name) == set()


def test_leaving_an_empty_old_table_leaves_the_new_one(name: str) -> None:
    """Taken for dead as the only member: the table was replaced, and it has a member."""
    namespace, member = Namespace.join(name, 1, 1)
    (SHM / f"{name}.life").read_bytes()
    with Script(MEMBER, name, 2) as other:
        incarnation = int(other.hear().split()[1])
        leave(namespace, member)
        looker = namespace_of(name)
        assert [found.incarnation for found in looker.members()] == [incarnation]
        other.say("leave")
        assert other.hear() == "left"


def test_leaving_after_being_taken_for_dead_harms_nobody(name: str) -> None:
    """The slot has a new tenant: its record and its byte are not ours to remove."""
    namespace, member = Namespace.join(name, 1, 1)
    with Script(MEMBER, name, 3) as witness:
        assert witness.hear().split()[0] == "1"
        (SHM / f"{name}.life").read_bytes()
        with Script(MEMBER, name, 4) as tenant:
            slot, incarnation = map(int, tenant.hear().split())
            assert slot == member.slot
            leave(namespace, member)
            looker = namespace_of(name)
            assert {found.incarnation for found in looker.members()} >= {incarnation}
            for each in (tenant, witness):
                each.say("leave")
                assert each.hear() == "left"


def test_join_after_the_life_file_was_removed_is_refused_here(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    (SHM / f"{name}.life").unlink()
    with pytest.raises(LLMException, match="namespace was removed"):
        Namespace.join(name, 2, 1)
    leave(namespace, member)


def test_others_found_a_new_namespace_where_one_was_removed(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    for each in ("life", "members.v2"):
        (SHM / f"{name}.{each}").unlink()
    with Script(MEMBER, name, 1) as other:
        assert other.hear().split()[0] == "0"
        leave(namespace, member)
        assert {"life", "members.v2"} <= files(name)
        other.say("leave")
        assert other.hear() == "left"
    assert files(name) == set()


@pytest.mark.parametrize("gone", ["life", "members.v2"])
def test_namespace_removed_behind_the_back_is_said(name: str, gone: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    namespace.check_named()
    (SHM / f"{name}.{gone}").unlink()
    with pytest.raises(LLMException, match="namespace was removed"):
        namespace.check_named()
    with pytest.raises(LLMException, match="namespace was removed"), namespace.cold(20000):
        pytest.fail("the cold lock of a removed namespace")
    leave(namespace, member)
    assert files(name) == set()
