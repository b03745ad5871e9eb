"""One pull through the core: link, row, segment, plan, bytes, coverage, counters; and copies inside one process."""
from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory
import numpy as np
import pytest
from memory import INITIATOR, Owner, Pair, by_id, destination, prefix, request, select
from peer import Namespace
from reference import Geometry, noise

from shmkv import _copy, _link, _lookup, _members, _plan, _pull, segment
from shmkv._local import LocalCache
from shmkv._mapping import Region

PATIENT_MS = 20000
IDENTITY = -1007                    # ATTACH_IDENTITY: a segment of another cluster or cache
SHAPE = Geometry(4, 2, 3, 16)
CONTENT = noise(SHAPE, seed=9)


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = memory.pair_with_keys(namespace.name, CONTENT)
    yield made
    made.close()


def pull(pair: Pair, words: tuple[int, ...], into: LocalCache | None = None, *, consumes: bool = True,
         timeout_ms: int = PATIENT_MS, **how: int) -> int:
    cache = into if into is not None else destination(*SHAPE)[0]
    return memory.pull(pair.handle, cache, words, select(**how), consumes=consumes, timeout_ms=timeout_ms)


def hazard(pair: Pair) -> int:
    return int(pair.owner.side(pair.record, INITIATOR, "hazard").value)


def link_word(pair: Pair) -> Any:
    return memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", "word")


def test_pull_moves_one_row_and_nothing_else(pair: Pair) -> None:
    cache, content = destination(*SHAPE)
    assert pull(pair, request(2), cache, dst_row=1) == 0
    np.testing.assert_array_equal(content[:, :, 1], CONTENT[:, :, 2])
    assert (content[:, :, 0] == 0x5A).all()
    assert (content[:, :, 2] == 0x5A).all()
    canaries = memory.content(cache.memory).size - content.size
    assert int((memory.content(cache.memory) == 0x5A).sum()) >= canaries + content[:, :, 0].size * 2


def test_pull_between_different_layouts_of_a_row(pair: Pair) -> None:
    cache, content = destination(3, 4, 2, 8)
    assert pull(pair, request(1), cache, src_first=1, src_count=3, dst_row=1) == 0
    np.testing.assert_array_equal(content[:, :, 1].reshape(3, -1), CONTENT[1:, :, 1].reshape(3, -1))


def test_pull_of_a_window(pair: Pair) -> None:
    cache, content = destination(2, 1, 1, 64)
    assert pull(pair, request(0), cache, consumes=False, size=20, src_offset=7, dst_offset=40, src_first=2, src_count=2) == 0
    assert (content[:, 0, 0, 40:60] == CONTENT[2:, :, 0].reshape(2, 32)[:, 7:27]).all()
    assert (content[:, 0, 0, :40] == 0x5A).all()
    assert pair.owner.directory.find(request(0)) is not None


def test_complete_pull_consumes_a_request_key_once(pair: Pair) -> None:
    assert pull(pair, request(0)) == 0
    assert pull(pair, request(0)) == _lookup.CONSUMED
    assert pair.owner.directory.noticed_slots() == [pair.sources[0].slot]


def test_parts_consume_when_they_are_all_there(pair: Pair) -> None:
    cache, content = destination(2, 2, 1, 16)
    for first, count in [(0, 2), (0, 2), (1, 2), (2, 2)]:
        assert pull(pair, request(1), cache, src_first=first, src_count=count) == 0
        np.testing.assert_array_equal(content[:, :, 0], CONTENT[first:first + count, :, 1])
    assert pull(pair, request(1), cache, src_count=2) == _lookup.CONSUMED


def test_parts_mark_nothing_but_what_they_pulled(pair: Pair) -> None:
    cache, _ = destination(3, 2, 1, 16)
    for row, parts in enumerate([[(2, 2), (1, 1), (0, 1)], [(1, 3), (0, 1)], [(0, 3), (3, 1)]]):
        for first, count in parts:
            assert pair.owner.directory.find(request(row)) is not None
            assert pull(pair, request(row), cache, src_first=first, src_count=count, dst_count=count) == 0
        assert pull(pair, request(row), cache, src_count=1, dst_count=1) == _lookup.CONSUMED


def test_one_published_tensor_can_be_pulled_alone(pair: Pair) -> None:
    source = pair.sources[0]
    pair.owner.directory.unbind(source.slot, 0)
    pair.owner.directory.bind(source.slot, 0, request(8), 1)
    cache, content = destination(2, 2, 1, 16)
    assert pull(pair, request(8), cache, src_count=2) == _lookup.UNPUBLISHED
    assert pull(pair, request(8), cache, src_count=1, dst_count=1) == 0
    np.testing.assert_array_equal(content[0, :, 0], CONTENT[0, :, 0])


def test_pull_with_an_offset_keyword_marks_nothing(pair: Pair) -> None:
    for _ in range(3):
        assert pull(pair, request(0), consumes=False) == 0
    assert pull(pair, request(0)) == 0


def test_prefix_key_and_cache_id_are_never_consumed(pair: Pair) -> None:
    source = pair.sources[0]
    pair.owner.directory.bind(source.slot, 0, prefix(7))
    for _ in range(2):
        assert pull(pair, prefix(7)) == 0
        assert pull(pair, by_id(source.cache_id), src_row=0) == 0
    assert pair.owner.directory.find(prefix(7)) == (source.slot, 0)


def test_pull_by_id_takes_part_in_coverage(pair: Pair) -> None:
    assert pull(pair, by_id(pair.sources[0].cache_id), src_row=2) == 0
    assert pull(pair, request(2)) == _lookup.CONSUMED


@pytest.mark.parametrize(("how", "status"), [
    ({"dst_row": 3}, _plan.DST_ROW), ({"dst_first": 3, "dst_count": 2}, _plan.DST_RANGE), ({"size": 33}, _plan.DST_WINDOW),
    ({"src_offset": 1}, _plan.SRC_WINDOW), ({"src_count": 5}, _plan.SRC_RANGE), ({"src_count": 2}, _plan.COUNTS),
    ({"divisor": 3}, _plan.DIVISOR),
])
def test_refused_pull_moves_no_byte_and_keeps_the_key(pair: Pair, how: dict[str, int], status: int) -> None:
    cache, content = destination(*SHAPE)
    assert pull(pair, request(0), cache, **how) == status
    assert (content == 0x5A).all()
    assert (hazard(pair), link_word(pair).value) == (0, 0)
    assert pull(pair, request(0), cache) == 0


def test_destination_is_looked_at_before_the_link(pair: Pair) -> None:
    pair.handle.force_remove()
    assert pull(pair, request(0), dst_row=3) == _plan.DST_ROW
    assert _pull.check(destination(*SHAPE)[0], select(dst_row=3)) == _plan.DST_ROW
    assert _pull.check(destination(*SHAPE)[0], select()) == 0
    assert pull(pair, request(0)) == _link.ENDED


def test_nothing_is_left_behind_by_a_pull(pair: Pair) -> None:
    cache, _ = destination(*SHAPE)
    for words in (request(0), request(0), request(99)):
        pull(pair, words, cache)
        assert (hazard(pair), link_word(pair).value, cache.uses, pair.handle.users) == (0, 0, 0, 0)


@pytest.mark.parametrize(("field", "value"), [
    ("rows", 4), ("rows", 2**63), ("inner", 0), ("outer", 2**62), ("nbytes", 2**64 - 1), ("offset", 2**64 - 64),
    ("offset", 1 << 20),
])
def test_tensor_record_that_no_owner_writes(pair: Pair, field: str, value: int) -> None:
    memory.word(pair.owner.region, "TensorRecord", 2, "TensorRecord", field).value = value
    cache, content = destination(*SHAPE)
    assert pull(pair, request(0), cache) == _plan.DAMAGED
    assert (content == 0x5A).all()


def test_segment_number_zero_is_refused_and_leaves_no_mapping(pair: Pair) -> None:
    """No owner gives the number 0, which marks a free entry among the kept mappings: it would be mapped anew by each pull."""
    source = pair.sources[0]
    path = Path(segment.SHM_DIR) / f"{pair.prefix}0"
    fd = segment.create(path.name, source.region.nbytes, source.region.nbytes)
    os.write(fd, memory.content(source.region).tobytes())
    os.close(fd)
    try:
        made = Region.attach(str(path), writable=True)
        memory.header_word(made, "serial").value = 0
        memory.word(pair.owner.region, "CacheRecord", source.slot, "CacheRecord", "segment_serial").value = 0
        for _ in range(3):
            assert pull(pair, request(1)) == IDENTITY
        assert len(memory.mapped(path.name)) == 1, "this test's own"
    finally:
        segment.unlink(path.name)


def test_dead_or_closed_peer_ends_the_pull(pair: Pair) -> None:
    pair.owner.directory.close()
    assert pair.handle.look() == _link.PEER_GONE
    assert pull(pair, request(0)) == _link.PEER_GONE


def test_peer_that_died_is_seen_by_its_record(pair: Pair) -> None:
    _members.clear(pair.owner.members, 0)
    assert pair.handle.look() == _link.PEER_GONE
    # A look may be up to a millisecond old before a pull looks again.
    memory.wait_until(lambda: pull(pair, request(9)) == _link.PEER_GONE, "a look at the dead peer")


def test_word_held_by_the_other_side_times_out(pair: Pair) -> None:
    link_word(pair).value = 1
    assert pull(pair, request(0), timeout_ms=30) == _link.TIMEOUT
    assert link_word(pair).value == 1
    assert pair.handle.word == 1
    link_word(pair).value = 0
    assert pull(pair, request(0)) == 0


def test_scribbled_word_breaks_the_link(pair: Pair) -> None:
    link_word(pair).value = 77
    assert pull(pair, request(0)) == _link.PEER_GONE
    link_word(pair).value = 0
    assert pull(pair, request(0)) == _link.PEER_GONE


def test_holder_that_dies_breaks_the_link(pair: Pair) -> None:
    link_word(pair).value = 1
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(pull(pair, request(0))))
    thread.start()
    memory.wait_until(lambda: bool(link_word(pair).value >> 31), "the waiters bit")
    _members.clear(pair.owner.members, 0)
    thread.join()
    assert answers == [_link.PEER_GONE]
    assert memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", "state").value & 0xFF == 2


def test_threads_of_one_process_take_turns(pair: Pair) -> None:
    answers: list[int] = []
    wrong: list[int] = []

    def work(row: int) -> None:
        cache, content = destination(*SHAPE)
        for _ in range(60):
            answers.append(pull(pair, request(row), cache, consumes=False))
            wrong.append(int((content[:, :, 0] != CONTENT[:, :, row]).sum()))

    threads = [threading.Thread(target=work, args=(number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {0}
    assert sum(wrong) == 0
    assert pair.handle.counters[0] == 360
    assert (pair.handle.users, link_word(pair).value) == (0, 0)


def test_thread_waiting_in_the_queue_gives_up_at_its_deadline(pair: Pair) -> None:
    link_word(pair).value = 1
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(pull(pair, request(0))))
    first.start()
    memory.wait_until(lambda: bool(link_word(pair).value >> 31), "the first thread at the word")
    assert pull(pair, request(1), timeout_ms=30) == _link.TIMEOUT
    assert pair.handle.users == 1
    link_word(pair).value = 4           # given to our side
    first.join()
    assert answers == [0]
    assert pull(pair, request(1)) == 0


def test_signal_handler_runs_while_a_pull_waits(pair: Pair) -> None:
    link_word(pair).value = 1
    inside: list[tuple[bool, int]] = []

    def handler(*_: object) -> None:
        inside.append((_link.inside_call(), pull(pair, request(1))))
        link_word(pair).value = 0

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        assert pull(pair, request(0)) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert inside == [(True, _link.BUSY)]
    assert not _link.inside_call()


def test_exception_of_a_signal_handler_comes_out(pair: Pair) -> None:
    link_word(pair).value = 1

    def handler(*_: object) -> None:
        raise KeyError("out of the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        with pytest.raises(KeyError, match="out of the handler"):
            pull(pair, request(0))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (link_word(pair).value, pair.handle.users) == (1, 0)
    link_word(pair).value = 0
    assert pull(pair, request(0)) == 0


def test_counters_of_a_link(pair: Pair) -> None:
    pull(pair, request(0))
    pull(pair, request(0))
    pulls, nbytes, waited, copied, failed, timeouts = pair.handle.counters
    assert (pulls, nbytes, failed, timeouts) == (1, SHAPE.num_tensors * SHAPE.stride, 1, 0)
    assert waited >= 0
    assert copied > 0


def test_cache_that_was_closed_takes_no_new_call(pair: Pair) -> None:
    cache, content = destination(*SHAPE)
    cache.close()
    assert pull(pair, request(0), cache) == _pull.DST_GONE
    assert _pull.check(cache, select()) == _pull.DST_GONE
    assert _pull.copy(destination(*SHAPE)[0], cache, select(), PATIENT_MS) == _pull.DST_GONE
    assert (content == 0x5A).all()
    assert cache.uses == 0


def test_counted_uses_of_a_cache() -> None:
    cache, _ = destination(*SHAPE)
    cache.count_in()
    assert cache.uses == 1
    cache.close()
    cache.leave()
    assert cache.uses == 0


def test_copy_of_a_closed_source_that_its_keys_keep_alive() -> None:
    src, src_content = destination(*SHAPE)
    dst, dst_content = destination(*SHAPE)
    src_content[...] = CONTENT
    src.close()
    assert _pull.copy(src, dst, select(src_row=1, dst_row=2), PATIENT_MS) == 0
    np.testing.assert_array_equal(dst_content[:, :, 2], CONTENT[:, :, 1])


@pytest.fixture
def one_thread() -> Iterator[None]:
    _copy.configure(threads=1)
    yield
    _copy.configure()


@pytest.mark.usefixtures("one_thread")
def test_copy_looks_at_its_deadline_between_chunks() -> None:
    src, src_content = destination(1, 1, 1, 9 << 20)
    dst, dst_content = destination(1, 1, 1, 9 << 20)
    src_content[...] = 1
    assert _pull.copy(src, dst, select(), -1) == _link.TIMEOUT
    moved = int((dst_content == 1).sum())
    assert 0 < moved < 9 << 20
    assert moved % (1 << 20) == 0


def test_generation_of_a_cache_pins_while_a_hazard_names_it() -> None:
    owner = Owner()
    try:
        record = owner.claim()
        slot, generation, _ = owner.insert()
        owner.side(record, INITIATOR, "hazard").value = generation
        owner.directory.retire(slot)
        assert owner.pinned(generation)
    finally:
        owner.close()


def test_a_closed_link_keeps_nothing_of_its_peer_and_can_be_closed_again(pair: Pair) -> None:
    assert pull(pair, request(0)) == 0
    assert memory.is_mapped(pair.sources[0].path, writable=False)
    pair.handle.force_remove()
    for _ in range(2):
        pair.handle.close_side()
    assert not memory.is_mapped(pair.sources[0].path, writable=False)
    assert pull(pair, request(1)) == _link.ENDED
