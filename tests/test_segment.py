"""Own files in /dev/shm: made exclusively and whole or not at all, kept for the next cache, taken away without a fuss."""
from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import memory
import pytest
from peer import Namespace

from shmkv import _layout, segment
from shmkv._view import TensorView
from shmkv.kv_cache import make_view
from shmkv.segment import Segment, SegmentPool
from shmkv.types import CacheDesc, DataType

SHM = Path(segment.SHM_DIR)
MIB = 1 << 20
DATA = _layout.SEGMENT_DATA


@pytest.fixture
def name(namespace: Namespace) -> Iterator[str]:
    made = f"{namespace.name}.c.1.1"
    yield made
    (SHM / made).unlink(missing_ok=True)


@pytest.fixture
def unlinked() -> list[int]:
    return []


@pytest.fixture
def pool(namespace: Namespace, unlinked: list[int]) -> Iterator[SegmentPool]:
    made = SegmentPool(f"{namespace.name}.c.1.", None, unlinked.append)
    yield made
    made.drain()
    for each in namespace.segments():
        (SHM / each).unlink()


def create(name: str, nbytes: int, reserved: int) -> os.stat_result:
    fd = segment.create(name, nbytes, reserved)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177, 0o777])
def test_file_is_private_whatever_the_umask(name: str, mask: int) -> None:
    before = os.umask(mask)
    try:
        found = create(name, 8192, 8192)
    finally:
        os.umask(before)
    assert stat.S_ISREG(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_uid == os.geteuid()


def test_file_has_its_size_and_its_pages(name: str) -> None:
    found = create(name, 64 * MIB, 3 * MIB + 5000)
    assert found.st_size == 64 * MIB
    assert 3 * MIB + 5000 <= found.st_blocks * 512 <= 4 * MIB
    assert (SHM / name).read_bytes()[:8192] == bytes(8192)


def test_file_without_pages_has_none(name: str) -> None:
    assert create(name, MIB, 0).st_blocks == 0


def test_name_that_exists_is_left_alone(name: str) -> None:
    (SHM / name).write_text("somebody's")
    with pytest.raises(FileExistsError, match=f"{name} exists already"):
        segment.create(name, 8192, 8192)
    assert (SHM / name).read_text() == "somebody's"


def test_symlink_in_the_way_is_not_followed(name: str, tmp_path: Path) -> None:
    (SHM / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        segment.create(name, 8192, 8192)
    assert list(tmp_path.iterdir()) == []


def test_size_is_set_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda fd, nbytes: (sizes.append(nbytes), truncate(fd, nbytes))[1])
    create(name, 5 * MIB, 5 * MIB)
    assert sizes == [5 * MIB]


def test_full_shared_memory_leaves_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if len(given) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        given.append(nbytes)
        allocate(fd, offset, nbytes)

    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as caught:
        segment.create(name, 4 * MIB, 4 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert given == [MIB, MIB]
    assert not (SHM / name).exists()
    assert os.listdir("/proc/self/fd") == descriptors


def test_more_than_there_is_leaves_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own answer: a file larger than all of /dev/shm."""
    wanted = segment.total_nbytes() + MIB
    monkeypatch.setattr(segment, "RESERVE_STEP", 1 << 60)
    monkeypatch.setattr(segment, "free_nbytes", lambda: 1 << 60)
    for limit in ("memory_limit_left", "memory_available"):
        monkeypatch.setattr(segment, limit, lambda: None)
    with pytest.raises(OSError, match=r"No space left|too large") as caught:
        segment.create(name, wanted, wanted)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert not (SHM / name).exists()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_without_fallocate_zeros_are_written(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    found = create(name, 4 * MIB, 2 * MIB + 100)
    assert found.st_size == 4 * MIB
    assert 2 * MIB + 100 <= found.st_blocks * 512 < 3 * MIB
    assert (SHM / name).read_bytes() == bytes(4 * MIB)


def test_interrupted_creation_leaves_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        segment.create(name, MIB, MIB)
    assert not (SHM / name).exists()


@pytest.mark.parametrize(("limit", "number", "sentence"), [
    ("free_nbytes", errno.ENOSPC, f"1048576 bytes are free in {SHM}"),
    ("memory_limit_left", errno.ENOMEM, "cgroup leaves 1048576 bytes"),
    ("memory_available", errno.ENOMEM, "1048576 bytes of memory are available on this machine"),
])
def test_limit_is_said_before_anything_is_taken(name: str, limit: str, number: int, sentence: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, limit, lambda: MIB)
    with pytest.raises(OSError, match=f"{sentence}, 16777216 are needed") as caught:
        segment.create(name, 16 * MIB, 16 * MIB)
    assert caught.value.errno == number
    assert not (SHM / name).exists()
    assert create(name, 16 * MIB, MIB).st_size == 16 * MIB


def test_memory_limit_of_this_process_is_a_number_or_none() -> None:
    left = segment.memory_limit_left()
    assert left is None or isinstance(left, int)
    available = segment.memory_available()
    assert available is None or available > 0
    assert 0 < segment.free_nbytes() <= segment.total_nbytes()


def test_unlinking_a_missing_name_is_silent(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shmkv"):
        segment.unlink(name)
    assert caplog.records == []


def test_name_that_cannot_be_removed_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (SHM / name).mkdir()
    try:
        segment.unlink(name)
        assert (SHM / name).is_dir()
    finally:
        (SHM / name).rmdir()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"cannot remove {SHM}/{name}" in caplog.text


def test_names_are_found_by_prefix(namespace: Namespace) -> None:
    wanted = [f"{namespace.name}.c.{number}" for number in range(3)]
    for each in wanted:
        create(each, 8192, 4096)
    assert sorted(segment.names(f"{namespace.name}.c.")) == wanted
    assert list(segment.starting_with(f"{namespace.name}.c.")) == [(each, 4096) for each in wanted]
    for each in wanted:
        segment.unlink(each)
    assert segment.names(namespace.name) == []


# the pool

def view(of: Segment) -> TensorView:
    return make_view(of.region, DATA, CacheDesc(1, [16], DataType.DT_INT8), 0)


def test_new_segment_is_zero_mapped_and_reserved(pool: SegmentPool, namespace: Namespace) -> None:
    made, fresh = pool.take(MIB)
    assert fresh
    assert made.nbytes == DATA + MIB == pool.made_nbytes
    assert made.name in namespace.segments()
    assert os.stat(SHM / made.name).st_blocks * 512 >= made.nbytes
    assert not memory.content(made.region).any()
    assert memory.mapped(made.name) != []


def test_freed_segment_goes_to_the_next_cache_that_fits(pool: SegmentPool, unlinked: list[int]) -> None:
    made, _ = pool.take(MIB)
    memory.content(made.region)[DATA] = 5
    assert pool.give(made) == 0
    assert pool.kept_nbytes == made.nbytes
    again, fresh = pool.take(MIB * 3 // 4)
    assert again is made
    assert not fresh
    assert pool.kept_nbytes == 0
    assert memory.content(again.region)[DATA] == 5
    assert unlinked == []


def test_segment_that_does_not_fit_stays(pool: SegmentPool) -> None:
    made, _ = pool.take(MIB)
    pool.give(made)
    for nbytes in (MIB + 1, MIB // 4):
        other, fresh = pool.take(nbytes)
        assert fresh
        assert other is not made
    assert pool.kept_nbytes == made.nbytes


def test_smallest_segment_that_fits_is_taken(pool: SegmentPool) -> None:
    made = [pool.take(nbytes)[0] for nbytes in (3 * MIB, 2 * MIB, 4 * MIB)]
    for each in made:
        pool.give(each)
    assert pool.take(2 * MIB)[0] is made[1]
    assert pool.take(2 * MIB)[0] is made[0]
    assert pool.take(2 * MIB)[0] is made[2]


def test_limit_bounds_what_is_kept(namespace: Namespace, unlinked: list[int]) -> None:
    pool = SegmentPool(f"{namespace.name}.c.1.", 2 * MIB + 2 * DATA, unlinked.append)
    made = [pool.take(MIB)[0] for _ in range(3)]
    assert [pool.give(each) for each in made] == [0, 0, MIB + DATA]
    assert unlinked == [made[2].serial]
    assert pool.kept_nbytes == pool.made_nbytes == 2 * MIB + 2 * DATA
    assert pool.drain() == 2 * MIB + 2 * DATA
    assert namespace.segments() == set()


@pytest.mark.parametrize(("data_limit", "kept"), [(MIB - 1, 0), (MIB, 1), (2 * MIB, 2), (10 * MIB, 2)])
def test_tensors_of_what_is_kept_have_a_limit_of_their_own(namespace: Namespace, unlinked: list[int], data_limit: int,
                                                          kept: int) -> None:
    pool = SegmentPool(f"{namespace.name}.c.1.", 2 * MIB + 2 * DATA, unlinked.append, data_limit)
    made = [pool.take(MIB)[0] for _ in range(3)]
    for each in made:
        pool.give(each)
    assert pool.kept_nbytes == kept * (MIB + DATA)
    assert unlinked == [each.serial for each in made[kept:]]
    pool.drain()


def test_nothing_is_kept_with_a_limit_of_zero(namespace: Namespace, unlinked: list[int]) -> None:
    pool = SegmentPool(f"{namespace.name}.c.1.", 0, unlinked.append)
    made, _ = pool.take(MIB)
    assert pool.give(made) == made.nbytes
    assert namespace.segments() == set()


def test_exported_segment_is_never_kept(pool: SegmentPool, namespace: Namespace, unlinked: list[int]) -> None:
    made, _ = pool.take(MIB)
    array = view(made).numpy()
    array[:] = 7
    assert pool.give(made) == made.nbytes
    assert namespace.segments() == set()
    assert unlinked == [made.serial]
    other, fresh = pool.take(MIB)
    assert fresh
    assert other is not made
    assert (array == 7).all()


def test_kept_segments_go_before_memory_is_said_to_be_short(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch,
                                                            unlinked: list[int]) -> None:
    made, _ = pool.take(MIB)
    pool.give(made)
    create_ = segment.create

    def full_while_kept(name: str, nbytes: int, reserved: int, opened: list[int] | None = None) -> int:
        if pool.kept_nbytes:
            raise OSError(errno.ENOSPC, "full")
        return create_(name, nbytes, reserved, opened)

    monkeypatch.setattr(segment, "create", full_while_kept)
    other, fresh = pool.take(8 * MIB)
    assert fresh
    assert other.nbytes == 8 * MIB + DATA
    assert unlinked == [made.serial]


def test_memory_that_is_short_for_good_is_said(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(segment, "create", full)
    with pytest.raises(OSError, match="full"):
        pool.take(MIB)
    assert (pool.made_nbytes, pool.kept_nbytes) == (0, 0)


def test_squatted_name_costs_a_serial_number(pool: SegmentPool, namespace: Namespace,
                                             caplog: pytest.LogCaptureFixture) -> None:
    squatted = SHM / f"{namespace.name}.c.1.1"
    squatted.write_text("here first")
    made, _ = pool.take(MIB)
    assert made.serial == 2
    assert squatted.read_text() == "here first"
    assert "exists already; it is left alone" in caplog.text


def test_eight_squatted_names_are_an_error(pool: SegmentPool, namespace: Namespace) -> None:
    for serial in range(1, 9):
        (SHM / f"{namespace.name}.c.1.{serial:x}").touch()
    with pytest.raises(FileExistsError, match="eight names"):
        pool.take(MIB)


def test_serials_never_repeat(pool: SegmentPool, unlinked: list[int]) -> None:
    serials = []
    for _ in range(5):
        made, _ = pool.take(MIB)
        serials.append(made.serial)
        pool.give(made)
        pool.drain()
    assert serials == unlinked == [1, 2, 3, 4, 5]
