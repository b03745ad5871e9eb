"""A handle whose record has moved on: it knows that, and leaves the record to whoever has it now."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import memory
import pytest
from memory import ACCEPTOR, INITIATOR, Pair, destination, request, select
from peer import Namespace
from reference import Geometry, noise

from shmkv import _link

SHAPE = Geometry(1, 1, 2, 16)
REMOVED, OFFERED_TO_US, WAITERS = 3, 4, 1 << 31


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = memory.pair_with_keys(namespace.name, noise(SHAPE, seed=4))
    yield made
    made.close()


def field(pair: Pair, name: str) -> Any:
    return memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", name)


def pull(pair: Pair) -> int:
    return memory.pull(pair.handle, destination(*SHAPE)[0], request(0), select())


def next_serial(pair: Pair) -> None:
    """Another cluster has the record now, and its link is alive."""
    field(pair, "state").value += 1 << 8


def test_link_of_another_cluster_in_the_record_is_not_ours(pair: Pair) -> None:
    next_serial(pair)
    assert pair.handle.look() == _link.ENDED
    assert pull(pair) == _link.ENDED
    assert field(pair, "word").value == 0


def test_late_close_leaves_the_record_to_its_next_user(pair: Pair) -> None:
    hazard, is_open = (pair.owner.side(pair.record, INITIATOR, name) for name in ("hazard", "open"))
    next_serial(pair)
    hazard.value, is_open.value = 9, 1
    pair.handle.close_side()
    assert (hazard.value, is_open.value) == (9, 1)


def test_word_that_comes_after_an_unlink_lets_nobody_in(pair: Pair) -> None:
    assert pull(pair) == 0              # the segment is attached: nothing looks at the link afterwards but the turn itself
    field(pair, "word").value = 1
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(pull(pair)))
    thread.start()
    memory.wait_until(lambda: bool(field(pair, "word").value & WAITERS), "the thread at the word")
    field(pair, "state").value = field(pair, "state").value & ~0xFF | REMOVED
    field(pair, "word").value = OFFERED_TO_US
    thread.join()
    assert answers == [_link.ENDED]
    assert field(pair, "word").value == 0


def test_record_that_names_no_member_is_refused(pair: Pair) -> None:
    pair.owner.side(pair.record, ACCEPTOR, "slot").value = 1024
    with pytest.raises(ValueError, match="names member slot 1024 of 1024"):
        pair.new_handle()


def test_handle_knows_its_peer_as_it_was_when_they_linked(pair: Pair) -> None:
    pair.owner.side(pair.record, ACCEPTOR, "incarnation").value += 1
    assert pair.handle.peer_incarnation == pair.owner.incarnation


def test_link_that_is_being_removed_lets_nobody_in(pair: Pair) -> None:
    pair.handle.mark_closing(True)
    assert pull(pair) == _link.BUSY
    pair.handle.mark_closing(False)
    assert pull(pair) == 0


def test_handle_keeps_what_its_addresses_point_to(pair: Pair) -> None:
    assert (pair.handle.directory, pair.handle.members) == (pair.owner.region, pair.owner.members)
    assert (pair.handle.cluster_id, pair.handle.slot, len(pair.handle.followers)) == (pair.owner.cluster_id, pair.record, 0)
