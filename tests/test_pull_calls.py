"""The hot path as Python calls it: several rows under one lock, prepared pulls, and what the last one did."""
from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

import memory
import numpy as np
import pytest
from memory import Pair, destination, request, select
from peer import Namespace
from reference import Geometry, noise

from shmkv import CacheKey, CacheKeyByIdAndIndex, _copy, _layout, _link, _lookup, _plan, _pull, segment
from shmkv._local import LocalCache

SHAPE = Geometry(2, 1, 4, 32)
CONTENT = noise(SHAPE, seed=4)
PATIENT_MS = 20000


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = memory.pair_with_keys(namespace.name, CONTENT)
    yield made
    made.close()


def many(pair: Pair, requests: list[tuple[LocalCache, CacheKey, tuple[int, ...]]], consumes: bool = False) -> tuple[int, int]:
    return _pull.pull_many(pair.handle, [(cache, key.packed, want, consumes) for cache, key, want in requests], PATIENT_MS)


def test_key_packs_what_the_core_reads() -> None:
    assert CacheKey(7, 3, 5).packed == struct.pack("=6Q", 7, *request(3, 5), 0)
    assert CacheKeyByIdAndIndex(7, 3, 2).packed == struct.pack("=6Q", 7, 0, 3, 0, 0, 2)


def test_packed_key_of_another_length_is_refused(pair: Pair) -> None:
    cache, _ = destination(*SHAPE)
    with pytest.raises(ValueError, match="a packed key has 48 bytes, not 47"):
        _pull.pull(pair.handle, cache, bytes(47), select(), False, PATIENT_MS)
    assert pair.handle.users == 0


def test_many_rows_are_pulled_in_one_turn(pair: Pair) -> None:
    cache, content = destination(*SHAPE)
    wanted = [(cache, CacheKey(1, 3 - row, 0), select(dst_row=row)) for row in range(4)]
    assert many(pair, wanted) == (4, 0)
    np.testing.assert_array_equal(content, CONTENT[:, :, ::-1])
    assert pair.handle.counters[0] == 4
    assert (pair.handle.users, pair.handle.word, cache.uses) == (0, 0, 0)


def test_many_rows_stop_at_the_first_that_is_not_there(pair: Pair) -> None:
    cache, content = destination(*SHAPE)
    wanted = [(cache, CacheKey(1, number, 0), select(dst_row=row)) for row, number in enumerate((0, 99, 1))]
    assert many(pair, wanted) == (1, _lookup.NEVER)
    np.testing.assert_array_equal(content[:, :, 0], CONTENT[:, :, 0])
    assert (content[:, :, 1:] == 0x5A).all()
    assert (pair.handle.users, pair.handle.word, cache.uses) == (0, 0, 0)


def test_destinations_of_many_rows_are_checked_before_the_first_byte(pair: Pair) -> None:
    cache, content = destination(*SHAPE)
    closed, _ = destination(*SHAPE)
    closed.close()
    good = (cache, CacheKey(1, 0, 0), select())
    for bad, status in [((cache, CacheKey(1, 1, 0), select(dst_row=4)), _plan.DST_ROW),
                        ((closed, CacheKey(1, 1, 0), select()), _pull.DST_GONE)]:
        assert many(pair, [good, bad, good]) == (1, status)
        assert (cache.uses, closed.uses) == (0, 0)
    assert (content == 0x5A).all()


def test_no_rows_at_all(pair: Pair) -> None:
    assert many(pair, []) == (0, 0)
    assert pair.handle.users == 0


def test_last_pull_is_told_to_its_own_thread(pair: Pair) -> None:
    cache, _ = destination(*SHAPE)
    assert memory.pull(pair.handle, cache, request(0), select(size=10)) == 0
    nbytes, waited, copied, kernel, streamed = _pull.last_pull()
    assert (nbytes, waited >= 0, copied > 0) == (2 * 10, True, True)
    assert (kernel, streamed) == (_copy.current()["kernel"], False)
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(_pull.last_pull()))
    thread.start()
    thread.join()
    assert elsewhere == [(0, 0, 0, "", False)]
    assert memory.pull(pair.handle, cache, request(99), select()) == _lookup.NEVER
    assert _pull.last_pull()[0] == 20


@pytest.fixture
def default_loop() -> Iterator[None]:
    yield
    _copy.configure()


@pytest.mark.usefixtures("default_loop")
@pytest.mark.parametrize("kernel", _copy.supported_kernels())
def test_last_pull_tells_the_loop_of_that_pull_and_not_of_the_next(pair: Pair, kernel: str) -> None:
    cache, _ = destination(*SHAPE)
    _copy.configure(kernel, 20)
    for size, streamed in ((10, True), (9, False)):         # of each of two tensors
        assert memory.pull(pair.handle, cache, request(0), select(size=size)) == 0
        assert _pull.last_pull()[3:] == (kernel, streamed)
    _copy.configure("memcpy" if kernel == "c" else "c", 0)
    assert _pull.last_pull()[3:] == (kernel, False), "nothing was copied since"
    assert memory.pull(pair.handle, cache, request(99), select()) == _lookup.NEVER
    assert _pull.last_pull()[3:] == (kernel, False)
    assert _pull.copy(cache, destination(*SHAPE)[0], select(), 20000) == 0
    assert _pull.last_pull()[3:] == ("memcpy" if kernel == "c" else "c", True), "a copy counts as well"


@pytest.mark.usefixtures("default_loop")
def test_last_pull_keeps_what_a_copy_that_fails_has_not_done(namespace: Namespace) -> None:
    """By system calls, of a segment that was cut off behind the first tensor."""
    pair = Pair(namespace.name, by_pread=True)
    try:
        source = pair.add(CONTENT)
        cache, _ = destination(*SHAPE)
        _copy.configure("c")
        assert _pull.copy(cache, destination(*SHAPE)[0], select(), 20000) == 0
        before = _pull.last_pull()
        assert before[3] == "c"
        assert memory.pull(pair.handle, cache, memory.by_id(source.cache_id), select(size=1, src_count=1, dst_count=1)) == 0
        assert (_pull.last_pull()[0], *_pull.last_pull()[3:]) == (1, "pread", False)
        _copy.configure("c", 0)
        streamed = _copy.streamed()
        assert memory.pull(pair.handle, cache, memory.by_id(source.cache_id), select(size=1)) == 0
        assert (_copy.streamed(), _pull.last_pull()[4]) == (streamed, False), "a system call streams nothing"
        assert _pull.copy(cache, destination(*SHAPE)[0], select(), 20000) == 0
        done = _pull.last_pull()
        os.truncate(f"{segment.SHM_DIR}/{source.path}", _layout.SEGMENT_DATA)
        assert memory.pull(pair.handle, cache, memory.by_id(source.cache_id), select()) < 0
        assert _pull.last_pull() == done, "that of the copy which succeeded"
    finally:
        pair.close()


def test_one_shape_is_planned_once_and_right_every_time(pair: Pair) -> None:
    """More selections in turn than plans are kept, from two sources, into two destinations."""
    other = pair.add(noise(SHAPE, seed=5))
    pair.owner.directory.bind(other.slot, 0, request(50))
    targets = [destination(*SHAPE) for _ in range(2)]
    for turn in range(3):
        for size in range(1, 13):
            for number, wanted in ((1, CONTENT[:, :, 1]), (50, noise(SHAPE, seed=5)[:, :, 0])):
                cache, content = targets[(turn + size) % 2]
                content[...] = 0x5A
                assert memory.pull(pair.handle, cache, request(number), select(size=size, dst_row=size % 4)) == 0
                assert (content[:, :, size % 4, :size] == wanted[:, :, :size]).all()
                assert int((content != 0x5A).sum()) <= 2 * size


def test_kept_plan_is_not_used_for_changed_records(pair: Pair) -> None:
    cache, content = destination(*SHAPE)
    assert memory.pull(pair.handle, cache, request(0), select()) == 0
    offset = memory.word(pair.owner.region, "TensorRecord", 1, "TensorRecord", "offset")
    offset.value -= SHAPE.rows * SHAPE.stride
    assert memory.pull(pair.handle, cache, request(0), select()) == 0
    np.testing.assert_array_equal(content[1, :, 0], CONTENT[0, :, 0])
    offset.value = 1 << 40
    assert memory.pull(pair.handle, cache, request(0), select()) == _plan.DAMAGED


class Caller:
    """What a manager gives a prepared pull: a plain pull to fall back to, and exceptions."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.again: list[int] = []
        self.remarks: list[CacheKey] = []
        self.cache, self.content = destination(*SHAPE)
        self.call = _pull.PreparedPull(self.cache, select(dst_row=1), False, PATIENT_MS, (CacheKey, CacheKeyByIdAndIndex),
                                       self.checked, lambda key, _, status: LookupError(f"{key.req_id}: {status}"),
                                       lambda _, key: self.remarks.append(key))

    def checked(self, key: CacheKey, row: int) -> Any:
        assert row == 1
        self.again.append(key.req_id)
        return self.pair.handle if key.cluster_id == 1 else None


def test_prepared_pull_takes_the_quick_way_after_the_first_call(pair: Pair) -> None:
    caller = Caller(pair)
    for number in (0, 1, 2):
        caller.call(CacheKey(1, number, 0))
    assert caller.again == [0]
    np.testing.assert_array_equal(caller.content[:, :, 1], CONTENT[:, :, 2])
    caller.call(CacheKeyByIdAndIndex(1, pair.sources[0].cache_id, 3))
    np.testing.assert_array_equal(caller.content[:, :, 1], CONTENT[:, :, 3])
    assert caller.call.dst is caller.cache


def test_prepared_pull_notes_all_options_or_none(pair: Pair) -> None:
    with pytest.raises(ValueError, match="2 options"):
        Caller(pair).call.note_options((1, 2))


def test_prepared_pull_asks_again_for_another_cluster_or_an_ended_link(pair: Pair) -> None:
    caller = Caller(pair)
    for key in (CacheKey(1, 0, 0), CacheKey(2, 1, 0), CacheKey(1, 2, 0), CacheKey(1, 3, 0)):
        caller.call(key)
    assert caller.again == [0, 1, 2]
    pair.handle.force_remove()
    assert pair.handle.look() == _link.ENDED
    caller.call(CacheKey(1, 1, 0))
    assert caller.again == [0, 1, 2, 1]


def test_prepared_pull_raises_what_its_caller_makes_of_a_status(pair: Pair) -> None:
    caller = Caller(pair)
    caller.call(CacheKey(1, 0, 0))
    with pytest.raises(LookupError, match=f"99: {_lookup.NEVER}"):
        caller.call(CacheKey(1, 99, 0))
    assert caller.again == [0]
