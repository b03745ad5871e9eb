"""Models with several KV cache groups, some of which look through a window: what has to be there, what is moved, what is told."""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from peer import Namespace
from vllm_ends import HEADER, ROW, finished_of, found
from vllm_parts import BLOCK_NBYTES, GROUP, IDENTITY, NAMES, hashes, random_layers, run_step

from shmkv.integrations.vllm import scheduler
from shmkv.integrations.vllm.block_keys import Prompt, block_hashes
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.plans import BlockPlace, Load, ScheduledRequest, StepPlan, Store
from shmkv.integrations.vllm.publisher import most_blocks
from shmkv.integrations.vllm.scheduler import LOOK_AGAIN_S, NULL_BLOCK, SchedulerSide
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import open_shared
from shmkv.integrations.vllm.worker import WorkerSide

SEED, SIZE, WINDOW = b"seed", 4, 6
TOKENS = list(range(100, 118))                  # four whole blocks and a half
HASHES = block_hashes(SEED, Prompt(TOKENS), SIZE)
There = set[tuple[bytes, int]]


def scheduler_side(there: There, *windows: int, is_async: bool = True, most_blocks: int = 99) -> SchedulerSide:
    return SchedulerSide(SEED, SIZE, windows, lambda name, group: (name, group) in there, is_async=is_async,
                         most_blocks=most_blocks, counters=Counters())


def blocks(group: int, *numbers: int) -> There:
    return {(HASHES[number], group) for number in numbers}


@pytest.mark.parametrize(("whole", "windowed", "computed", "tokens"), [
    ((0, 1, 2, 3), (2, 3), 0, 16),              # token 16 looks at 11 and those behind it
    ((0, 1, 2, 3), (3,), 0, 0),
    ((0, 1, 2, 3), (0, 1, 3), 0, 8),
    ((0, 1, 2, 3), (0,), 0, 4),
    ((0, 1), (0, 1, 2, 3), 0, 8),
    ((1, 2, 3), (2, 3), 4, 12),
    ((1, 2, 3), (1,), 4, 4),                    # block 0 is the engine's own
    ((), (0, 1, 2, 3), 0, 0),
])
def test_a_window_needs_the_blocks_that_the_next_token_looks_at(whole: tuple[int, ...], windowed: tuple[int, ...], computed: int,
                                                                tokens: int) -> None:
    side = scheduler_side(blocks(0, *whole) | blocks(1, *windowed), 0, WINDOW)
    assert side.match("r", Prompt(TOKENS), len(TOKENS), computed) == (tokens, tokens > 0)


@pytest.mark.parametrize("windows", [(0,), (0, 5), (9,), (4, 0, 9), (1, 2)])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_longest_way_that_all_groups_can_go(windows: tuple[int, ...], is_async: bool) -> None:
    """Against all lengths, tried one by one."""
    numbers = random.Random(f"{windows}{is_async}")
    for _ in range(200):
        there = {(name, group) for name in HASHES for group in range(len(windows)) if numbers.random() < 0.7}
        own, length = numbers.randrange(4), numbers.choice([16, 17, 18])
        most = length if is_async and not any(windows) else length - 1
        expected = 0
        for count in range(own, len(HASHES) + 1):
            tokens = min(count * SIZE, most)
            needed = [(name, group) for group, window in enumerate(windows) for block, name in enumerate(HASHES[:count])
                      if block >= own and (not window or (block + 1) * SIZE > tokens - window + 1)]
            if there.issuperset(needed):
                expected = max(0, tokens - own * SIZE)
        side = scheduler_side(there, *windows, is_async=is_async)
        assert side.match("r", Prompt(TOKENS[:length]), length, own * SIZE)[0] == expected
        # What goes before the next look is not found, and nothing else is lost.
        there.difference_update(numbers.sample(sorted(there), len(there) // 4))
        assert (side.match("r", Prompt(TOKENS[:length]), length, own * SIZE) ==
                scheduler_side(there, *windows, is_async=is_async).match("r", Prompt(TOKENS[:length]), length, own * SIZE))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scheduler's side has the time `now`."""
    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(scheduler, "time", made)
    return made


@pytest.mark.parametrize("windows", [(WINDOW,), (WINDOW, 9), (0, WINDOW)])
@pytest.mark.parametrize("reach", [0, 3])
def test_a_request_that_waits_for_room_is_not_looked_up_from_the_end_at_every_step(clock: SimpleNamespace, windows: tuple[int, ...],
                                                                                   reach: int) -> None:
    tokens = list(range(1000))
    names = block_hashes(SEED, Prompt(tokens), SIZE)
    asked: list[bytes] = []

    def is_found(name: bytes, group: int) -> bool:
        asked.append(name)
        return not windows[group] or name in names[:reach]

    side = SchedulerSide(SEED, SIZE, windows, is_found, is_async=True, most_blocks=99, counters=Counters())

    def match(computed: int = 0) -> tuple[int, int]:
        """Tokens, and how many look-ups they took."""
        asked.clear()
        return side.match("r", Prompt(tokens), len(tokens), computed)[0], len(asked)

    found, looked_up = match()
    assert (found, looked_up >= len(names) - reach) == (reach * SIZE, True)
    for _ in range(3):
        again, looked_up = match()
        assert (again, looked_up <= reach * len(windows)) == (found, True)
    assert match(computed=40 * SIZE)[1] > 100, "with another beginning of its own a request may go further"
    assert match()[1] > 100
    clock.now += LOOK_AGAIN_S
    assert match()[1] > 100


def test_what_comes_while_a_request_waits_is_found_and_what_goes_is_not(clock: SimpleNamespace) -> None:
    there = blocks(0, 0, 1)
    side = scheduler_side(there, WINDOW)

    def match() -> int:
        return side.match("r", Prompt(TOKENS), len(TOKENS), 0)[0]

    assert match() == 8
    there.difference_update(blocks(0, 1))
    assert match() == 4, "at once"
    there.update(blocks(0, 1, 2, 3))
    clock.now += LOOK_AGAIN_S
    assert match() == 16


def test_a_load_names_those_blocks_and_no_others() -> None:
    side = scheduler_side(blocks(0, 0, 1, 2, 3) | blocks(1, 2, 3), 0, WINDOW)
    side.match("r", Prompt(TOKENS), len(TOKENS), 0)
    side.allocated("r", ([11, 12, 13, 14], [NULL_BLOCK, NULL_BLOCK, 23, 24]), 16)
    (load,) = side.plan([]).loads
    assert load.is_async
    assert load.blocks == (*map(BlockPlace, HASHES, (11, 12, 13, 14)), BlockPlace(HASHES[2], 23, 1), BlockPlace(HASHES[3], 24, 1))


def test_only_blocks_that_are_there_are_stored() -> None:
    """The engine has 12 tokens itself, and of the windowed group what the window holds of them."""
    side = scheduler_side(set(), 0, WINDOW)
    side.match("r", Prompt(TOKENS), len(TOKENS), 12)
    (store,) = side.plan([ScheduledRequest("r", ([11, 12, 13, 14], [NULL_BLOCK, 22, 23, 24]), True, 12, 5)]).stores
    assert store.blocks == (*map(BlockPlace, HASHES, (11, 12, 13, 14)), BlockPlace(HASHES[1], 22, 1), BlockPlace(HASHES[2], 23, 1),
                            BlockPlace(HASHES[3], 24, 1))
    assert store.relied_on == (11, 12, 13, 22, 23)
    assert store.computed == (14, 24)


def test_a_block_that_left_the_window_is_not_looked_at_again() -> None:
    """Its id is another request's by then."""
    side = scheduler_side(set(), WINDOW)
    side.match("r", Prompt(TOKENS), len(TOKENS), 0)
    side.plan([ScheduledRequest("r", ([1, 2, 3],), True, 0, 12)])
    (store,) = side.plan([ScheduledRequest("r", ([4, 5],), False, 12, 6)]).stores
    assert store.blocks == (BlockPlace(HASHES[3], 4),)
    assert store.relied_on == (2, 3)


def test_of_a_prompt_that_is_too_long_each_group_stores_the_same_beginning() -> None:
    side = scheduler_side(set(), 0, WINDOW, most_blocks=2)
    side.match("r", Prompt(TOKENS), len(TOKENS), 0)
    (store,) = side.plan([ScheduledRequest("r", ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), True, 0, 18)]).stores
    assert [(place.block_id, place.group) for place in store.blocks] == [(1, 0), (2, 0), (6, 1), (7, 1)]


# -- the worker's side ------------------------------------------------------------------------------------------------

SECOND = replace(GROUP, window=WINDOW, num_layers=2)
BOTH = replace(IDENTITY, groups=(GROUP, SECOND))


class Engine:
    """A worker's side in this process, of two groups that lie over each other in memory: the second has a layer less."""

    def __init__(self, rng: np.random.Generator, **settings: int) -> None:
        self.shared = open_shared(ConnectorSettings(**settings), BOTH, consumes=True, produces=True)
        first = random_layers(16, rng)
        self.groups = [first, Layers({f"second.{number}": array for number, array in enumerate(first.arrays[:2])})]
        self.worker = WorkerSide(self.shared, self.groups, BOTH, 0, consumes=True, produces=True)

    def step(self, plan: StepPlan) -> None:
        run_step(self.worker, plan, (NAMES[0], "second.0", NAMES[1], "second.1", NAMES[2]))

    def has(self, block_hash: bytes, group: int) -> bool:
        return found(self.shared, block_hash, group)

    def close(self) -> None:
        self.worker.close()
        self.shared.close()


CAPACITY = 4 * HEADER + 10 * (ROW + 2 * BLOCK_NBYTES)


@pytest.fixture
def engine(namespace: Namespace, rng: np.random.Generator) -> Iterator[Engine]:
    made = Engine(rng, capacity_bytes=CAPACITY)
    yield made
    made.close()


def test_blocks_of_each_group_come_byte_for_byte(engine: Engine) -> None:
    names = hashes(3)
    stored = (*map(BlockPlace, names, (4, 5, 6)), BlockPlace(names[1], 7, 1), BlockPlace(names[2], 8, 1))
    engine.step(StepPlan(stores=(Store("s", stored, (), (4, 5, 6, 7, 8)),)))
    assert [(engine.has(name, 0), engine.has(name, 1)) for name in names] == [(True, False), (True, True), (True, True)]
    before = [array.copy() for array in engine.groups[0].arrays]
    wanted = (*map(BlockPlace, names, (10, 11, 12)), BlockPlace(names[1], 13, 1), BlockPlace(names[2], 14, 1))
    engine.step(StepPlan(loads=(Load("l", wanted, True),)))
    assert finished_of(engine.worker) == {"l"}
    assert engine.worker.take_failed_requests() == set()
    for number, (array, old) in enumerate(zip(engine.groups[0].arrays, before, strict=True)):
        assert np.array_equal(array[[10, 11, 12]], old[[4, 5, 6]])
        # The third layer is in the first group alone: blocks of the second have nothing there.
        assert np.array_equal(array[[13, 14]], old[[7, 8]] if number < 2 else old[[13, 14]])
        assert np.array_equal(array[[0, 1, 2, 3, 9, 15]], old[[0, 1, 2, 3, 9, 15]])
    counts = engine.shared.counters.take()
    assert counts["loaded_bytes"] == counts["published_bytes"] == 3 * ROW + 2 * 2 * BLOCK_NBYTES


def test_a_load_that_fails_is_told_by_its_request(engine: Engine) -> None:
    """By block ids vLLM could not tell whose they are."""
    names = hashes(1)
    engine.step(StepPlan(stores=(Store("s", (BlockPlace(names[0], 4),), (), (4,)),)))
    engine.step(StepPlan(loads=(Load("l", (BlockPlace(names[0], 10), BlockPlace(names[0], 11, 1)), True),)))
    assert finished_of(engine.worker) == engine.worker.take_failed_requests() == {"l"}
    assert engine.worker.take_failed_requests() == engine.worker.take_failed_blocks() == set()
    # What relies on one of them is not for others.
    engine.step(StepPlan(stores=(Store("r", (BlockPlace(hashes(1)[0], 5),), (11,), (5,)),)))
    assert engine.shared.counters.take()["dropped_blocks"] == 1


def test_where_blocks_say_enough_when_a_load_fails() -> None:
    windowed = replace(GROUP, window=WINDOW)
    kinds = [replace(IDENTITY, groups=groups) for groups in ((GROUP,), (windowed,), (GROUP, GROUP), (GROUP, windowed))]
    assert [identity.fails_by_block for identity in kinds] == [True, False, False, False]


def test_groups_lose_the_same_blocks_when_there_is_no_room(engine: Engine) -> None:
    assert most_blocks(CAPACITY, BOTH.groups) == 10
    assert most_blocks(CAPACITY - 1, BOTH.groups) == 9
    names = hashes(15)
    for begin in (0, 5):                # in all ten blocks; those of the first step are used least recently
        stored = [BlockPlace(name, 1 + place, group) for group in range(2) for place, name in enumerate(names[begin:begin + 5])]
        engine.step(StepPlan(stores=(Store("s", tuple(stored), (), ()),)))
    assert all(engine.has(name, group) for name in names[:10] for group in range(2))
    stored = [BlockPlace(name, 1 + place, group) for group in range(2) for place, name in enumerate(names[10:])]
    engine.step(StepPlan(stores=(Store("s", tuple(stored), (), ()),)))
    assert [[engine.has(name, group) for name in names] for group in range(2)] == [[False] * 5 + [True] * 10] * 2
