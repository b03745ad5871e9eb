"""One push inside this process: two directories, a link record, real segments; and tables that nobody writes."""
from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Iterator

import memory
import numpy as np
import pytest
from handlers import Stop, handler_when
from memory import ACCEPTOR, NO_LIFE_FILE
from push_pair import INNER, PATIENT_MS, ROWS, TENSORS, PushPair

from shmkv import _attached, _link, _link_record, _lookup, _plan, _push
from shmkv._blocks import TO_BLOCKS, BlockLists
from shmkv._push import Addresses

ROW = INNER
HELD_BY_THE_DECODER, WAITERS = 2, 1 << 31


@pytest.fixture
def pair(name: str) -> Iterator[PushPair]:
    made = PushPair(name)
    yield made
    made.close()


def test_rows_go_to_their_addresses_in_a_writable_mapping(pair: PushPair) -> None:
    assert pair.push(row=1) == 0
    np.testing.assert_array_equal(pair.written[:, 0], pair.bytes[:, 0, 1])
    assert (pair.written[:, 1] == 0x5A).all()
    assert memory.is_mapped(f"{pair.prefix}1", writable=True)
    side = _link_record.read(pair.prompt.region, pair.record)["sides"][ACCEPTOR]
    assert side["counters"][:2] == [1, TENSORS * ROW]


def test_by_system_calls_nothing_is_mapped(name: str) -> None:
    pair = PushPair(name, by_system_calls=True)
    before = memory.mapped(f"{pair.prefix}1")
    assert pair.push() == 0
    np.testing.assert_array_equal(pair.written[:, 0], pair.bytes[:, 0, 0])
    assert memory.mapped(f"{pair.prefix}1") == before
    pair.close()


def test_a_write_that_the_system_refuses_ends_a_push(name: str) -> None:
    """No byte of the segment may be written: by a limit here, by a full file system elsewhere."""
    pair = PushPair(name, by_system_calls=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        status = pair.push()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == -errno.EFBIG
    assert pair.is_untouched()
    pair.close()


def test_blocks_go_to_their_places(pair: PushPair) -> None:
    assert pair.push(lists=BlockLists([1, 0], [0, 1], TO_BLOCKS)) == 0
    np.testing.assert_array_equal(pair.written, pair.bytes[:, 0, ::-1])


def test_addresses_of_one_place_are_written_in_their_order(pair: PushPair) -> None:
    base = pair.addresses
    assert pair.push([base[0], base[0] + 32, base[0]]) == 0
    np.testing.assert_array_equal(pair.written[0].reshape(-1)[:64], pair.bytes[2, 0, 0])
    np.testing.assert_array_equal(pair.written[0].reshape(-1)[64:96], pair.bytes[1, 0, 0, 32:])


def test_what_the_source_does_not_have(pair: PushPair) -> None:
    assert pair.push(row=ROWS) == _push.ROW
    assert pair.push(first=1) == _plan.SRC_RANGE
    assert pair.push(lists=BlockLists([ROWS], [0], TO_BLOCKS)) == _plan.SRC_BLOCK
    assert pair.push(lists=BlockLists([0], [ROWS], TO_BLOCKS)) == _push.ROOM
    assert pair.push(lists=BlockLists([0], [2**32 - 1], TO_BLOCKS)) == _push.ROOM
    assert pair.is_untouched()


def test_the_address_that_was_refused_is_named(pair: PushPair) -> None:
    addresses = Addresses([*pair.addresses[:2], 64])
    assert _push.push(pair.link, pair.source, addresses, 0, 2, 0, 0, None, PATIENT_MS, check_all=True) == _push.ADDRESS
    assert addresses.part(addresses.bad, addresses.bad + 1) == [64]
    assert pair.is_untouched()
    for begin, end in ((0, 0), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="addresses"):
            _push.push(pair.link, pair.source, addresses, begin, end, 0, 0, None, PATIENT_MS)


SCRIBBLES = [("nbytes", 1 << 40), ("nbytes", 0), ("offset", 1 << 40), ("offset", 2**64 - 8), ("inner", 0), ("inner", 7),
             ("rows", 0), ("rows", 2**63), ("outer", 3), ("base_address", 2**64 - 1)]


@pytest.mark.parametrize(("field", "value"), SCRIBBLES)
def test_numbers_that_no_owner_writes_lead_nowhere(pair: PushPair, field: str, value: int) -> None:
    base = pair.addresses
    pair.tensor(0, field).value = value
    status = pair.push([base[0], base[1]])
    assert status == _push.ADDRESS
    assert pair.is_untouched()


@pytest.mark.parametrize(("field", "value"), [("num_tensors", 0), ("num_tensors", 2**32 - 1), ("first_tensor", 2**32 - 1),
                                              ("first_row", 2**32 - 1), ("word", 0)])
def test_caches_that_no_owner_writes_are_passed_over(pair: PushPair, field: str, value: int) -> None:
    base = pair.addresses
    pair.cache(field).value = value
    assert pair.push(base) == _push.ADDRESS
    assert pair.is_untouched()


def test_a_segment_of_another_size_or_cache_is_not_written_to(pair: PushPair) -> None:
    kept = pair.cache("segment_nbytes").value
    pair.cache("segment_nbytes").value = kept + 4096
    assert pair.push() == _attached_status("SIZE")
    pair.cache("segment_nbytes").value = kept
    memory.word(pair.target.region, "", 0, "SegmentHeader", "generation").value += 1
    assert pair.push() == _attached_status("IDENTITY")
    assert pair.is_untouched()


def _attached_status(what: str) -> int:
    """The statuses have no names in Python but their sentences."""
    sentence = {"SIZE": "its size is not the one recorded", "IDENTITY": "it belongs to another cluster or cache"}[what]
    return next(number for number in range(-1010, -1000) if _attached.describe(number) == sentence)


def test_a_retired_cache_is_no_destination(pair: PushPair) -> None:
    assert pair.push() == 0
    pair.decoder.directory.retire(pair.target.slot)
    assert pair.push() == _push.ADDRESS


def test_a_segment_that_was_given_up_is_unmapped_at_the_next_push(pair: PushPair) -> None:
    assert pair.push() == 0
    assert len(memory.mapped(f"{pair.prefix}1")) == 2           # the owner's, and ours
    pair.decoder.directory.note_unlinked(1)
    assert pair.push([64]) == _push.ADDRESS
    assert len(memory.mapped(f"{pair.prefix}1")) == 1


@pytest.mark.parametrize(("state", "status"), [(2, _link.PEER_GONE), (3, _link.ENDED)])
def test_a_link_that_is_over_touches_nothing_and_lets_go(pair: PushPair, state: int, status: int) -> None:
    assert pair.push() == 0
    word = memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "state")
    word.value = word.value & ~0xFF | state
    assert pair.push() == status
    assert pair.link.let_go()
    assert pair.link.directory is None
    assert len(memory.mapped(f"{pair.prefix}1")) == 1
    assert pair.push() == status


def test_a_word_that_names_no_side_breaks_the_link(pair: PushPair) -> None:
    memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "word").value = 77
    made = Addresses(pair.addresses)
    assert _push.push(pair.link, pair.source, made, 0, 2, 0, 0, None, PATIENT_MS) == _link.PEER_GONE
    assert pair.link.state() == _link.PEER_GONE
    assert _link_record.read(pair.prompt.region, pair.record)["sides"][ACCEPTOR]["open"] == 0
    assert pair.is_untouched()


def test_a_word_that_the_decoder_keeps_is_waited_for_and_counted(pair: PushPair) -> None:
    word = memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "word")
    word.value = 2
    made = Addresses(pair.addresses)
    assert _push.push(pair.link, pair.source, made, 0, 2, 0, 0, None, 30) == _link.TIMEOUT
    side = _link_record.read(pair.prompt.region, pair.record)["sides"][ACCEPTOR]
    assert (side["open"], side["hazard"], word.value, side["counters"][5]) == (0, 0, 2, 1)
    assert pair.is_untouched()


def test_a_handler_that_raises_ends_a_push_that_waits(pair: PushPair) -> None:
    word = memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "word")
    word.value = HELD_BY_THE_DECODER

    def stop() -> None:
        raise Stop

    with handler_when(lambda: bool(word.value & WAITERS), stop), pytest.raises(Stop):
        pair.push()
    side = _link_record.read(pair.prompt.region, pair.record)["sides"][ACCEPTOR]
    assert (side["open"], side["hazard"], word.value, pair.link.users) == (0, 0, HELD_BY_THE_DECODER, 0)
    assert pair.is_untouched()


def test_a_removal_that_a_handler_ended_leaves_the_link_to_pushes(pair: PushPair) -> None:
    word = memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "word")
    word.value = HELD_BY_THE_DECODER

    def stop() -> None:
        raise Stop

    with handler_when(lambda: bool(word.value & WAITERS), stop), pytest.raises(Stop):
        pair.link.end(PATIENT_MS, False)
    word.value = 0
    assert pair.push() == 0, "and not busy with the removal"


def test_the_decoders_tables_stay_while_a_push_is_inside(pair: PushPair) -> None:
    word = memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "word")
    word.value = HELD_BY_THE_DECODER
    made, said = Addresses(pair.addresses), []
    pusher = threading.Thread(target=lambda: said.append(_push.push(pair.link, pair.source, made, 0, 2, 0, 0, None, PATIENT_MS)))
    pusher.start()
    memory.wait_until(lambda: bool(word.value & WAITERS), "the push at the word")
    assert not pair.link.let_go()
    assert pair.link.directory is not None
    memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "state").value += 1        # LIVE -> BROKEN
    pusher.join(10)
    assert said == [_link.PEER_GONE]
    assert pair.link.let_go()
    assert pair.is_untouched()


def test_a_link_has_the_decoders_tables_once(pair: PushPair) -> None:
    assert pair.link.slot == pair.record
    pair.link.attach(pair.prompt.region, b"/dev/shm/another")
    assert pair.link.directory is pair.decoder.region
    assert pair.push() == 0


def test_the_decoder_keeps_what_a_push_names(pair: PushPair) -> None:
    """Its scan looks at the acceptor's side of the records that it made."""
    made = [(pair.prompt.region, pair.record)]
    pair.prompt.side(pair.record, ACCEPTOR, "hazard").value = pair.target.generation
    assert pair.decoder.directory.pinned(pair.target.generation, NO_LIFE_FILE, pair.prompt.members, made)
    pair.prompt.side(pair.record, ACCEPTOR, "hazard").value = 0
    assert not pair.decoder.directory.pinned(pair.target.generation, NO_LIFE_FILE, pair.prompt.members, made)


def test_misses_are_not_taken_for_answers_of_a_push() -> None:
    assert not {_push.ADDRESS, _push.ROOM, _push.ROW} & _lookup.MISSES
