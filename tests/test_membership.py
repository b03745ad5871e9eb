"""Who is in a namespace and who lives: joins, leaves, sweeps, forks, crowds, and what is in the way."""
from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import memory
import pytest
from members import MEMBER, files, leave, namespace_of
from scripts import Script, run

from shmkv import LLMException, membership, segment
from shmkv.membership import Namespace

SHM = Path(segment.SHM_DIR)
FORK = """
import os, sys
from shmkv import _life
from shmkv.membership import Namespace
from shmkv.errors import LLMException

namespace, member = Namespace.join(sys.argv[1], 1, 1)

def in_child():
    assert namespace.life.epoch != _life.epoch()
    other, twin = None, "joined"
    try:
        Namespace.join(sys.argv[1], 1, 1)
    except LLMException as error:
        twin = str(error)
    other, own = Namespace.join(sys.argv[1], 2, 2)
    assert own.slot != member.slot and other.lives(member) and other.lives(own)
    with other.cold(20000):
        other.leave(own)
    return 0 if f"used by the living process {os.getppid()}" in twin else 1

child = os.fork()
if child == 0:
    os._exit(in_child())
status = os.waitpid(child, 0)[1]
print(status, _life.own(namespace.life_fd, member.slot), [m.cluster_id for m in namespace.members()])
with namespace.cold(20000):
    namespace.leave(member)
"""


def touch(*names: str) -> None:
    for each in names:
        (SHM / each).write_bytes(b"x" * 5000)


def existing(*names: str) -> list[str]:
    return [each for each in names if (SHM / each).exists()]


def test_first_member_makes_the_files_and_the_last_removes_them(name: str) -> None:
    namespace, member = Namespace.join(name, 7, 1)
    assert files(name) == {"life", "members.v2"}
    assert {(SHM / f"{name}.{each}").stat().st_mode & 0o7777 for each in files(name)} == {0o600}
    assert (member.slot, member.cluster_id, member.pid, member.role) == (0, 7, os.getpid(), 1)
    assert member.directory == f"d.{member.incarnation:016x}"
    assert namespace.members() == [member]
    assert namespace.find(7) == member
    assert namespace.find(8) is None
    leave(namespace, member)
    assert files(name) == set()


def test_members_see_each_other(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    with Script(MEMBER, name, 2) as other:
        slot, incarnation = map(int, other.hear().split())
        found = namespace.find(2)
        assert found is not None
        assert (found.slot, found.incarnation, found.pid) == (slot, incarnation, other.pid)
        assert namespace.lives(found)
        assert {each.slot for each in namespace.members()} == {0, 1}
        other.say("leave")
        assert other.hear() == "left"
        assert namespace.members() == [member]
    leave(namespace, member)
    assert files(name) == set()


def test_incarnations_never_repeat(name: str) -> None:
    seen = set()
    for _ in range(5):
        namespace, member = Namespace.join(name, 1, 1)
        seen.add(member.incarnation)
        leave(namespace, member)
    assert len(seen) == 5
    assert 0 not in seen


def test_role_is_shown_to_others(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    namespace.set_role(member, 2)
    assert namespace.members()[0].role == 2
    leave(namespace, member)


def test_id_of_a_living_cluster_is_refused(name: str) -> None:
    namespace, member = Namespace.join(name, 5, 1)
    said = run(MEMBER, name, 5)
    assert f"cluster id 5 is used by the living process {os.getpid()} in namespace '{name}'" in said
    assert namespace.members() == [member]
    leave(namespace, member)
    assert files(name) == set()


def test_id_of_a_stopped_cluster_is_refused_too(name: str) -> None:
    with Script(MEMBER, name, 5) as other:
        other.hear()
        os.kill(other.pid, 19)
        with pytest.raises(LLMException, match=f"used by the living process {other.pid}"):
            Namespace.join(name, 5, 1)
        os.kill(other.pid, 18)
        other.say("leave")
        assert other.hear() == "left"
    assert files(name) == set()


def test_killed_member_is_swept_by_the_next_join(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    with Script(MEMBER, name, 5) as other:
        incarnation = int(other.hear().split()[1])
        left = [f"{name}.d.{incarnation:016x}", f"{name}.c.{incarnation:016x}.1", f"{name}.c.{incarnation:016x}.ff"]
        foreign = [f"{name}x.c.{incarnation:016x}.1", f"{name}.c.{incarnation ^ 1:016x}.1", f"{name}.d.{member.incarnation:016x}"]
        touch(*left, *foreign)
        other.kill()
    assert namespace.find(5) is None
    with Script(MEMBER, name, 5) as heir:
        slot, again = map(int, heir.hear().split())
        assert (slot, again != incarnation) == (1, True)
        assert existing(*left) == []
        assert existing(*foreign) == foreign
        heir.say("leave")
        assert heir.hear() == "left"
    leave(namespace, member)
    assert existing(*foreign) == foreign[:1]
    (SHM / foreign[0]).unlink()
    assert files(name) == set()


def test_sweep_can_look_without_touching(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    with Script(MEMBER, name, 5) as other:
        incarnation = int(other.hear().split()[1])
        left = f"{name}.c.{incarnation:016x}.1"
        touch(left)
        assert namespace.sweep(dry=True) == []
        other.kill()
    assert namespace.sweep(dry=True) == [(left, 8192)]
    assert existing(left) == [left]
    assert namespace.sweep() == [(left, 8192)]
    assert existing(left) == []
    assert namespace.members() == [member]
    leave(namespace, member)


def test_namespace_of_the_dead_begins_afresh_whatever_its_version(name: str) -> None:
    with Script(MEMBER, name, 5) as other:
        other.hear()
        touch(f"{name}.c.00000000000000aa.1", f"{name}.members.v9", f"{name}.d.00000000000000aa")
        other.kill()
    namespace, member = Namespace.join(name, 1, 1)
    assert files(name) == {"life", "members.v2"}
    assert namespace.members() == [member]
    leave(namespace, member)


def test_forked_child_holds_nothing_and_may_join_itself(name: str) -> None:
    assert run(FORK, name) == "0 True [1]\n"
    assert files(name) == set()


def test_cold_lock_is_waited_for_and_its_holder_named(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    with Script(MEMBER, name, 2) as other:
        other.hear()
        other.say("cold")
        assert other.hear() == "cold"
        with pytest.raises(LLMException, match=f"process {other.pid} holds the cold lock of namespace '{name}'"), \
                namespace.cold(30):
            pytest.fail("two processes hold the cold lock")
        other.say()
        with namespace.cold(20000):
            assert not other.process.poll()
        assert other.hear() == "warm"
        other.say("leave")
        assert other.hear() == "left"
    leave(namespace, member)


def test_threads_exclude_each_other_too(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    heard: list[str] = []

    def wait() -> None:
        try:
            with namespace.cold(30):
                heard.append("both inside")
        except LLMException as error:
            heard.append(str(error))

    with namespace.cold(20000):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert heard == [f"another thread of this process is joining or linking in namespace '{name}'"]
    leave(namespace, member)


def test_twenty_processes_join_at_the_same_moment(name: str) -> None:
    programs = [Script(MEMBER, name, number) for number in range(20)]
    try:
        places = [tuple(map(int, each.hear().split())) for each in programs]
        assert sorted(slot for slot, _ in places) == list(range(20))
        assert len({incarnation for _, incarnation in places}) == 20
        looker = namespace_of(name)
        assert sorted(m.cluster_id for m in looker.members() if looker.lives(m)) == list(range(20))
        for each in programs:
            each.say("leave")
        assert {each.hear() for each in programs} == {"left"}
    finally:
        for each in programs:
            each.__exit__(None, None, None)
    assert files(name) == set()


def test_joins_and_leaves_that_cross_lose_no_file(name: str) -> None:
    """The last one removes the files just when the next one has opened them."""
    again = MEMBER.partition("try:")[0] + """
for _ in range(60):
    namespace, member = Namespace.join(name, cluster_id, 1, 20000)
    namespace.check_named()
    assert namespace.find(cluster_id) == member
    with namespace.cold(20000):
        namespace.leave(member)
print("done", flush=True)
"""
    programs = [Script(again, name, number) for number in range(3)]
    try:
        assert [each.hear() for each in programs] == ["done"] * 3
    finally:
        for each in programs:
            each.__exit__(None, None, None)
    assert files(name) == set()


@pytest.mark.parametrize("make", [
    lambda path: path.symlink_to("/nowhere"), lambda path: path.mkdir(0o600), lambda path: os.mkfifo(path, 0o600),
    lambda path: path.touch(0o640)], ids=["symlink", "directory", "fifo", "mode"])
def test_what_is_in_the_way_is_said_and_left(name: str, make: object) -> None:
    path = SHM / f"{name}.life"
    make(path)                              # type: ignore[operator]
    try:
        with pytest.raises(LLMException, match=rf"{name}\.life is in the way .* regular file of this user with mode 0600"):
            Namespace.join(name, 1, 1)
        assert os.path.lexists(path)
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_table_of_another_build_is_said_while_somebody_lives(name: str) -> None:
    with Script(MEMBER, name, 5) as other:
        other.hear()
        table = membership.Region.attach(str(SHM / f"{name}.members.v2"), writable=True)
        memory.header_word(table, "fingerprint").value ^= 1
        with pytest.raises(LLMException, match=r"layout fingerprint .* another build .*processes of another build live"):
            Namespace.join(name, 1, 1)
        memory.header_word(table, "fingerprint").value ^= 1
        other.say("leave")
        assert other.hear() == "left"


def test_cluster_of_another_version_is_found_by_name(name: str) -> None:
    namespace, member = Namespace.join(name, 1, 1)
    (SHM / f"{name}.members.v9").write_bytes((SHM / f"{name}.members.v2").read_bytes())
    (SHM / f"{name}.members.v9").chmod(0o600)
    assert namespace.versions_of(1) == [f"{name}.members.v9"]
    assert namespace.versions_of(2) == []
    leave(namespace, member)
    assert files(name) == set()


def test_peek_makes_nothing(name: str) -> None:
    assert Namespace.peek(name) is None
    assert files(name) == set()
    namespace, member = Namespace.join(name, 1, 1)
    assert namespace_of(name).members() == [member]
    leave(namespace, member)


def test_success_is_silent(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shmkv"):
        namespace, member = Namespace.join(name, 1, 1)
        leave(namespace, member)
    assert caplog.records == []
