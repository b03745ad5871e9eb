"""Mappings: our own regions, and the segments of others, which are opened with suspicion and mapped once."""
from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory
import numpy as np
import pytest
from memory import Pair, by_id, destination, select
from peer import Namespace

from shmkv import _attached, _layout, segment
from shmkv._mapping import Region

SHM = Path(segment.SHM_DIR)
BYTES = (np.arange(256) % 251).astype(np.uint8).reshape(1, 1, 2, 128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch(0o600)
    os.truncate(path, 8192)
    return path


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = Pair(namespace.name)
    made.add(BYTES)
    yield made
    made.close()


# regions

def test_region_outlives_its_descriptor_and_goes_with_its_last_reference(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    region = Region.map(fd, 8192)
    os.close(fd)
    memory.content(region)[:3] = (1, 2, 3)
    assert file.read_bytes()[:3] == bytes((1, 2, 3))
    assert (region.nbytes, region.writable, region.exports) == (8192, True, 0)
    assert len(memory.mapped(str(file))) == 1
    del region
    gc.collect()
    assert memory.mapped(str(file)) == []


def test_mapping_keeps_no_descriptor(file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    regions = [Region.attach(str(file)) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len({region.base for region in regions}) == 20


def test_two_mappings_are_one_memory(file: Path) -> None:
    first, second = (Region.attach(str(file), writable=True) for _ in range(2))
    assert first.base != second.base
    memory.content(first)[100] = 9
    assert memory.content(second)[100] == 9


def test_attached_region_is_read_only_unless_asked(file: Path) -> None:
    region = Region.attach(str(file))
    assert not region.writable
    with pytest.raises(ValueError, match="not writable memory"):
        region.clear(0, 1)
    assert " r--s " in memory.mapped(str(file))[0]
    writable = Region.attach(str(file), writable=True)
    assert writable.writable


def test_mapping_stays_out_of_core_dumps(file: Path) -> None:
    region = Region.attach(str(file))
    smaps = Path("/proc/self/smaps").read_text().split(f"{region.base:x}-", 1)[1]
    flags = next(line for line in smaps.splitlines() if line.startswith("VmFlags"))
    assert "dd" in flags.split()


def test_clear_keeps_to_its_range() -> None:
    region = memory.anonymous(8192)
    memory.content(region)[:] = 7
    region.clear(100, 50)
    assert memory.content(region).nonzero()[0].tolist() == [*range(100), *range(150, 8192)]
    for offset, nbytes in [(8192, 1), (0, 8193), (2**64 - 1, 2), (1, 2**64 - 1)]:
        with pytest.raises(ValueError, match="not writable memory"):
            region.clear(offset, nbytes)


def test_mapping_that_the_kernel_refuses(file: Path) -> None:
    with pytest.raises(OSError, match="cannot map 4096 bytes"):
        Region.map(-1, 4096)
    fd = os.open(file, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError, match="cannot map"):
            Region.map(fd, 4096)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o700, 0o400, 0o1600])
def test_file_of_another_mode_is_foreign(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(PermissionError, match="is not a regular file of this user with mode 0600"):
        Region.attach(str(file))
    assert file.stat().st_size == 8192


def test_what_is_no_regular_file_is_foreign(tmp_path: Path, file: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(PermissionError, match="is not a regular file"):
        Region.attach(str(fifo))
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match=r"cannot open .*link"):
        Region.attach(str(link))
    with pytest.raises(FileNotFoundError):
        Region.attach(str(tmp_path / "nothing"))


def test_every_answer_has_a_sentence() -> None:
    sentences = [_attached.describe(status) for status in range(-1007, -1000)]
    assert len(set(sentences)) == 7
    assert "mode 0600" in " ".join(sentences)
    assert _attached.describe(-2) == os.strerror(2)


# segments of others, through the pull that attaches them

def pull(pair: Pair, row: int = 0) -> tuple[int, Any]:
    cache, content = destination(1, 1, 1, 128)
    status = memory.pull(pair.handle, cache, by_id(pair.sources[0].cache_id), select(src_row=row))
    return status, content.reshape(-1)


def lines(pair: Pair) -> int:
    """Mappings of the segment that the reader made: read-only ones."""
    return sum(" r--s " in line for line in memory.mapped(pair.sources[0].path))


def test_segment_is_mapped_once_and_kept(pair: Pair) -> None:
    assert lines(pair) == 0
    for row in (0, 1, 0):
        status, got = pull(pair, row)
        assert status == 0
        np.testing.assert_array_equal(got, BYTES[0, 0, row])
        assert lines(pair) == 1
    del pair.handle
    gc.collect()
    assert lines(pair) == 0


def test_kept_mapping_works_after_the_name_is_gone(pair: Pair) -> None:
    assert pull(pair)[0] == 0
    pair.sources[0].unlink()
    assert pull(pair, 1)[0] == 0
    assert pair.new_handle().address == pair.handle.address


def test_mapping_goes_when_the_owner_gave_the_segment_up(pair: Pair) -> None:
    assert pull(pair)[0] == 0
    other = pair.add(BYTES)
    pair.owner.directory.note_unlinked(1)
    cache, _ = destination(1, 1, 1, 128)
    assert memory.pull(pair.handle, cache, by_id(other.cache_id), select()) == 0
    assert lines(pair) == 0
    assert len(memory.mapped(other.path)) == 2


def test_reader_that_missed_a_whole_ring_lets_everything_go(pair: Pair) -> None:
    assert pull(pair)[0] == 0
    for serial in range(1000, 1600):
        pair.owner.directory.note_unlinked(serial)
    other = pair.add(BYTES)
    cache, _ = destination(1, 1, 1, 128)
    assert memory.pull(pair.handle, cache, by_id(other.cache_id), select()) == 0
    assert lines(pair) == 0
    assert pull(pair)[0] == 0


def test_many_segments_are_kept_side_by_side(pair: Pair) -> None:
    for number in range(40):
        pair.add(np.full((1, 1, 1, 128), number, np.uint8))
    cache, content = destination(1, 1, 1, 128)
    for _ in range(2):
        for number, source in enumerate(pair.sources[1:]):
            assert memory.pull(pair.handle, cache, by_id(source.cache_id), select()) == 0
            assert (content == number).all()
    assert sum(" r--s " in line for line in memory.mapped(pair.prefix)) == 40
    for serial in range(2, 32):
        pair.owner.directory.note_unlinked(serial)
    assert pull(pair)[0] == 0
    assert sum(" r--s " in line for line in memory.mapped(pair.prefix)) == 11


def readers_mappings(pair: Pair) -> list[int]:
    """Serials of the segments that the reader has mapped."""
    lines_ = (line.split() for line in memory.mapped(pair.prefix) if " r--s " in line)
    return sorted(int(fields[-1].rpartition(".")[2], 16) for fields in lines_)


def test_mappings_beyond_the_limit_replace_those_not_used_for_longest(pair: Pair) -> None:
    kept = 1024                     # of one peer
    for number in range(1, kept + 1):
        pair.add(np.full((1, 1, 1, 128), number % 251, np.uint8))
    cache, content = destination(1, 1, 1, 128)

    def pull_whole(serial: int) -> None:
        source = pair.sources[serial - 1]
        assert memory.pull(pair.handle, cache, by_id(source.cache_id), select()) == 0
        expected = BYTES[0, 0, 0] if serial == 1 else np.full(128, (serial - 1) % 251, np.uint8)
        np.testing.assert_array_equal(content.reshape(-1), expected)

    for serial in range(1, kept + 1):
        pull_whole(serial)
    assert readers_mappings(pair) == list(range(1, kept + 1))
    pull_whole(kept + 1)
    assert readers_mappings(pair) == list(range(2, kept + 2))
    pull_whole(2)                   # used now: it stays
    pull_whole(1)
    assert readers_mappings(pair) == [1, 2, *range(4, kept + 2)]


def set_header(name: str, value: int) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        memory.header_word(pair.sources[0].region, name).value = value
    return change


def truncate(nbytes: int) -> Callable[[Pair], None]:
    return lambda pair: os.truncate(SHM / pair.sources[0].path, nbytes)


def change_mode(pair: Pair) -> None:
    (SHM / pair.sources[0].path).chmod(0o640)


def change_generation(pair: Pair) -> None:
    memory.word(pair.sources[0].region, "", 0, "SegmentHeader", "generation").value += 1


@pytest.mark.parametrize(("damage", "sentence"), [
    (set_header("version", 0), "has not finished it"), (set_header("version", 9), "another layout version"),
    (set_header("magic", 9), "magic"), (set_header("fingerprint", 9), "fingerprint"),
    (set_header("nbytes", 9), "size"), (set_header("incarnation", 9), "another cluster or cache"),
    (set_header("serial", 9), "another cluster or cache"), (change_generation, "another cluster or cache"),
    (truncate(_layout.SEGMENT_DATA), "size"), (truncate(1 << 20), "size"), (truncate(0), "size"),
    (change_mode, "regular file of this user"),
])
def test_segment_that_is_not_what_was_recorded(pair: Pair, damage: Callable[[Pair], None], sentence: str) -> None:
    damage(pair)
    status, got = pull(pair)
    assert status < 0
    assert sentence in _attached.describe(status)
    assert (got == 0x5A).all()
    assert pair.handle.look() == 0


def test_kept_segment_that_was_overwritten_is_refused_for_the_next_cache(pair: Pair) -> None:
    first = pair.sources[0]
    assert pull(pair)[0] == 0
    pair.owner.directory.retire(first.slot)
    pair.owner.directory.release(first.slot)
    _, _, cache_id = pair.owner.insert(1, 2, inner=128, serial=1, memory=first.region)
    set_header("magic", 9)(pair)
    cache, _ = destination(1, 1, 1, 128)
    assert "magic" in _attached.describe(memory.pull(pair.handle, cache, by_id(cache_id), select()))


def test_layout_of_what_is_no_segment_is_unknown(pair: Pair, tmp_path: Path) -> None:
    assert _attached.layout_of(str(SHM / pair.sources[0].path)).startswith(f"layout version {_layout.VERSION} ")
    small = tmp_path / "small"
    small.touch(0o600)
    os.truncate(small, 8)
    assert _attached.layout_of(str(small)) == _attached.layout_of(str(tmp_path / "nothing")) == ""


def test_link_that_let_go_of_its_mappings_has_no_memory_for_more(pair: Pair) -> None:
    pair.handle.close_side()
    pair.owner.directory.note_unlinked(1)
    assert pull(pair)[0] == -errno.ENOMEM


def test_segment_without_a_name(pair: Pair) -> None:
    pair.sources[0].unlink()
    assert pull(pair)[0] == -2
    assert _attached.describe(-2) == os.strerror(2)


def test_recycled_segment_is_checked_again_for_its_new_cache(pair: Pair) -> None:
    first = pair.sources[0]
    assert pull(pair)[0] == 0
    pair.owner.directory.retire(first.slot)
    pair.owner.directory.release(first.slot)
    slot, generation, cache_id = pair.owner.insert(1, 2, inner=128, serial=1, memory=first.region)
    assert (slot, generation > first.generation) == (first.slot, True)
    cache, content = destination(1, 1, 1, 128)
    assert memory.pull(pair.handle, cache, by_id(cache_id), select(src_row=1)) == 0
    np.testing.assert_array_equal(content.reshape(-1), BYTES[0, 0, 1])
    assert lines(pair) == 1


def test_file_that_is_not_sized_yet_is_not_ready(namespace: Namespace) -> None:
    """Between the name and its size, an opener sees an empty file: "not yet", not a failure."""
    name = f"{namespace.name}.empty"
    fd = segment.create(name, 0, 0)
    try:
        with pytest.raises(BlockingIOError, match="not sized"):
            Region.attach(f"{segment.SHM_DIR}/{name}")
        os.ftruncate(fd, 4096)
        assert Region.attach(f"{segment.SHM_DIR}/{name}").nbytes == 4096
    finally:
        os.close(fd)
        segment.unlink(name)
