"""Engines that all do both and so have one prefix cache together, each with settings of its own: `strict` has room for three blocks
and ends requests whose blocks went, `beside` loads beside the batch, `fleeting` keeps blocks for a while."""
from __future__ import annotations

import time
from typing import NamedTuple

import pytest
from engine import Engine
from faults import HOLD_LOADS, IS_HELD, KILL_IN_A_LOAD, LET_GO, LONG_DEADLINE, SHORT_DEADLINE, SHORT_MS
from house import HEADER, House
from models import make
from prompts import prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
BLOCK = 128
BLOCK_NBYTES = 2 * 2 * 2 * 32 * 2 * BLOCK       # layers, keys and values, heads, their size, bfloat16, tokens
ROOM = 3                                        # blocks
NEW_TOKENS = 8
KEPT_MS = 6000


class Sides(NamedTuple):
    house: House
    strict: Engine
    beside: Engine
    fleeting: Engine


@pytest.fixture(scope="module")
def sides(house: House) -> Sides:
    model = make("tiny", house.folder)
    engines = [house.start("strict", model, "kv_both", policy="fail", extra={"capacity_bytes": HEADER + ROOM * BLOCK_NBYTES}),
               house.start("beside", model, "kv_both", extra={"async_load": True}),
               house.start("fleeting", model, "kv_both", extra={"key_ttl_ms": KEPT_MS})]
    for engine in engines:
        engine.wait_until_ready()
    house.wait_until(lambda: all(len(engine.call("state")["peers"]) == len(engines) for engine in engines))
    return Sides(house, *engines)


def say(engine: Engine, asked: list[int]) -> list[int]:
    said: list[list[int]] = engine.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    return said[0]


class Counts:
    """What an engine has counted since."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._before = engine, self._now(engine)

    @staticmethod
    def _now(engine: Engine) -> dict[str, int]:
        counted: dict[str, int] = engine.call("counted")
        return {**counted, **{name: engine.call(name) for name in ("computed_tokens", "scheduled_tokens")}}

    def __getitem__(self, name: str) -> int:
        return self._now(self._engine).get(name, 0) - self._before.get(name, 0)


def test_each_takes_blocks_of_the_other(sides: Sides) -> None:
    first, second = prompt(1, 2 * BLOCK + 9), prompt(2, 4 * BLOCK + 17)
    said = {"first": say(sides.strict, first), "second": say(sides.beside, second)}
    assert said["first"] != said["second"]
    for engine, asked, expected in ((sides.beside, first, said["first"]), (sides.strict, second, said["second"])):
        counts = Counts(engine)
        assert say(engine, asked) == expected
        assert counts["hit_tokens"] == len(asked) // BLOCK * BLOCK
        assert counts["loaded_blocks"] == len(asked) // BLOCK
        assert counts["computed_tokens"] == len(asked) % BLOCK
        assert counts["failed_blocks"] == 0


def test_a_full_hit_beside_the_batch_computes_one_token(sides: Sides) -> None:
    asked = prompt(3, 2 * BLOCK)
    said = say(sides.strict, asked)
    counts = Counts(sides.beside)
    assert say(sides.beside, asked) == said
    assert (counts["hit_tokens"], counts["loaded_blocks"]) == (2 * BLOCK, 2)
    # The last token of the prompt, for what is said first, and each that was said but the last.
    assert counts["scheduled_tokens"] == 1 + NEW_TOKENS - 1


def test_of_a_prompt_that_is_longer_than_the_room_the_beginning_is_shared(sides: Sides) -> None:
    """The engine stores the first blocks that there is room for, and no others: the rest is of no use without them."""
    asked = prompt(4, 1000)
    published, counts = Counts(sides.strict), Counts(sides.beside)
    said = say(sides.strict, asked)
    assert published["published_blocks"] == ROOM
    assert sides.strict.call("state")["stats"]["keys"] == ROOM + 1         # and the card
    assert say(sides.beside, asked) == said
    assert counts["hit_tokens"] == ROOM * BLOCK
    assert counts["computed_tokens"] == len(asked) - ROOM * BLOCK


def test_what_aborted_requests_published_goes_when_its_time_is_over(sides: Sides) -> None:
    engine = sides.fleeting
    free, counts = engine.call("state")["free_blocks"], Counts(engine)
    assert engine.call("abort", prompts=[prompt(100 + number, 200 + number) for number in range(50)], steps=3) == 0
    assert counts["published_blocks"] > 0
    # Nobody asks it anything: only the card is left, by itself.
    sides.house.wait_until(lambda: engine.call("state")["stats"]["keys"] == 1)
    state = engine.call("state")
    assert (state["stats"]["caches"], state["notes"], state["free_blocks"]) == (1, 0, free)
    assert sides.house.leases() == 0


def test_requests_that_are_aborted_in_their_loads_leave_nothing(sides: Sides) -> None:
    beginning, engine = prompt(5, ROOM * BLOCK), sides.beside
    asked = [[*beginning, *prompt(200 + number, 20)] for number in range(10)]
    said = say(sides.strict, asked[0])
    before, counts = engine.call("state"), Counts(engine)
    engine.call("execute", code=HOLD_LOADS)
    try:
        engine.call("begin", prompts=asked, steps=2)
        assert engine.call("execute", code=IS_HELD)
        # A pull writes into the blocks of the first, and the other loads are in the queue behind it.
        assert engine.call("give_up") == len(asked)
        assert engine.call("state")["free_blocks"] < before["free_blocks"]
    finally:
        engine.call("execute", code=LET_GO)
    assert engine.call("settle") == 0
    after = engine.call("state")
    assert (after["notes"], after["free_blocks"]) == (0, before["free_blocks"])
    assert [after["stats"][name] for name in ("keys", "caches")] == [before["stats"][name] for name in ("keys", "caches")]
    assert sides.house.leases() == 0
    assert counts["hit_tokens"] == len(asked) * ROOM * BLOCK
    assert say(engine, asked[0]) == said


def test_a_load_beside_the_batch_that_takes_too_long_is_given_up(sides: Sides) -> None:
    """vLLM has its request looked up once more then, and the second load is in time."""
    asked, engine = prompt(6, 2 * BLOCK + 5), sides.beside
    said, counts = say(sides.fleeting, asked), Counts(engine)
    engine.call("execute", code=SHORT_DEADLINE + HOLD_LOADS)
    try:
        engine.call("begin", prompts=[asked], steps=2)
        assert engine.call("execute", code=IS_HELD)
        time.sleep(2 * SHORT_MS / 1000)         # its deadline passes while its first layer is pulled
    finally:
        engine.call("execute", code=LET_GO)
    assert engine.call("settle") == 0
    engine.call("execute", code=LONG_DEADLINE)
    assert (counts["failed_blocks"], counts["loaded_blocks"]) == (2, 2)
    assert f"the load took longer than {SHORT_MS} ms, to layer 1" in engine.log()
    assert say(engine, asked) == said
    assert engine.call("state")["notes"] == 0
    assert sides.house.leases() == 0


def test_where_failed_loads_end_requests_the_engine_goes_on(sides: Sides) -> None:
    """The request ends with an error, the log says which blocks did not come and why, and what is asked next is computed."""
    asked, engine = prompt(7, 2 * BLOCK + 5), sides.strict
    said = say(sides.fleeting, asked)
    owner = sides.fleeting.call("state")["cluster_id"]
    counts = Counts(engine)
    assert "kv_load_failure_policy is 'fail'" in engine.log()
    sides.fleeting.will_be_killed()
    engine.call("execute", code=KILL_IN_A_LOAD.format(pid=sides.fleeting.pid, cluster_id=owner))
    assert engine.call("endings", prompts=[asked], max_tokens=NEW_TOKENS) == ["error"]
    assert counts["failed_blocks"] == 2
    assert "were not loaded and have to be computed: layer 1" in engine.log()
    state = engine.call("state")
    assert state["notes"] == 0
    assert engine.call("endings", prompts=[asked], max_tokens=NEW_TOKENS) == ["length"]
    assert say(engine, asked) == said
    assert sides.house.leases() == 0


def test_a_producer_that_is_killed_in_a_load_beside_the_batch_costs_its_blocks(sides: Sides) -> None:
    asked = [prompt(300 + number, 2 * BLOCK + number) for number in range(1, 3)]
    said = [say(sides.strict, each) for each in asked]
    owner, counts = sides.strict.call("state")["cluster_id"], Counts(sides.beside)
    sides.strict.will_be_killed()
    sides.beside.call("execute", code=KILL_IN_A_LOAD.format(pid=sides.strict.pid, cluster_id=owner))
    assert [say(sides.beside, each) for each in (asked[1], asked[0])] == [said[1], said[0]]
    assert counts["failed_blocks"] == 2
    assert counts["loaded_blocks"] == 0
    assert sides.beside.call("state")["notes"] == 0
    sides.house.wait_until(lambda: owner not in sides.beside.call("state")["peers"])
    assert sides.house.leases() == 0
