"""Engines with so few blocks that they take them away from requests: what those had published, and what they load when they come
back, is right all the same."""
from __future__ import annotations

import pytest
from engine import Engine
from house import House
from models import make
from prompts import prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
BLOCK = 128
NEW_TOKENS = 12
COUNT_PREEMPTIONS = """
scheduler = agent.core.scheduler
preempt = scheduler._preempt_request
agent.preemptions = 0
def counting(*arguments, **more):
    agent.preemptions += 1
    return preempt(*arguments, **more)
scheduler._preempt_request = counting
"""


def test_preempted_requests_publish_and_load_what_is_right(house: House) -> None:
    model = make("tiny", house.folder)
    one = house.start("one", model, None)
    small = [house.start(f"small-{is_async}", model, "kv_both", num_gpu_blocks_override=10, extra={"async_load": is_async})
             for is_async in (False, True)]
    for engine in (one, *small):
        engine.wait_until_ready()
    asked = [prompt(number, 2 * BLOCK - 6) for number in range(4)]
    alone = one.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    for engine in small:
        preempted(engine, asked)
        assert engine.call("reset_local")
        before = engine.counted("loaded_blocks")
        assert engine.call("each", prompts=asked, max_tokens=NEW_TOKENS) == alone
        assert engine.counted("loaded_blocks") - before == len(asked)


def preempted(engine: Engine, asked: list[list[int]]) -> None:
    """Five blocks for each of them in the end, and there are nine."""
    engine.call("execute", code=COUNT_PREEMPTIONS)
    free = engine.call("state")["free_blocks"]
    said = engine.call("generate", prompts=asked, max_tokens=3 * BLOCK)
    assert [len(each) for each in said] == [3 * BLOCK] * len(asked)
    assert engine.call("execute", code="result = agent.preemptions") > 0
    assert engine.counted("failed_blocks") == 0
    assert engine.call("state")["notes"] == 0
    assert engine.call("state")["free_blocks"] == free
