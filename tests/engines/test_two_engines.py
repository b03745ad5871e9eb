"""A producer, a consumer and an engine that is both but of another block size, all in one namespace: what is shared and what is
not, and what happens when something goes."""
from __future__ import annotations

import signal
from typing import NamedTuple

import pytest
from engine import Engine
from faults import KILL_IN_A_LOAD
from house import HEADER, House
from models import make
from prompts import prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
BLOCK, OTHER_BLOCK = 128, 64
NEW_TOKENS = 8
CAPACITY = 64 << 20


class Sides(NamedTuple):
    house: House
    producer: Engine
    consumer: Engine
    both: Engine


@pytest.fixture(scope="module")
def sides(house: House) -> Sides:
    """`both` loads beside the batch."""
    model = make("tiny", house.folder)
    consumer = house.start("consumer", model, "kv_consumer")
    producer = house.start("producer", model, "kv_producer", extra={"capacity_bytes": CAPACITY})
    both = house.start("both", model, "kv_both", block_size=OTHER_BLOCK, extra={"async_load": True})
    for engine in (consumer, producer, both):
        engine.wait_until_ready()
    house.wait_until(lambda: producer.call("state")["cluster_id"] in consumer.call("state")["peers"])
    return Sides(house, producer, consumer, both)


def asked_anew(engine: Engine, *asked: list[int]) -> list[list[int]]:
    """What an engine says that has forgotten its own blocks."""
    assert engine.call("reset_local")
    said: list[list[int]] = engine.call("each", prompts=list(asked), max_tokens=NEW_TOKENS)
    return said


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 17, 1000])
def test_whole_blocks_are_loaded_and_the_rest_is_computed(sides: Sides, tokens: int) -> None:
    asked = prompt(tokens, tokens)
    said = sides.producer.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    before = sides.consumer.counted("hit_tokens")
    assert asked_anew(sides.consumer, asked) == said
    # One token is always left to compute.
    assert sides.consumer.counted("hit_tokens") - before == min(tokens // BLOCK * BLOCK, tokens - 1)


def test_a_longer_prompt_uses_the_blocks_of_a_shorter_one(sides: Sides) -> None:
    asked = prompt(2000, 3 * BLOCK)
    sides.producer.call("each", prompts=[asked], max_tokens=1)
    longer = [*asked, *prompt(2001, 100)]
    before = sides.consumer.counted("hit_tokens")
    said = asked_anew(sides.consumer, longer)
    assert sides.consumer.counted("hit_tokens") - before == 3 * BLOCK
    assert said == sides.producer.call("each", prompts=[longer], max_tokens=NEW_TOKENS)


def test_many_at_once(sides: Sides) -> None:
    asked = [prompt(100 + number, 150 + 40 * number) for number in range(12)]
    sides.producer.call("generate", prompts=asked, max_tokens=1)
    before = sides.consumer.counted("hit_tokens")
    assert sides.consumer.call("reset_local")
    together = sides.consumer.call("generate", prompts=asked, max_tokens=NEW_TOKENS)
    assert sides.consumer.counted("hit_tokens") - before == sum(len(each) // BLOCK * BLOCK for each in asked)
    assert [len(said) for said in together] == [NEW_TOKENS] * 12
    assert sides.consumer.counted("failed_blocks") == 0


def test_another_salt_shares_nothing(sides: Sides) -> None:
    asked = prompt(300, 2 * BLOCK)
    sides.producer.call("generate", prompts=[asked], max_tokens=1, salt="one")
    sides.consumer.call("reset_local")
    before = sides.consumer.counted("hit_tokens")
    for salt in (None, "other"):
        sides.consumer.call("generate", prompts=[asked], max_tokens=1, salt=salt)
    assert sides.consumer.counted("hit_tokens") == before
    sides.consumer.call("reset_local")
    sides.consumer.call("generate", prompts=[asked], max_tokens=1, salt="one")
    assert sides.consumer.counted("hit_tokens") == before + 2 * BLOCK - 1


def test_an_engine_of_another_block_size_is_refused_and_named(sides: Sides) -> None:
    other = sides.both.call("state")["cluster_id"]
    assert other not in sides.consumer.call("state")["peers"]
    assert sides.both.call("state")["peers"] == [other]
    sides.house.wait_until(lambda: f"block_size: {BLOCK} instead of {OTHER_BLOCK}" in sides.both.log())
    sides.house.wait_until(lambda: f"block_size: {OTHER_BLOCK} instead of {BLOCK}" in sides.consumer.log())


def test_an_engine_that_does_both_uses_what_it_published(sides: Sides) -> None:
    asked = prompt(400, 5 * OTHER_BLOCK + 3)
    said = sides.both.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    assert asked_anew(sides.both, asked) == said        # beside the batch
    assert sides.both.counted("hit_tokens") == 5 * OTHER_BLOCK
    assert sides.both.counted("loaded_blocks") == 5
    assert sides.both.call("reset_shared")
    assert asked_anew(sides.both, asked) == said
    # The blocks went when the engine was told to forget them: the look-up found nothing, and all was computed.
    assert sides.both.call("state")["notes"] == 0


def only_the_card_is_left(sides: Sides) -> None:
    """After all blocks were removed, which is done by the step of a prompt that has none."""
    assert sides.both.call("reset_shared")
    sides.both.call("each", prompts=[[1]], max_tokens=1)
    sides.house.wait_until(lambda: sides.both.call("state")["stats"]["caches"] == 1)
    assert sides.both.call("state")["stats"]["keys"] == 1


def test_fifty_aborted_requests_leave_nothing(sides: Sides) -> None:
    free = sides.both.call("state")["free_blocks"]
    asked = [prompt(500 + number, 200 + number) for number in range(50)]
    assert sides.both.call("abort", prompts=asked, steps=3) == 0
    assert sides.both.call("state")["notes"] == 0
    assert sides.both.call("state")["free_blocks"] == free
    assert sides.house.leases() == 0
    # What was complete was published. Without it only the card is left.
    only_the_card_is_left(sides)


def test_fifty_aborted_requests_of_a_consumer_leave_no_lease(sides: Sides) -> None:
    asked = [prompt(600 + number, 3 * BLOCK + number) for number in range(50)]
    sides.producer.call("generate", prompts=asked, max_tokens=1)
    sides.consumer.call("reset_local")
    before = sides.consumer.counted("hit_tokens")
    assert sides.consumer.call("abort", prompts=asked, steps=1) == 0
    assert sides.consumer.counted("hit_tokens") > before
    assert sides.consumer.call("state")["notes"] == 0
    assert sides.house.leases() == 0


def test_a_producer_keeps_no_more_than_its_capacity(sides: Sides) -> None:
    for number in range(10):
        sides.producer.call("generate", prompts=[prompt(10_000 + 100 * number + each, 900) for each in range(25)], max_tokens=1)
    stats = sides.producer.call("state")["stats"]
    assert stats["prefix_evictions"] > 0
    assert stats["cache_bytes"] <= CAPACITY + 2 * HEADER        # and the card


def test_bytes_in_shared_memory_are_what_a_consumer_computes_from(sides: Sides) -> None:
    asked = prompt(700, 4 * BLOCK)
    said = sides.producer.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    assert asked_anew(sides.consumer, asked) == said
    sides.house.scribble(sides.producer.call("state")["cluster_id"])
    assert asked_anew(sides.consumer, asked) != said
    assert sides.producer.call("reset_shared")
    sides.producer.call("reset_local")
    assert sides.producer.call("each", prompts=[asked], max_tokens=NEW_TOKENS) == said
    assert asked_anew(sides.consumer, asked) == said


def test_a_producer_killed_in_the_middle_of_a_load_costs_its_blocks_and_nothing_else(sides: Sides) -> None:
    asked = [prompt(800 + number, 300 + 20 * number) for number in range(6)]
    said = sides.producer.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    cluster_id = sides.producer.call("state")["cluster_id"]
    failed = sides.consumer.counted("failed_blocks")
    sides.consumer.call("reset_local")
    sides.producer.will_be_killed()
    sides.consumer.call("execute", code=KILL_IN_A_LOAD.format(pid=sides.producer.pid, cluster_id=cluster_id))
    assert sides.consumer.call("each", prompts=asked, max_tokens=NEW_TOKENS) == said
    assert sides.consumer.counted("failed_blocks") - failed == len(asked[0]) // BLOCK
    sides.house.wait_until(lambda: cluster_id not in sides.consumer.call("state")["peers"])
    assert asked_anew(sides.consumer, *asked) == said
    assert sides.consumer.call("state")["notes"] == 0


def test_a_consumer_killed_in_the_middle_of_a_load_takes_nothing_along(sides: Sides) -> None:
    """The engine that does both kills itself while it pulls from another one of its kind."""
    other = sides.house.start("other", sides.house.folder / "tiny", "kv_both", block_size=OTHER_BLOCK).wait_until_ready()
    owner = sides.both.call("state")["cluster_id"]
    sides.house.wait_until(lambda: owner in other.call("state")["peers"])
    asked = prompt(900, 6 * OTHER_BLOCK)
    sides.both.call("each", prompts=[asked], max_tokens=1)
    other.will_be_killed()
    other.call("execute", code=KILL_IN_A_LOAD.format(pid=other.pid, cluster_id=owner))
    answer = other.attempt("each", prompts=[asked], max_tokens=1)
    assert f"ended with {-signal.SIGKILL}" in answer["error"]
    # All of it goes, so nobody dead is in the way; and the engine goes on.
    only_the_card_is_left(sides)
    sides.house.wait_until(lambda: sides.both.call("state")["peers"] == [owner])
    assert len(sides.both.call("each", prompts=[asked], max_tokens=NEW_TOKENS)[0]) == NEW_TOKENS
