"""Life bytes: seen by other processes only, gone with their holder, not inherited, and honestly lost by a close."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import memory
import pytest
from scripts import Script, run

from shmkv import _life

HOLDER = """
import os, sys
from shmkv import _life
fd = os.open(sys.argv[1], os.O_RDWR)
for slot in sys.argv[2:]:
    print(_life.hold_cold(fd) if slot == "cold" else _life.hold(fd, int(slot)), flush=True)
sys.stdin.readline()
"""
LOOKER = """
import os, sys
from shmkv import _life
fd = os.open(sys.argv[1], os.O_RDWR)
print([int(_life.held_by_other(fd, slot)) for slot in range(4)], int(_life.anybody(fd)), _life.cold_holder_pid(fd))
"""
FORKER = """
import os, sys
from shmkv import _life
fd = os.open(sys.argv[1], os.O_RDWR)
assert _life.hold(fd, 2)
before = _life.epoch()
child = os.fork()
if child == 0:
    # The parent lives and holds the byte; the child has nothing, and dropping does not touch what is not its own.
    _life.drop(fd, 2)
    good = _life.epoch() != before and _life.held_by_other(fd, 2) and not _life.hold(fd, 2) and not _life.own(fd, 2)
    os._exit(0 if good else 1)
status = os.waitpid(child, 0)[1]
print(status, _life.epoch() == before, _life.own(fd, 2))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "life"
    made.touch(0o600)
    return made


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


def test_byte_of_a_living_process_is_held(path: Path, fd: int) -> None:
    with Script(HOLDER, path, 3) as other:
        assert other.hear() == "True"
        assert [_life.held_by_other(fd, slot) for slot in range(5)] == [False, False, False, True, False]
        assert _life.anybody(fd)
        assert not _life.hold(fd, 3)
        assert not _life.own(fd, 3)
        assert _life.hold(fd, 2)


def test_killed_process_holds_nothing(path: Path, fd: int) -> None:
    with Script(HOLDER, path, 0, 1023) as other:
        assert [other.hear(), other.hear()] == ["True", "True"]
        assert _life.held_by_other(fd, 1023)
        other.kill()
    assert not _life.held_by_other(fd, 0)
    assert not _life.held_by_other(fd, 1023)
    assert not _life.anybody(fd)
    assert _life.hold(fd, 0)


def test_stopped_process_lives(path: Path, fd: int) -> None:
    with Script(HOLDER, path, 0) as other:
        other.hear()
        os.kill(other.pid, 19)
        assert _life.held_by_other(fd, 0)
        os.kill(other.pid, 18)


def test_holder_of_a_byte_is_named_by_its_pid(path: Path, fd: int) -> None:
    with Script(HOLDER, path, 2) as holder:
        assert holder.hear() == "True"
        assert [_life.holder_pid(fd, slot) for slot in (1, 2)] == [0, holder.pid]
        holder.kill()
        assert _life.holder_pid(fd, 2) == 0
    assert _life.hold(fd, 2)
    assert _life.holder_pid(fd, 2) == 0, "no look shows the locks of the process that looks"


def test_own_bytes_are_shown_to_others_only(path: Path, fd: int) -> None:
    assert _life.hold(fd, 1)
    assert not _life.held_by_other(fd, 1)
    assert not _life.anybody(fd)
    assert _life.own(fd, 1)
    assert not _life.own(fd, 0)
    assert run(LOOKER, path).split("]") == ["[0, 1, 0, 0", " 1 0\n"]


def test_dropped_byte_is_free(path: Path, fd: int) -> None:
    assert _life.hold(fd, 1)
    _life.drop(fd, 1)
    assert not _life.own(fd, 1)
    assert run(LOOKER, path) == "[0, 0, 0, 0] 0 0\n"
    _life.drop(fd, 1)
    assert _life.hold(fd, 1)


def test_cold_lock_excludes_other_processes_and_names_them(path: Path, fd: int) -> None:
    with Script(HOLDER, path, "cold") as other:
        assert other.hear() == "True"
        assert not _life.hold_cold(fd)
        assert _life.cold_holder_pid(fd) == other.pid
        assert not _life.anybody(fd)        # the cold byte is no life byte
        other.say()
        memory.wait_until(lambda: _life.cold_holder_pid(fd) == 0, "the end of the other process")
    assert _life.hold_cold(fd)
    assert _life.cold_holder_pid(fd) == 0
    _life.drop_cold(fd)


def test_bytes_of_another_layout_version_count_as_somebody(path: Path, fd: int) -> None:
    # Every version has a range of its own: this slot number is one of a later version's.
    with Script(HOLDER, path, 5 * 4096) as other:
        assert other.hear() == "True"
        assert _life.anybody(fd)
        assert not any(_life.held_by_other(fd, slot) for slot in range(1024))


def test_close_of_another_descriptor_loses_the_byte(path: Path, fd: int) -> None:
    assert _life.hold(fd, 1)
    os.close(os.open(path, os.O_RDONLY))
    assert not _life.own(fd, 1)
    assert _life.hold(fd, 1)
    assert _life.own(fd, 1)


def test_forked_child_inherits_no_byte_and_has_another_epoch(path: Path) -> None:
    assert run(FORKER, path) == "0 True True\n"


def test_bad_descriptor_says_so_or_counts_as_alive() -> None:
    with pytest.raises(OSError, match="cannot lock byte"):
        _life.hold(-1, 0)
    with pytest.raises(OSError, match="cannot unlock byte"):
        _life.drop(-1, 0)
    with pytest.raises(OSError, match="cannot query the life byte of slot 7"):
        _life.own(-1, 7)
    assert _life.held_by_other(-1, 0)
    assert _life.anybody(-1)
