"""A row lent by the core: what it names, what it keeps, what ends it; without any other process."""
from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from typing import Any

import memory
import numpy as np
import pytest
from memory import INITIATOR, Pair, by_id, mapped, prefix, request, select
from peer import Namespace
from reference import Geometry, noise

from shmkv import _carry, _layout, _lease, _lend, _link, _lookup, _plan, _pull
from shmkv._lend import ForkedRegion, Loan, fork_segment

SHAPE = Geometry(4, 2, 3, 64)
SENT = noise(SHAPE, seed=4)
MOST = 192


@pytest.fixture
def pair(namespace: Namespace) -> Iterator[Pair]:
    made = memory.pair_with_keys(namespace.name, SENT)
    yield made
    made.close()


def ask(pair: Pair, words: tuple[int, ...] = by_id(1), *, limit: int = MOST, consumes: bool = True,
        **what: int) -> tuple[int, Loan | None]:
    want = select(**what)
    return _pull.lend(pair.handle, struct.pack("=6Q", 1, *words, want[3]), want, consumes, 20000, limit)


def lend(pair: Pair, words: tuple[int, ...] = by_id(1), **how: Any) -> Loan:
    status, loan = ask(pair, words, **how)
    assert status == 0
    assert loan is not None
    return loan


def lease(pair: Pair, number: int) -> int:
    return int(pair.owner.side(pair.record, INITIATOR, "leases", number).value)


def shown(loan: Loan, place: int) -> Any:
    """The bytes of the row in one of the lent tensors."""
    assert loan.region is not None
    offset, _, outer, rows, inner, _ = loan.tensors[place]
    content = memory.content(loan.region)
    return np.stack([content[offset + (piece * rows + loan.row) * inner:][:inner] for piece in range(outer)])


# -- what is lent -----------------------------------------------------------------------------------------------------

def test_loan_names_the_row_and_its_tensors(pair: Pair) -> None:
    source = pair.sources[0]
    loan = lend(pair, request(2), src_first=1, src_count=2)
    assert (loan.row, loan.count, loan.serial, loan.generation, loan.is_open) == (2, 2, 1, source.generation, True)
    each = SHAPE.outer * SHAPE.rows * SHAPE.inner
    assert loan.tensors == [(4096 + place * each, each, *SHAPE[1:], 4) for place in (1, 2)]
    assert [loan.tensor(0), loan.tensor(1)] == loan.tensors
    with pytest.raises(IndexError, match="2 tensors"):
        loan.tensor(2)
    for place in range(2):
        np.testing.assert_array_equal(shown(loan, place), SENT[1 + place, :, 2])


def test_lease_names_the_cache_and_the_hazard_is_gone(pair: Pair) -> None:
    generation = pair.sources[0].generation
    loan = lend(pair)
    assert lease(pair, 0) == generation
    assert pair.owner.side(pair.record, INITIATOR, "hazard").value == 0
    assert pair.owner.pinned(generation)
    loan.close()
    assert lease(pair, 0) == 0
    assert not pair.owner.pinned(generation)


def test_mapping_is_the_one_of_pulls_and_read_only(pair: Pair) -> None:
    loans = [lend(pair, by_id(1), src_row=row) for row in range(3)]
    assert len({loan.region.base for loan in loans if loan.region is not None}) == 1
    assert all(loan.region is not None and not loan.region.writable for loan in loans)
    assert len([line for line in mapped(pair.sources[0].path) if "r--s" in line]) == 1


@pytest.mark.parametrize(("what", "status"), [
    ({"src_first": 4}, _plan.SRC_RANGE), ({"src_first": 3, "src_count": 2}, _plan.SRC_RANGE), ({"src_count": 0}, _plan.SRC_RANGE),
    ({"size": 129}, _plan.SRC_WINDOW), ({"src_offset": 128}, _plan.SRC_WINDOW), ({"size": 2, "src_offset": 127}, _plan.SRC_WINDOW),
    ({"divisor": 3}, _plan.DIVISOR), ({"src_row": 3}, _lookup.NEVER)])
def test_refused_loan_leaves_nothing(pair: Pair, what: dict[str, int], status: int) -> None:
    assert ask(pair, by_id(1), **what) == (status, None)
    assert lease(pair, 0) == 0
    assert pair.owner.side(pair.record, INITIATOR, "hazard").value == 0
    assert pair.handle.leases == 0


def test_private_memory_is_not_lent(pair: Pair) -> None:
    """Registered memory outside of segments: no other process can map it."""
    for field, value in (("kind", _layout.KIND_REGISTERED), ("segment_serial", 0)):
        memory.word(pair.owner.region, "CacheRecord", 0, "CacheRecord", field).value = value
    assert ask(pair) == (_carry.PRIVATE, None)
    assert lease(pair, 0) == 0


def test_pread_lends_nothing(namespace: Namespace) -> None:
    made = Pair(namespace.name, by_pread=True)
    made.add(SENT)
    assert ask(made) == (_lend.UNMAPPED, None)
    assert made.handle.leases == 0
    made.close()


# -- keys -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("tensor", "field", "value"), [(0, "rows", 2**40), (3, "offset", 2**40), (3, "inner", 0)])
def test_tensors_that_no_owner_writes_are_not_lent(pair: Pair, tensor: int, field: str, value: int) -> None:
    """The first is checked as a whole, one like it by its place."""
    memory.word(pair.owner.region, "TensorRecord", tensor, "TensorRecord", field).value = value
    assert ask(pair) == (_plan.DAMAGED, None)
    assert pair.handle.leases == 0


def test_tensors_of_other_forms_are_told_apart(pair: Pair) -> None:
    assert lend(pair).are_alike
    memory.word(pair.owner.region, "TensorRecord", 2, "TensorRecord", "dtype").value += 1
    assert not lend(pair).are_alike
    assert lend(pair, src_count=2).are_alike


def test_keys_are_used_up_as_by_pulls(pair: Pair) -> None:
    assert lend(pair, request(0), consumes=False).is_open
    assert lend(pair, request(0)).is_open
    assert ask(pair, request(0)) == (_lookup.CONSUMED, None)
    halves = [lend(pair, request(1), src_first=2 * half, src_count=2) for half in range(2)]
    assert all(loan.is_open for loan in halves)
    assert ask(pair, request(1)) == (_lookup.CONSUMED, None)
    pair.owner.directory.bind(pair.sources[0].slot, 0, prefix(9))
    assert [ask(pair, prefix(9))[0] for _ in range(3)] == [0] * 3
    assert pair.owner.directory.prefix_hits(pair.sources[0].slot, 0) == 3


def test_unpublished_row_is_not_lent(namespace: Namespace) -> None:
    made = Pair(namespace.name)
    source = made.add(SENT, published=0)
    assert ask(made) == (_lookup.UNPUBLISHED, None)
    made.owner.directory.publish(source.slot, 0, 2)
    assert ask(made)[0] == _lookup.UNPUBLISHED
    assert ask(made, src_count=2)[0] == 0
    assert made.handle.leases == 0, "what nobody holds was given back"
    made.close()


# -- limits and ends ----------------------------------------------------------------------------------------------------

def test_leases_are_limited_and_numbers_used_again(pair: Pair) -> None:
    loans = [lend(pair, limit=3) for _ in range(3)]
    assert ask(pair, limit=3) == (_lease.NONE_FREE, None)
    loans[1].close()
    assert (lease(pair, 0) != 0, lease(pair, 1), lease(pair, 2) != 0) == (True, 0, True)
    loans[1] = lend(pair, limit=3)
    assert lease(pair, 1) == pair.sources[0].generation
    assert ask(pair, limit=1)[0] == _lease.NONE_FREE
    assert _lease.MOST == MOST
    more = [lend(pair, limit=1000) for _ in range(MOST - 3)]
    assert ask(pair, limit=1000) == (_lease.NONE_FREE, None)
    assert pair.handle.leases == MOST
    del loans, more
    assert pair.handle.leases == 0


def test_close_is_said_twice_and_region_stays_mapped(pair: Pair) -> None:
    loan = lend(pair)
    region = loan.region
    loan.close()
    loan.close()
    assert (loan.is_open, loan.region, loan.tensors, loan.count) == (False, None, [], 4)
    with pytest.raises(IndexError, match="nothing is lent"):
        loan.tensor(0)
    pair.handle.force_remove()
    pair.handle.close_side()
    assert region is not None
    assert memory.content(region)[4096:4096 + SENT.nbytes].tobytes() == SENT.tobytes()
    del region
    gc.collect()
    assert [line for line in mapped(pair.sources[0].path) if "r--s" in line] == []


def test_link_that_ended_lends_nothing_more(pair: Pair) -> None:
    loan = lend(pair)
    pair.handle.force_remove()
    assert ask(pair) == (_link.ENDED, None)
    assert (loan.is_open, pair.handle.leases) == (True, 1)
    np.testing.assert_array_equal(shown(loan, 3), SENT[3, :, 0])


def test_record_with_a_lease_is_not_claimed_again(pair: Pair) -> None:
    loan = lend(pair)
    pair.handle.force_remove()
    pair.handle.close_side()
    assert pair.owner.claim(5, 0xE5, 6) != pair.record, "closed, and a living side's lease stands in it"
    loan.close()
    assert pair.owner.claim(6, 0xF6, 7) == pair.record


def test_late_end_leaves_the_record_to_its_next_user(pair: Pair) -> None:
    """This side was taken for dead meanwhile: number 0 is somebody else's lease now."""
    loan = lend(pair)
    state = memory.word(pair.owner.region, "LinkRecord", pair.record, "LinkRecord", "state")
    state.value += 1 << 8
    loan.close()
    assert lease(pair, 0) == pair.sources[0].generation


def test_loan_in_a_cycle_gives_its_lease_back(pair: Pair) -> None:
    held: list[Any] = [lend(pair), lend(pair)]
    held.append(held)
    assert pair.handle.leases == 2
    del held
    gc.collect()
    assert pair.handle.leases == 0


# -- forks --------------------------------------------------------------------------------------------------------------

def test_fork_is_private_and_keeps_its_loan(pair: Pair) -> None:
    path = f"/dev/shm/{pair.sources[0].path}"
    loan = lend(pair)
    assert loan.region is not None
    one, other = (fork_segment(loan, path, loan.region.nbytes) for _ in range(2))
    assert isinstance(one, ForkedRegion)
    assert one.writable
    memory.content(one)[4096:] = 1
    assert memory.content(other)[4096:4096 + SENT.nbytes].tobytes() == SENT.tobytes()
    np.testing.assert_array_equal(shown(loan, 0), SENT[0, :, 0])
    del loan
    assert pair.handle.leases == 1
    del one
    gc.collect()
    assert pair.handle.leases == 1
    del other
    gc.collect()
    assert pair.handle.leases == 0


def test_fork_of_what_is_not_there_says_so(pair: Pair) -> None:
    path = f"/dev/shm/{pair.sources[0].path}"
    with pytest.raises(OSError, match="expected 4096"):
        fork_segment(None, path, 4096)
    with pytest.raises(FileNotFoundError):
        fork_segment(None, path + "x", 4096)
    with pytest.raises(OSError, match="not a segment of this user"):
        fork_segment(None, "/dev/null", 4096)
