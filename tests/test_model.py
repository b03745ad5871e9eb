"""The protocol model holds in every reachable state, and catches deliberate mistakes in the protocol.

A model that finds nothing proves nothing by itself; so each promise is also shown to bite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from model import FAULT, Model, Violation, check, explore
from model_cache import HazardModel
from model_index import IndexModel, probes_are_over
from model_leases import LeaseModel
from model_leases import all_have_ended as all_loans_are_over
from model_leases import memory_is_given_on as lent_memory_is_given_on
from model_link import A, B, C, LinkModel, slot_serves
from model_lock import LockModel, calls_are_over, holder_is_stopped
from model_members import SWEEPER, Member, MembersModel, all_have_ended
from model_points import MODELS, POINTS
from model_publish import PublishModel, reader_has_ended
from model_rows import CoverageModel
from model_segments import SegmentsModel, names_are_gone
from model_table import EXPLORED, row
from model_waits import WaitModel, memory_is_given_on, wait_has_ended

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "reliability.md").read_text()
CRASH = frozenset({"crashes"})
CRASH_OR_STOP = frozenset({"crashes", "stops"})
TWO_VERSIONS = (Member(1), Member(2, version=1), Member(3, version=1))
BY_KEY = (False, False)
Shares = tuple[tuple[int, ...], ...]
OVERLAPPING = ((0, 1), (1,))


def test_lock_holds_with_a_crash_at_every_step() -> None:
    explored = check(LockModel(faults=CRASH))
    explored.assert_always_reaches(calls_are_over, "the end of all calls")
    assert len(explored.states) > 40_000


def test_lock_stays_exclusive_when_a_life_byte_is_lost_at_any_step() -> None:
    explored = check(LockModel(faults=frozenset({"loses its life byte"})))
    assert any(state.link == "BROKEN" for state in explored.states)


def test_lock_calls_end_without_deadline_unless_the_holder_is_stopped() -> None:
    explored = check(LockModel(prompt=True, deadlines=False, faults=CRASH_OR_STOP))
    explored.assert_always_ends(holder_is_stopped, "the end of all calls")
    assert any(holder_is_stopped(state) for state in explored.states)


def test_lock_never_overtakes_an_awake_waiter_whose_calls_have_deadlines() -> None:
    explored = check(LockModel(prompt=True, faults=CRASH_OR_STOP))
    assert any(side.overtaken for state in explored.states for side in state.sides)


def test_lock_stays_live_while_only_stops_and_deadlines_happen() -> None:
    explored = check(LockModel(faults=frozenset({"stops"})))
    assert any(side.answer == "timeout" for state in explored.states for side in state.sides)
    assert all(state.link != "BROKEN" for state in explored.states)


def test_link_slot_is_reused_only_when_nobody_is_in_it() -> None:
    explored = check(LinkModel((A, B, C)))
    explored.assert_always_reaches(slot_serves, "a new link in the slot")
    assert any(state.slot.serial == 2 and state.slot.opened == (1, 1) for state in explored.states)


def test_link_slot_survives_a_crash_in_the_middle_of_linking() -> None:
    explored = check(LinkModel(acceptor_acts=False))
    explored.assert_always_reaches(slot_serves, "a new link in the slot")
    assert any(state.slot.serial == 3 and state.slot.link == "LIVE" for state in explored.states)


@pytest.mark.parametrize("by_id", [(False, True), BY_KEY], ids=["key and id", "two keys"])
def test_memory_is_not_recycled_under_a_reader(by_id: tuple[bool, ...]) -> None:
    model = HazardModel(by_id=by_id)
    explored = check(model)
    explored.assert_always_reaches(model.all_recycled, "recycling")
    assert any(state.tenant == 3 for state in explored.states)


@pytest.mark.parametrize("by_id", [(False, True), BY_KEY], ids=["key and id", "two keys"])
def test_pull_never_calls_foreign_bytes_good_after_its_life_byte_was_lost(by_id: tuple[bool, ...]) -> None:
    explored = check(HazardModel(by_id=by_id, last=2, lost_life_bytes=True))
    assert any(set(reader.read) == {1, 2} for state in explored.states for reader in state.readers)


@pytest.mark.parametrize("tensors_per_word", [1, 2])
@pytest.mark.parametrize("shares", [((0,), (1,)), OVERLAPPING], ids=["halves", "overlapping"])
def test_key_is_consumed_once_and_only_when_covered(tensors_per_word: int, shares: Shares) -> None:
    explored = check(CoverageModel(shares, tensors_per_word))
    ends = {end for state in explored.states for end in state.ends[1] + state.ends[2]}
    assert ends == {"CONSUMED", "REMOVED", "UNBOUND"}


@pytest.mark.parametrize(
    "processes",
    [
        (Member(1), Member(1), Member(2)),
        (Member(1), Member(1), SWEEPER),
        (Member(1), Member(2), SWEEPER),
        TWO_VERSIONS,
    ],
    ids=["join", "join and sweep", "two live and sweep", "two layout versions"],
)
def test_members_and_their_segments_stand_until_they_leave(processes: tuple[Member, ...]) -> None:
    explored = check(MembersModel(processes))
    explored.assert_always_reaches(all_have_ended, "the end of all joins, leaves and sweeps")
    assert any(state.life == 0 and state.inodes == 2 for state in explored.states)


def test_segment_is_whole_when_it_is_published_and_gone_when_its_owner_is_swept() -> None:
    explored = check(SegmentsModel())
    explored.assert_always_reaches(names_are_gone, "the end of a dead owner's names")
    assert any(not state.alive and state.reader.pc == "copy" for state in explored.states)
    assert any(state.reader.checked == (1, 2) for state in explored.states)


@pytest.mark.parametrize("prompt", [True, False])
def test_who_waits_for_a_tensor_is_woken_or_finds_its_owner_dead(prompt: bool) -> None:
    explored = check(PublishModel(prompt=prompt))
    explored.assert_always_reaches(reader_has_ended, "the end of the wait")
    assert any(state.reader == "gone" for state in explored.states)
    assert any(state.woken for state in explored.states)


@pytest.mark.parametrize("by_id", [False, True])
def test_who_waits_for_a_layer_gets_it_or_hears_that_it_will_not_come(by_id: bool) -> None:
    explored = check(WaitModel(by_id=by_id))
    explored.assert_always_reaches(wait_has_ended, "the end of the wait")
    explored.assert_always_reaches(memory_is_given_on, "the end of the cache")
    assert {state.told for state in explored.states} == {"", "success", "not_there", "gone"}
    assert any(state.reader == "asleep" and state.done == 1 for state in explored.states)


@pytest.mark.parametrize("lost_life_bytes", [False, True])
@pytest.mark.parametrize("forks", [False, True])
def test_what_is_lent_stays_until_it_is_given_back(forks: bool, lost_life_bytes: bool) -> None:
    explored = check(LeaseModel(forks, lost_life_bytes, ends_in_two_steps=not lost_life_bytes))
    explored.assert_always_reaches(lent_memory_is_given_on, "the end of the cache")
    explored.assert_always_reaches(all_loans_are_over, "the end of all loans")
    first, second = zip(*(state.holders for state in explored.states), strict=True)
    assert {holder.told for holder in (*first, *second)} == {"", "not_there", "gone", "over"}
    assert any(state.holders[0].lent and state.holders[0].unlinked for state in explored.states)
    assert any(state.holders[0].lent and state.holders[1].lent for state in explored.states) == lost_life_bytes


def test_a_store_on_its_way_when_a_life_byte_is_lost_can_end_anothers_lease() -> None:
    """What is left: between two instructions the holder is taken for dead, its record is cleared, claimed and leased again."""
    with pytest.raises(Violation, match="lease stands until it gives it back itself") as caught:
        check(LeaseModel(lost_life_bytes=True))
    assert "loses its life byte" in str(caught.value)


def test_living_key_is_found_while_the_index_grows_and_its_owner_may_die() -> None:
    explored = check(IndexModel())
    explored.assert_always_reaches(probes_are_over, "the end of the probes")
    assert any(state.version == 2 and state.seen == 0 for state in explored.states)


@pytest.mark.parametrize("name", EXPLORED, ids=[f"{model} {what}" for model, what in EXPLORED])
def test_the_page_has_the_sizes(name: tuple[str, str]) -> None:
    assert row(name) in PAGE


def test_the_page_counts_the_mistakes() -> None:
    assert f"{len(EXPLORED)} explorations" in PAGE
    assert f"{len(MISTAKES)} deliberate" in " ".join(PAGE.split())


def _not_found(model: Model[Any], wanted: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Which of these (who, step) do not occur with a death of the same process right before and right after: breadth first."""
    seen, queue, missing = {model.initial()}, deque([model.initial()]), set(wanted)
    while queue and missing:
        following = list(model.steps(queue.popleft()))
        for label, after in following:
            who, _, step = label.partition(": ")
            for wish in [wish for wish in missing if wish[1] == step and who.startswith(wish[0])]:
                if _may_die(who, following) and (_may_die(who, model.steps(after)) or step == LAST_STEP_OF_A_MEMBER):
                    missing.discard(wish)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return missing


#: After it there is nothing left that its death could change, so the model lets it be.
LAST_STEP_OF_A_MEMBER = "unlinks life file"


def _may_die(who: str, following: Iterable[tuple[str, Any]]) -> bool:
    """A link's label names the thread, too; it is the process that dies."""
    return any(fault in (f"{FAULT}{who} crashes", f"{FAULT}{who[:-1]} crashes") for fault, _ in following)


@pytest.mark.parametrize("name", MODELS)
def test_every_crash_point_is_a_step_of_a_model(name: str) -> None:
    wanted = {(who, step) for lines in POINTS.values() for model, who, step in lines if model == name}
    assert wanted
    assert not _not_found(MODELS[name], wanted)


MISTAKES: list[tuple[Model[Any], str]] = [
    (LockModel(prompt=True, releaser_ignores_offer=True), "awake side that set its mark"),
    (LockModel(reads_word_twice=True), "WAITERS bit belongs to the side"),
    (LockModel(release_by_exchange=True), "offered only to a side that is still acquiring"),
    (LockModel(takes_dead_holders_lock=True), "nobody takes its lock over"),
    (LockModel(leaves_mark_behind=True), "WAITERS bit belongs to the side"),
    (LockModel(forgets_link_after_take=True), "After an ordered unlink"),
    (
        LinkModel(acceptor_acts=False, reuse_ignores_hazards=True),
        "hazard or lease that a living side set stands",
    ),
    (
        LinkModel(acceptor_acts=False, reads_hazards_before_flags=True),
        "hazard or lease that a living side set stands",
    ),
    (LinkModel((A, B, C), acceptor_does_not_look_again=True), "call of the acceptor holds the word"),
    (LinkModel((A, B, C), acceptor_opens_by_flag=True), "call of the acceptor holds the word"),
    (LinkModel((A, B, C), initiator_closes_under_push=True), "still looks at the record before it frees"),
    (LinkModel(acceptor_acts=False, closes_outside_mutex=True), "nobody else resets it"),
    (LinkModel((A, B, C), dead_link_stays_live=True), "A LIVE link has its initiator's side open"),
    (LinkModel(acceptor_acts=False, own_byte_looks_free=True), "the slot is the link that it made"),
    (HazardModel(hazard_is_delayed=True), "memory is not given to another cache"),
    (HazardModel(word_is_not_read_again=True), "memory is not given to another cache"),
    (HazardModel(owner_does_not_scan=True), "memory is not given to another cache"),
    (HazardModel(owner_scans_before_retiring=True), "memory is not given to another cache"),
    (
        HazardModel(BY_KEY, last=2, lost_life_bytes=True, no_last_look_at_cache=True),
        "pull that succeeds read",
    ),
    (SegmentsModel(header_after_live=True), "LIVE cache has its pages"),
    (SegmentsModel(unlinks_before_scanning=True), "can be attached and says its generation"),
    (SegmentsModel(keeps_generation_when_reused=True), "LIVE cache has its pages"),
    (SegmentsModel(maps_by_slot=True), "can be attached and says its generation"),
    (SegmentsModel(sweeps_before_death=True), "can be attached and says its generation"),
    (PublishModel(publishes_before_writing=True), "What is published is written"),
    (PublishModel(looks_at_waiters_first=True), "Nobody sleeps on a progress"),
    (PublishModel(sleeps_uncounted=True), "Who sleeps is counted"),
    (PublishModel(wakes_nobody=True), "Nobody sleeps on a progress"),
    (WaitModel(looks_at_waiters_first=True), "Nobody sleeps although"),
    (WaitModel(wakes_without_adding=True), "Nobody sleeps although"),
    (WaitModel(sees_after_looking=True), "Nobody sleeps although"),
    (WaitModel(by_id=True, retires_silently=True), "Nobody sleeps although"),
    (WaitModel(takes_no_lease=True), "memory is not given to another cache"),
    (WaitModel(clears_hazard_before_lease=True), "memory is not given to another cache"),
    (WaitModel(scans_leases_first=True), "memory is not given to another cache"),
    (WaitModel(no_last_look=True), "A layer that is called good"),
    (LeaseModel(clears_hazard_before_lease=True), "has leased has its name"),
    (LeaseModel(scans_leases_first=True), "has leased has its name"),
    (LeaseModel(scans_before_retiring=True), "has leased has its name"),
    (LeaseModel(owner_ignores_leases=True), "has leased has its name"),
    (LeaseModel(word_is_not_read_again=True), "has leased has its name"),
    (LeaseModel(claims_over_a_lease=True), "has leased has its name"),
    (LeaseModel(forks=True, ends_before_the_last_look=True), "lease stands until"),
    (LeaseModel(lost_life_bytes=True, ends_in_two_steps=False, late_end_does_not_look=True), "lease stands until"),
    (IndexModel(no_second_look=True), "key that lives all the time"),
    (IndexModel(switches_before_refill=True), "key that lives all the time"),
    (IndexModel(removal_empties=True), "key that lives all the time"),
    (IndexModel(reader_stops_at_tombstones=True), "key that lives all the time"),
    (CoverageModel(words_without_generation=True), "late mark never counts"),
    (CoverageModel(tensors_per_word=1, reads_words_before_marking=True), "all covered is not LIVE"),
    (CoverageModel(live_before_reset=True), "all covered is not LIVE"),
    (CoverageModel(reaper_forgets_full_rows=True), "all covered is not LIVE"),
    (CoverageModel(remove_is_a_store=True), "A key ends once"),
    (MembersModel(inodes_are_not_compared=True), "Once the life file has no name"),
    (MembersModel(life_file_goes_before_table=True), "Once the life file has no name"),
    (MembersModel(record_is_overwritten_unswept=True), "every segment is of an incarnation that"),
    (MembersModel(last_leaver_does_not_sweep=True), "leaves nothing behind"),
    (
        MembersModel((Member(1), Member(2), SWEEPER), sweeper_does_not_look_again=True),
        "member's segments stand",
    ),
    (MembersModel(cold_byte_is_dropped_before_join=True), "living member's record stands"),
    (MembersModel(TWO_VERSIONS, versions_share_bytes=True), "no dead member passes for alive"),
]


def _mistake(model: Any) -> str:
    """The names of the switches that are on and are off by default."""
    return " ".join(
        field.name for field in fields(model) if field.default is False and getattr(model, field.name)
    )


@pytest.mark.parametrize(("model", "broken"), MISTAKES, ids=[_mistake(model) for model, _ in MISTAKES])
def test_model_catches_a_mistake(model: Model[Any], broken: str) -> None:
    with pytest.raises(Violation, match=broken) as caught:
        check(model)
    assert "start:" in str(caught.value)


CONSEQUENCES: list[tuple[Model[Any], str, str]] = [
    (
        MembersModel(inodes_are_not_compared=True),
        "life file has no name",
        "All living members use one life file",
    ),
    (
        MembersModel(life_file_goes_before_table=True),
        "life file has no name",
        "All living members use one life",
    ),
    (LinkModel((A, B, C), dead_link_stays_live=True), "A LIVE link", "call of the acceptor holds the word"),
    (LeaseModel(clears_hazard_before_lease=True), "has its name", "memory is not another cache's"),
    (LeaseModel(scans_leases_first=True), "has its name", "memory is not another cache's"),
    (LeaseModel(scans_before_retiring=True), "has its name", "memory is not another cache's"),
    (LeaseModel(owner_ignores_leases=True), "has its name", "memory is not another cache's"),
    (LeaseModel(word_is_not_read_again=True), "has its name", "memory is not another cache's"),
    (LeaseModel(claims_over_a_lease=True), "has its name", "memory is not another cache's"),
    (LeaseModel(forks=True, ends_before_the_last_look=True), "lease stands until", "has leased has its name"),
]


@pytest.mark.parametrize(
    ("model", "waived", "broken"), CONSEQUENCES, ids=[_mistake(model) for model, _, _ in CONSEQUENCES]
)
def test_mistake_has_consequences_beyond_the_first_promise(
    model: Model[Any], waived: str, broken: str
) -> None:
    promises = [promise for promise in model.promises if waived not in (promise.__doc__ or "")]
    assert len(promises) == len(model.promises) - 1
    with pytest.raises(Violation, match=broken):
        explore(model.initial(), model.steps, promises)


def test_dead_hazards_that_count_would_keep_memory_for_ever() -> None:
    model = HazardModel(dead_hazards_count=True)
    explored = check(model)
    with pytest.raises(Violation, match="stuck"):
        explored.assert_always_reaches(model.all_recycled, "recycling")


def test_dead_leases_that_count_would_keep_memory_for_ever() -> None:
    explored = check(WaitModel(dead_leases_count=True))
    with pytest.raises(Violation, match="stuck"):
        explored.assert_always_reaches(memory_is_given_on, "the end of the cache")


def test_dead_views_that_count_would_keep_memory_for_ever() -> None:
    explored = check(LeaseModel(dead_leases_count=True))
    with pytest.raises(Violation, match="stuck"):
        explored.assert_always_reaches(lent_memory_is_given_on, "the end of the cache")


def test_side_opened_before_it_is_named_would_lose_the_slot() -> None:
    explored = check(LinkModel(acceptor_acts=False, opens_before_naming=True))
    with pytest.raises(Violation, match="stuck"):
        explored.assert_always_reaches(slot_serves, "a new link in the slot")


def _count_to_three(state: int) -> Iterator[tuple[str, int]]:
    if state < 3:
        yield "one more", state + 1
    if state == 1:
        yield f"{FAULT}falls", 10


def _not_three(state: int) -> bool:
    """The count stays under three."""
    return state != 3


def test_engine_counts_states_and_prints_the_shortest_way_to_a_violation() -> None:
    explored = explore(0, _count_to_three, ())
    assert (len(explored.states), explored.transitions) == (5, 4)
    with pytest.raises(Violation, match=r"The count stays under three\.(.|\n)*one more") as caught:
        explore(0, _count_to_three, (_not_three,))
    assert str(caught.value).count("one more") == 3


def test_engine_does_not_take_a_failure_for_progress() -> None:
    explored = explore(0, _count_to_three, ())
    explored.assert_always_reaches(lambda state: state in (3, 10), "an end")
    with pytest.raises(Violation, match="stuck: falling"):
        explored.assert_always_reaches(lambda state: state == 10, "falling")


def test_engine_finds_a_circle_unless_it_is_excused() -> None:
    explored = explore(0, lambda state: [("turn", (state + 1) % 3)], ())
    explored.assert_always_ends(lambda state: state == 1, "an end")
    with pytest.raises(Violation, match="livelock"):
        explored.assert_always_ends(lambda state: False, "an end")
