"""A model that speaks: what two engines say that share blocks is what one engine says."""
from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from engine import Engine
from house import House
from models import make

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
BLOCK = 128
NEW_TOKENS = 24
PASSAGE = (
    "A lighthouse stands on the cape where two seas meet. Its keeper climbs the stairs each evening, winds the clock that turns "
    "the lens, and writes down the weather. In winter the fog is so thick that ships hear the horn before they see the light. ")
QUESTIONS = [
    "What does the keeper do each evening?", "Where does the lighthouse stand?", "When is the fog thick?", "What do ships hear?",
    "Name the two seas.", "Write a short poem about it.", "Who built the lighthouse?", "Tell it as a story for children.",
    "Translate the first sentence into French.", "How many stairs are there?",
]


class Sides(NamedTuple):
    one: Engine
    producer: Engine
    consumer: Engine
    tokenizer: Any
    dtype: str


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def sides(house: House, request: pytest.FixtureRequest) -> Sides:
    """Of the second kind beside those of the first, which they never share a block with."""
    from transformers import AutoTokenizer

    dtype = request.param
    model = house.folder / "smollm2"
    if not model.exists():
        make("smollm2", house.folder)
    engines = [house.start(f"{name} {dtype}", model, role, dtype=dtype)
               for name, role in (("one", None), ("producer", "kv_producer"), ("consumer", "kv_consumer"))]
    for engine in engines:
        engine.wait_until_ready()
    house.wait_until(lambda: len(engines[2].call("state")["peers"]) == 2)       # itself and the producer
    return Sides(*engines, AutoTokenizer.from_pretrained(model), dtype)


def prompts(tokenizer: Any) -> list[list[int]]:
    """Twenty, in five groups with a beginning in common: from a token to about six blocks, whole blocks among them."""
    texts = [f"Letter {number // 4}. {PASSAGE * (2, 5, 9, 14)[number % 4]}{QUESTIONS[number % len(QUESTIONS)]}"
             for number in range(20)]
    made = [list(tokenizer(text).input_ids) for text in texts]
    made[0], made[1], made[4] = made[3][:BLOCK], made[3][:2 * BLOCK], made[7][:BLOCK + 1]
    made[8] = made[8][:1]
    return made


def assert_same(sides: Sides, asked: list[list[int]], together: list[list[int]], alone: list[list[int]]) -> None:
    """Token by token. In bfloat16 two words may be as good as each other, and then it counts in which steps a prompt is computed: a
    text that is another one has to be that of one engine that computes the last tokens in a step of their own, as the consumer."""
    others = [place for place in range(len(asked)) if together[place] != alone[place]]
    if sides.dtype == "float32":
        assert others == []
    assert len(others) < len(asked) / 4
    for place in others:
        apart = max(len(asked[place]) % BLOCK, 1)
        assert together[place] == sides.one.call("say_apart", prompt=asked[place], max_tokens=NEW_TOKENS, apart=apart), asked[place]


def test_twenty_prompts_say_the_same_through_two_engines(sides: Sides) -> None:
    asked = prompts(sides.tokenizer)
    alone = sides.one.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    sides.producer.call("each", prompts=asked, max_tokens=1)
    assert sides.producer.counted("published_blocks") > 10
    together = sides.consumer.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    assert_same(sides, asked, together, alone)
    assert sides.consumer.counted("hit_tokens") > 10 * BLOCK
    assert sides.consumer.counted("loaded_blocks") >= 10
    assert sides.consumer.counted("failed_blocks") == 0
    # No token of a whole block is computed again, but the last one of a prompt that ends with its block.
    assert sides.consumer.call("computed_tokens") == sum(max(len(each) % BLOCK, 1) for each in asked)
