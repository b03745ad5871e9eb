"""Pulls that wait, one look after the other, without any other process: what is held, who may be inside, what ends them."""
from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import memory
import numpy as np
import pytest
from memory import INITIATOR, Pair, by_id, request, select, wait_until
from peer import Namespace
from reference import Geometry, noise

from shmkv import _flow, _link, _lookup, _wait
from shmkv._await import KeyWait
from shmkv._flow import RowFlow

SHAPE = Geometry(4, 1, 2, 64)
SENT = noise(SHAPE, seed=6)
ENDED_RING = 64
MIB = 1 << 20
PATIENT_MS, LOOK = 20_000, 0            # a turn of 0: only a look
SEC_NS = 1_000_000_000


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = memory.pair_with_keys(namespace.name, SENT)
    yield made
    made.close()


def packed(words: tuple[int, ...], row: int = 0) -> bytes:
    return struct.pack("=6Q", 1, *words, row)


def flow(pair: Pair, words: tuple[int, ...], *, into: Any = None, timeout_ms: int = PATIENT_MS, piece: int = 0) -> RowFlow:
    dst = into or memory.destination(*SHAPE)[0]
    return RowFlow(pair.handle, dst, packed(words), select(), True, timeout_ms, 192, piece)


def lease(pair: Pair) -> int:
    return int(pair.owner.side(pair.record, INITIATOR, "leases", 0).value)


def row_word(pair: Pair, row: int) -> Any:
    return memory.word(pair.owner.region, "RowRecord", row, "RowRecord", "word")


def header(pair: Pair, name: str) -> Any:
    return memory.word(pair.owner.region, "DirectoryHeader", 0, "DirectoryHeader", name)


def leased(pair: Pair) -> tuple[RowFlow, int]:
    """One that waits for the second half of a row, and the cache that its lease names."""
    source = pair.add(SENT, published=2)
    found = flow(pair, by_id(source.cache_id))
    assert not found.has_lease
    assert found.run(LOOK, True) == _wait.NOT_YET
    assert (found.has_lease, found.done, lease(pair)) == (True, (2, 4), source.generation)
    return found, source.generation


def test_what_is_there_is_brought_at_the_first_look(pair: Pair) -> None:
    dst, written = memory.destination(*SHAPE)
    assert RowFlow(pair.handle, dst, packed(request(1)), select(), True, PATIENT_MS, 192).run(LOOK, True) == 0
    np.testing.assert_array_equal(written[:, :, 0], SENT[:, :, 1])
    assert lease(pair) == 0


def test_a_lease_is_held_while_a_layer_is_waited_for_and_given_back_once(pair: Pair) -> None:
    found, _ = leased(pair)
    found.close()
    found.close()
    assert (found.has_lease, lease(pair)) == (False, 0)
    assert found.run(LOOK, True) == _link.CANCELLED


def test_late_end_leaves_the_record_to_its_next_user(pair: Pair) -> None:
    """This side was taken for dead meanwhile: number 0 is somebody else's lease now."""
    found, generation = leased(pair)
    memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", "state").value += 1 << 8
    found.close()
    assert lease(pair) == generation


def test_a_destination_that_is_gone_ends_it(pair: Pair) -> None:
    dst, written = memory.destination(*SHAPE)
    found = flow(pair, request(0), into=dst)
    dst.close()
    status = found.run(LOOK, True)
    assert status < 0
    assert status != _wait.NOT_YET
    assert (written == 0x5A).all()


def test_one_thread_is_inside_at_a_time(pair: Pair) -> None:
    found, said = flow(pair, request(99)), []
    waiter = threading.Thread(target=lambda: said.append(found.run(time.monotonic_ns() + 20 * SEC_NS, True)), daemon=True)
    waiter.start()
    waiters = header(pair, "key_waiters")
    wait_until(lambda: waiters.value == 1, "it is counted in")
    with pytest.raises(ValueError, match="another thread"):
        found.run(LOOK, True)
    found.close()
    waiter.join(10)
    assert said == [_link.CANCELLED]
    assert waiters.value == 0


def test_whom_nobody_watches_looks_by_itself_until_its_deadline(pair: Pair) -> None:
    """In slices, for it is not woken when the peer dies."""
    found = flow(pair, request(99), timeout_ms=60)
    began = time.monotonic_ns()
    assert found.run(began + 20 * SEC_NS, False) == _link.TIMEOUT
    assert time.monotonic_ns() - began >= 60_000_000


def test_a_long_copy_looks_between_its_shares(namespace: Namespace) -> None:
    shape = Geometry(1, 1, 1, 9 * MIB)
    sent = noise(shape, seed=8)
    pair = memory.pair_with_keys(namespace.name, sent)
    dst, written = memory.destination(*shape)
    assert flow(pair, request(0), into=dst).run(LOOK, True) == 0
    np.testing.assert_array_equal(written, sent)
    pair.close()


# -- keys that are not there ------------------------------------------------------------------------------------------------

def wait_for(pair: Pair, words: tuple[int, ...]) -> KeyWait:
    """One that has looked in vain."""
    found = KeyWait(pair.handle, packed(words), PATIENT_MS)
    assert found.run(LOOK, True) == _wait.NOT_YET
    return found


def test_a_key_that_ended_before_may_come_again_and_one_that_ends_now_does_not(pair: Pair) -> None:
    word = row_word(pair, 0)
    live = word.value
    word.value = live & ~0xFF | consumed(pair)
    found = wait_for(pair, request(0))
    assert found.run(LOOK, True) == _wait.NOT_YET
    word.value += 1 << 8                            # bound anew, and consumed again, between two looks
    assert found.run(LOOK, True) == _lookup.CONSUMED


def consumed(pair: Pair) -> int:
    """The state of a row whose key was consumed, as a pull leaves it."""
    assert memory.pull(pair.handle, memory.destination(*SHAPE)[0], request(1), select(), consumes=True) == 0
    return int(row_word(pair, 1).value) & 0xFF


def test_more_keys_ended_than_the_ring_has_room_for(pair: Pair) -> None:
    """Those that were overwritten cannot be known, so the wait goes on."""
    found = wait_for(pair, request(99))
    header(pair, "ended_count").value += 3 * ENDED_RING
    assert found.run(LOOK, True) == _wait.NOT_YET
    pair.owner.directory.bind(pair.sources[0].slot, 0, request(99))
    assert found.run(LOOK, True) == 0


def test_a_blocks_key_that_was_taken_away_may_be_given_again(pair: Pair) -> None:
    source = pair.add(SENT, published=2, blocks_model_id=7)
    found = wait_for(pair, memory.blocks_key(7))
    pair.owner.directory.end_blocks_key(source.slot)
    assert wait_for(pair, memory.blocks_key(7)).run(LOOK, True) == _wait.NOT_YET
    assert found.run(LOOK, True) == _wait.NOT_YET       # this one has found it and waits for its rows


def test_a_blocks_cache_without_rows_is_damage(pair: Pair) -> None:
    source = pair.add(SENT, blocks_model_id=7)
    memory.word(pair.owner.region, "CacheRecord", source.slot, "CacheRecord", "num_rows").value = 0
    assert KeyWait(pair.handle, packed(memory.blocks_key(7)), PATIENT_MS).run(LOOK, True) == _lookup.DAMAGED


def test_a_blocks_cache_that_is_being_freed_may_be_followed_by_another(pair: Pair) -> None:
    source = pair.add(SENT, published=4, blocks_model_id=7)
    pair.owner.directory.retire(source.slot)
    found = wait_for(pair, memory.blocks_key(7))
    pair.owner.directory.release(source.slot)
    pair.add(SENT, blocks_model_id=7)
    assert found.run(LOOK, True) == 0


@pytest.mark.parametrize(("words", "status"), [(request(99), _lookup.NEVER), (by_id(2), _lookup.UNPUBLISHED)])
def test_who_does_not_wait_is_told_at_once(pair: Pair, words: tuple[int, ...], status: int) -> None:
    """A pull in pieces may be one that only takes what is there."""
    pair.add(SENT, published=2)
    dst, written = memory.destination(*SHAPE)
    found = RowFlow(pair.handle, dst, packed(words), select(), True, PATIENT_MS, 192, 2, False)
    assert found.run(LOOK, True) == status
    assert (lease(pair), int(pair.owner.side(pair.record, INITIATOR, "hazard").value)) == (0, 0)
    assert (written == 0x5A).all()


def test_a_cache_that_is_being_freed_does_not_come_again(pair: Pair) -> None:
    source = pair.add(SENT, published=0)
    pair.owner.directory.retire(source.slot)
    assert KeyWait(pair.handle, packed(by_id(source.cache_id)), PATIENT_MS).run(LOOK, True) == _lookup.REMOVED


def test_a_damaged_row_is_no_reason_to_wait(pair: Pair) -> None:
    memory.word(pair.owner.region, "RowRecord", 0, "RowRecord", "cache_slot").value = 2**32 - 1
    assert KeyWait(pair.handle, packed(request(0)), PATIENT_MS).run(LOOK, True) == _lookup.DAMAGED


def test_layers_are_answered_one_by_one(pair: Pair) -> None:
    """Each is a pull of its own, which marks what it brought; the last one uses the key up."""
    dst, written = memory.destination(*SHAPE)
    found = flow(pair, request(0), into=dst, piece=2)
    assert (found.run(LOOK, True), found.done) == (_flow.MORE, (2, 4))
    np.testing.assert_array_equal(written[:2, :, 0], SENT[:2, :, 0])
    assert (written[2:] == 0x5A).all()
    assert (found.run(LOOK, True), found.done, lease(pair)) == (0, (4, 4), 0)
    np.testing.assert_array_equal(written[:, :, 0], SENT[:, :, 0])
    assert memory.pull(pair.handle, dst, request(0), select()) == _lookup.CONSUMED
