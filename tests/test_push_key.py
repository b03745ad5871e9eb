"""Pushes to caches that a key names, over the core of a link."""
from __future__ import annotations

from collections.abc import Iterator

import memory
import numpy as np
import pytest
from handlers import Stop, handler_when
from memory import ACCEPTOR
from push_pair import ROWS, TENSORS, PushPair

from shmkv import _link, _link_record, _lookup, _plan, _push

HELD_BY_THE_DECODER, WAITERS = 2, 1 << 31
TIMEOUTS = 5                            # which counter


@pytest.fixture
def pair(name: str) -> Iterator[PushPair]:
    made = PushPair(name)
    yield made
    made.close()


def test_a_row_goes_to_the_row_of_the_key(pair: PushPair) -> None:
    assert pair.push_by_id(src_row=1) == 0
    np.testing.assert_array_equal(pair.written[:, 0], pair.bytes[:, 0, 1])
    assert pair.push_by_id(src_row=0, row=1) == 0
    np.testing.assert_array_equal(pair.written[:, 1], pair.bytes[:, 0, 0])


def test_what_is_not_there(pair: PushPair) -> None:
    assert pair.push_by_id(src_row=ROWS) == _push.ROW
    assert pair.push_by_id(row=ROWS) == _plan.DST_ROW
    assert pair.push_by_id(tensors=(0, -1, TENSORS, -1)) == _plan.DST_RANGE
    assert pair.push_by_id(tensors=(TENSORS, 1, 0, 1)) == _plan.SRC_RANGE
    assert pair.push_by_id(cache_id=pair.target.cache_id + 1) == _lookup.NEVER
    assert pair.is_untouched()


@pytest.mark.parametrize(("field", "value", "status"), [
    ("num_tensors", 0, _plan.DAMAGED), ("num_tensors", 2**32 - 1, _lookup.NEVER), ("first_tensor", 2**32 - 1, _lookup.NEVER),
    ("first_row", 2**32 - 1, _lookup.NEVER), ("word", 0, _lookup.REMOVED)])
def test_caches_that_no_owner_writes_lead_nowhere(pair: PushPair, field: str, value: int, status: int) -> None:
    pair.cache(field).value = value
    assert pair.push_by_id() == status
    assert pair.is_untouched()


@pytest.mark.parametrize(("field", "value"), [("nbytes", 1 << 40), ("offset", 1 << 40), ("inner", 7), ("rows", 2**63),
                                              ("outer", 3)])
def test_tensors_that_no_owner_writes_lead_nowhere(pair: PushPair, field: str, value: int) -> None:
    pair.tensor(0, field).value = value
    assert pair.push_by_id() == _plan.DAMAGED
    assert pair.is_untouched()


def test_a_word_that_the_decoder_keeps_is_waited_for_and_counted(pair: PushPair) -> None:
    pair.word.value = HELD_BY_THE_DECODER
    assert pair.push_by_id(timeout_ms=30) == _link.TIMEOUT
    side = _link_record.read(pair.prompt.region, pair.record)["sides"][ACCEPTOR]
    assert (side["open"], side["hazard"], pair.word.value, side["counters"][TIMEOUTS]) == (0, 0, HELD_BY_THE_DECODER, 1)
    assert pair.is_untouched()


def test_a_handler_that_raises_ends_a_push_that_waits(pair: PushPair) -> None:
    pair.word.value = HELD_BY_THE_DECODER

    def stop() -> None:
        raise Stop

    with handler_when(lambda: bool(pair.word.value & WAITERS), stop), pytest.raises(Stop):
        pair.push_by_id()
    side = _link_record.read(pair.prompt.region, pair.record)["sides"][ACCEPTOR]
    assert (side["open"], side["hazard"], pair.word.value, pair.link.users) == (0, 0, HELD_BY_THE_DECODER, 0)
    assert pair.is_untouched()


@pytest.mark.parametrize(("state", "status"), [(2, _link.PEER_GONE), (3, _link.ENDED)])
def test_a_link_that_is_over_touches_nothing_and_lets_go(pair: PushPair, state: int, status: int) -> None:
    assert pair.push_by_id() == 0
    word = memory.word(pair.prompt.region, "LinkRecord", pair.record, "LinkRecord", "state")
    word.value = word.value & ~0xFF | state
    assert pair.push_by_id() == status
    assert pair.link.let_go()
    assert pair.link.directory is None
    assert pair.push_by_id() == status
