"""An engine with so few blocks that it takes them away from requests: what those had published, and what they load when they come
back, is right all the same."""
from __future__ import annotations

import pytest
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


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_requests_publish_and_load_what_is_right(house: House, is_async: bool) -> None:
    model = make("tiny", house.folder)
    one = house.start(f"one-{is_async}", model, None)
    small = house.start(f"small-{is_async}", model, "kv_both", num_gpu_blocks_override=10, extra={"async_load": is_async})
    for engine in (one, small):
        engine.wait_until_ready()
    asked = [prompt(number, 2 * BLOCK - 6) for number in range(4)]
    small.call("execute", code=COUNT_PREEMPTIONS)
    free = small.call("state")["free_blocks"]
    said = small.call("generate", prompts=asked, max_tokens=3 * BLOCK)      # 5 blocks each in the end, and there are 9
    assert [len(each) for each in said] == [3 * BLOCK] * 4
    assert small.call("execute", code="result = agent.preemptions") > 0
    assert small.counted("failed_blocks") == 0
    assert small.call("state")["notes"] == 0
    assert small.call("state")["free_blocks"] == free
    alone = one.call("each", prompts=asked, max_tokens=NEW_TOKENS)
    assert small.call("reset_local")
    before = small.counted("loaded_blocks")
    assert small.call("each", prompts=asked, max_tokens=NEW_TOKENS) == alone
    assert small.counted("loaded_blocks") - before == 4
