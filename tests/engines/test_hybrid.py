"""A model with three KV cache groups, two of which look through a window: a producer that prefills in pieces, so that it gives back
blocks on the way, and a consumer that needs only what the window holds."""
from __future__ import annotations

from typing import NamedTuple

import pytest
from engine import Engine
from faults import KILL_IN_A_LOAD
from house import House
from models import WINDOW, make
from prompts import prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
BLOCK = 128
PIECE = 256                                     # tokens that the producer computes in a step
NEW_TOKENS = 12
GROUPS, WINDOWED = 3, 2
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, WINDOW + BLOCK + 1, 500, 5 * BLOCK, 5 * BLOCK + 1,
           700, 6 * BLOCK, 800, 7 * BLOCK - 1, 7 * BLOCK, 900, 950, 999, 1000]


class Sides(NamedTuple):
    house: House
    one: Engine
    producer: Engine
    consumer: Engine


@pytest.fixture(scope="module")
def sides(house: House) -> Sides:
    model = make("hybrid", house.folder)
    engines = [house.start("one", model, None), house.start("consumer", model, "kv_consumer"),
               house.start("producer", model, "kv_producer", max_num_batched_tokens=PIECE)]
    for engine in engines:
        engine.wait_until_ready()
    one, consumer, producer = engines
    house.wait_until(lambda: producer.call("state")["cluster_id"] in consumer.call("state")["peers"])
    return Sides(house, one, producer, consumer)


def blocks_needed(tokens: int) -> int:
    """Of a prompt of so many tokens: those of the group that looks at everything, and those that the next token's windows hold."""
    found = min(tokens // BLOCK * BLOCK, tokens - 1)
    end = -(-found // BLOCK)
    return end + WINDOWED * (end - max(0, found - WINDOW + 1) // BLOCK)


def test_there_are_several_groups(sides: Sides) -> None:
    kinds = "result = sorted(type(g.kv_cache_spec).__name__ for g in agent.core.scheduler.kv_cache_config.kv_cache_groups)"
    for engine in sides[1:]:
        assert engine.call("execute", code=kinds) == ["FullAttentionSpec"] + ["SlidingWindowSpec"] * WINDOWED


def test_twenty_prompts_say_the_same_and_only_what_the_window_holds_is_loaded(sides: Sides) -> None:
    asked = [prompt(tokens, tokens) for tokens in LENGTHS]
    alone = sides.one.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    assert len({tuple(said) for said in alone}) > 15            # a model that says something of what it is asked
    sides.producer.call("each", prompts=asked, max_tokens=1)
    assert sides.consumer.call("each", prompts=asked, max_tokens=NEW_TOKENS) == alone
    assert sides.consumer.counted("hit_tokens") == sum(min(tokens // BLOCK * BLOCK, tokens - 1) for tokens in LENGTHS)
    assert sides.consumer.counted("loaded_blocks") == sum(map(blocks_needed, LENGTHS))
    assert sides.consumer.counted("failed_blocks") == 0
    assert sides.consumer.call("computed_tokens") == sum(max(tokens % BLOCK, 1) for tokens in LENGTHS)


def test_a_longer_prompt_goes_on_where_a_shorter_one_ended(sides: Sides) -> None:
    """The consumer has computed the first prompt itself, and gets what is behind it; the windows begin in its own blocks."""
    asked = prompt(2000, 4 * BLOCK)
    alone = sides.one.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    sides.consumer.call("each", prompts=[asked[:3 * BLOCK + 1]], max_tokens=1)
    sides.producer.call("each", prompts=[asked], max_tokens=1)
    before = sides.consumer.counted("hit_tokens")
    assert sides.consumer.call("each", prompts=[asked], max_tokens=NEW_TOKENS) == alone
    assert sides.consumer.counted("hit_tokens") - before == BLOCK - 1


def test_what_the_producer_had_itself_is_published_as_far_as_it_is_there(sides: Sides) -> None:
    """Its own prefix cache gives it null blocks before the window; nothing of those is published."""
    asked = prompt(3000, 6 * BLOCK + 5)
    alone = sides.one.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    sides.producer.call("each", prompts=[asked], max_tokens=1)
    sides.producer.call("reset_shared")
    before = sides.producer.counted("published_blocks")
    sides.producer.call("each", prompts=[asked], max_tokens=1)
    published = sides.producer.counted("published_blocks") - before
    assert published == blocks_needed(6 * BLOCK + 5)
    before = sides.consumer.counted("hit_tokens")
    assert sides.consumer.call("each", prompts=[asked], max_tokens=NEW_TOKENS) == alone
    assert sides.consumer.counted("hit_tokens") - before == 6 * BLOCK


def test_bytes_in_shared_memory_are_what_is_computed_from(sides: Sides) -> None:
    asked = prompt(4000, 6 * BLOCK)
    said = sides.one.call("each", prompts=[asked], max_tokens=NEW_TOKENS)
    sides.producer.call("each", prompts=[asked], max_tokens=1)
    sides.house.scribble(sides.producer.call("state")["cluster_id"])
    assert sides.consumer.call("each", prompts=[asked], max_tokens=NEW_TOKENS) != said
    sides.producer.call("reset_shared")
    sides.consumer.call("reset_local")


def test_a_producer_killed_in_the_middle_of_a_load_costs_its_blocks_and_nothing_else(sides: Sides) -> None:
    asked = [prompt(5000 + number, 400 + 50 * number) for number in range(4)]
    alone = sides.one.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    sides.producer.call("each", prompts=asked, max_tokens=1)
    cluster_id = sides.producer.call("state")["cluster_id"]
    failed = sides.consumer.counted("failed_blocks")
    sides.producer.will_be_killed()
    sides.consumer.call("execute", code=KILL_IN_A_LOAD.format(pid=sides.producer.pid, cluster_id=cluster_id))
    assert sides.consumer.call("each", prompts=asked, max_tokens=NEW_TOKENS) == alone
    assert sides.consumer.counted("failed_blocks") - failed == blocks_needed(len(asked[0]))
    assert sides.consumer.call("state")["notes"] == 0
    assert sides.house.leases() == 0
