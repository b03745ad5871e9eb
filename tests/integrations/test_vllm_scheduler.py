"""The scheduler's side: plain values in, plans out."""
from __future__ import annotations

import pickle

import pytest

from shmkv.integrations.vllm.block_keys import Prompt, block_hashes
from shmkv.integrations.vllm.counters import COUNTED, Counters, added, readable
from shmkv.integrations.vllm.plans import BlockPlace, ScheduledRequest, StepPlan
from shmkv.integrations.vllm.scheduler import MOST_LOADS, SchedulerSide

SEED, SIZE = b"seed", 4
TOKENS = list(range(100, 118))                  # four whole blocks and a half
PROMPT = Prompt(TOKENS)
HASHES = block_hashes(SEED, PROMPT, SIZE)


class House:
    """A scheduler's side, and which blocks others have."""

    def __init__(self, *, produces: bool = False, consumes: bool = True, is_async: bool = False, most_blocks: int = 99) -> None:
        self.there: set[bytes] = set()
        self.counters = Counters()
        self.side = SchedulerSide(SEED, SIZE, [0], (lambda name, _: name in self.there) if consumes else None, is_async=is_async,
                                  most_blocks=most_blocks if produces else 0, counters=self.counters)

    def plan(self, computed: int, scheduled: int, block_ids: list[int], *, replaces: bool = True) -> StepPlan:
        return self.side.plan([ScheduledRequest("r", (block_ids,), replaces, computed, scheduled)])


@pytest.mark.parametrize(("there", "computed", "tokens"), [
    ([], 0, 0), ([0], 0, 4), ([0, 1, 2, 3], 0, 16), ([1, 2, 3], 0, 0), ([0, 2, 3], 0, 4), ([0, 1], 8, 0), ([1, 2], 4, 8),
    ([3], 12, 4), ([0, 1, 2, 3], 16, 0)])
def test_the_longest_beginning_that_is_there(there: list[int], computed: int, tokens: int) -> None:
    house = House()
    house.there.update(HASHES[place] for place in there)
    for _ in range(2):                          # may be asked twice
        assert house.side.match("r", PROMPT, len(TOKENS), computed) == (tokens, False)


@pytest.mark.parametrize(("is_async", "tokens"), [(False, 15), (True, 16)])
def test_a_full_hit_leaves_a_token_to_compute(is_async: bool, tokens: int) -> None:
    house = House(is_async=is_async)
    house.there.update(HASHES)
    assert house.side.match("r", Prompt(TOKENS[:16]), 16, 0) == (tokens, is_async)
    house.side.allocated("r", [[9, 8, 7, 6]], tokens)
    (load,) = house.side.plan([]).loads
    assert load.blocks == tuple(map(BlockPlace, HASHES, [9, 8, 7, 6]))
    assert load.is_async == is_async


@pytest.mark.parametrize("prompt", [Prompt([5]), Prompt([]), None])
def test_a_prompt_without_a_whole_block_is_no_affair_of_ours(prompt: Prompt | None) -> None:
    house = House(produces=True, is_async=True)
    assert house.side.match("r", prompt, 1, 0) == (0, False)
    assert house.plan(0, 1, [3]) == StepPlan()


def test_a_load_names_the_blocks_behind_those_that_the_engine_has() -> None:
    house = House()
    house.there.update(HASHES[:3])
    assert house.side.match("r", PROMPT, len(TOKENS), 4) == (8, False)
    house.side.allocated("r", [[50, 51, 52, 53, 54]], 8)
    plan = house.plan(12, 6, [50, 51, 52, 53, 54])
    assert plan.loads[0].blocks == (BlockPlace(HASHES[1], 51), BlockPlace(HASHES[2], 52))
    assert house.counters.take() == {"hit_tokens": 8}
    assert house.side.plan([]).loads == ()      # told once
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_what_is_matched_and_finds_no_room_is_not_loaded() -> None:
    house = House()
    house.there.update(HASHES)
    house.side.match("r", PROMPT, len(TOKENS), 0)
    house.side.allocated("r", [[1, 2]], 0)
    assert house.side.plan([]) == StepPlan()


def test_a_request_whose_loads_fail_is_computed_in_the_end() -> None:
    house = House(is_async=True)
    house.there.update(HASHES)
    for _ in range(MOST_LOADS):
        assert house.side.match("r", PROMPT, len(TOKENS), 0) == (16, True)
        house.side.allocated("r", [[1, 2, 3, 4, 5]], 16)
    assert house.side.match("r", PROMPT, len(TOKENS), 0) == (0, False)


def test_an_engine_that_only_produces_finds_nothing() -> None:
    house = House(produces=True, consumes=False)
    house.there.update(HASHES)
    assert house.side.match("r", PROMPT, len(TOKENS), 0) == (0, False)


def test_an_engine_that_only_consumes_stores_nothing() -> None:
    house = House()
    house.side.match("r", PROMPT, len(TOKENS), 0)
    assert house.plan(0, 18, [1, 2, 3, 4, 5]).stores == ()


def test_blocks_are_stored_by_the_step_that_fills_them() -> None:
    house = House(produces=True)
    house.side.match("r", PROMPT, len(TOKENS), 0)
    (first,) = house.plan(0, 6, [1, 2]).stores
    assert first.blocks == (BlockPlace(HASHES[0], 1),)
    assert (first.relied_on, first.computed) == ((), (1, 2))
    (second,) = house.plan(6, 7, [3, 4], replaces=False).stores
    assert second.blocks == (BlockPlace(HASHES[1], 2), BlockPlace(HASHES[2], 3))
    assert (second.relied_on, second.computed) == ((1,), (2, 3, 4))
    (third,) = house.plan(13, 5, [5], replaces=False).stores
    assert third.blocks == (BlockPlace(HASHES[3], 4),)
    assert house.plan(18, 1, [], replaces=False).stores == ()       # decode


def test_what_the_engine_had_itself_is_stored_and_what_it_loaded_is_not() -> None:
    house = House(produces=True)
    house.there.update(HASHES[1:3])
    assert house.side.match("r", PROMPT, len(TOKENS), 4) == (8, False)
    house.side.allocated("r", [[1, 2, 3, 4, 5]], 8)
    (store,) = house.plan(12, 6, [1, 2, 3, 4, 5]).stores
    assert store.blocks == (BlockPlace(HASHES[0], 1), BlockPlace(HASHES[3], 4))
    assert (store.relied_on, store.computed) == ((1, 2, 3), (4, 5))


def test_what_the_engine_had_entirely_is_stored_once() -> None:
    """It may be missing in shared memory, although this engine has nothing of it to compute but the end."""
    house = House(produces=True)
    house.side.match("r", PROMPT, len(TOKENS), 16)
    (store,) = house.plan(16, 2, [1, 2, 3, 4, 5]).stores
    assert store.blocks == tuple(map(BlockPlace, HASHES, [1, 2, 3, 4]))
    assert house.plan(18, 1, [], replaces=False).stores == ()


def test_of_a_prompt_that_is_too_long_the_beginning_is_stored() -> None:
    house = House(produces=True, most_blocks=3)
    house.side.match("r", PROMPT, len(TOKENS), 0)
    (first,) = house.plan(0, 10, [1, 2, 3]).stores
    (second,) = house.plan(10, 8, [4, 5], replaces=False).stores
    assert first.blocks + second.blocks == tuple(map(BlockPlace, HASHES[:3], [1, 2, 3]))


def test_blocks_whose_load_failed_are_stored_when_they_were_computed() -> None:
    house = House(produces=True)
    house.there.update(HASHES[:2])
    house.side.match("r", PROMPT, len(TOKENS), 0)
    house.side.allocated("r", [[1, 2, 3, 4, 5]], 8)
    (store,) = house.plan(8, 10, [1, 2, 3, 4, 5]).stores
    assert store.relied_on == (1, 2)
    (again,) = house.plan(0, 18, [], replaces=False).stores         # vLLM takes it back to the beginning
    assert again.blocks == tuple(map(BlockPlace, HASHES, [1, 2, 3, 4]))
    assert again.relied_on == ()


def test_a_request_that_was_preempted_comes_back_with_other_blocks() -> None:
    house = House(produces=True)
    house.side.match("r", PROMPT, len(TOKENS), 0)
    house.plan(0, 8, [1, 2])
    (store,) = house.plan(0, 18, [7, 8, 9, 10, 11]).stores
    assert store.blocks == tuple(map(BlockPlace, HASHES, [7, 8, 9, 10]))


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    house = House(produces=True)
    house.side.match("r", PROMPT, len(TOKENS), 0)
    house.side.match("waiting", PROMPT, len(TOKENS), 0)
    house.plan(0, 18, [1, 2, 3, 4, 5])
    for request_id in ("r", "waiting", "unknown"):
        house.side.finished(request_id)
    assert len(house.side) == 0
    assert house.plan(18, 1, []) == StepPlan()
    house.side.allocated("r", [[1]], 4)
    assert house.side.plan([]).loads == ()


def test_forgetting_is_told_with_the_next_step_and_once() -> None:
    house = House(produces=True)
    house.side.forget()
    assert house.side.plan([]) == StepPlan(forget=True)
    assert house.side.plan([]) == StepPlan()


def test_nothing_is_found_until_the_step_that_forgets() -> None:
    """What is to be removed is there until then."""
    house = House(produces=True, is_async=True)
    house.there.update(HASHES)
    assert house.side.match("r", PROMPT, len(TOKENS), 0) == (16, True)
    house.side.forget()
    for request_id in ("r", "new"):
        assert house.side.match(request_id, PROMPT, len(TOKENS), 0) == (0, False)
    assert house.plan(0, 18, [1, 2, 3, 4, 5]).forget
    assert house.side.match("new", PROMPT, len(TOKENS), 0) == (16, True)


def test_a_request_that_may_not_read_is_computed_and_stored() -> None:
    house = House(produces=True)
    house.there.update(HASHES)
    assert house.side.match("r", PROMPT, len(TOKENS), 0, reads=False) == (0, False)
    (store,) = house.plan(0, 18, [1, 2, 3, 4, 5]).stores
    assert store.blocks == tuple(map(BlockPlace, HASHES, [1, 2, 3, 4]))


def test_the_prompt_of_a_request_is_needed_once() -> None:
    house = House()
    house.there.update(HASHES)
    assert "r" not in house.side
    house.side.match("r", PROMPT, len(TOKENS), 0)
    assert "r" in house.side
    assert house.side.match("r", None, len(TOKENS), 0) == (16, False)


def test_counts_add_up_and_are_taken_once() -> None:
    counters = Counters()
    counters.add(loaded_blocks=2, loaded_bytes=3_000_000)
    counters.add(loaded_blocks=1, load_ns=2_000_000)
    counts = counters.take()
    assert counts == {"loaded_blocks": 3, "loaded_bytes": 3_000_000, "load_ns": 2_000_000}
    assert counters.take() == {}
    assert added(counts, {"loaded_blocks": 1, "hit_tokens": 5}) == {**counts, "loaded_blocks": 4, "hit_tokens": 5}
    assert readable(counts) == {"loaded_blocks": 3, "loaded_MB": 3.0, "load_ms": 2.0}
    assert set(added(dict.fromkeys(COUNTED, 1), {})) == set(COUNTED)
    with pytest.raises(KeyError, match="unknown"):
        counters.add(unknown=1)
