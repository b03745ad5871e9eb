"""Two processes at the same moment: one stands at a crash point in the middle of a call while the other acts, then it goes on."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import builds
import pytest
from peer import Namespace, by_id, req
from reference import SUCCESS

from crash.house import DECODERS, NOT_EXIST, TIMED_OUT, House
from crash.scenarios import arming, pull_layers

pytestmark = pytest.mark.timeout(600)
SIGNALS_S = 0.05                # a copy lets signal handlers run that often
# Before the interrupted call: a handler that raises, or that forks a child which leaves by sys.exit.
RAISES = """
import signal
def handler(number, frame):
    raise KeyboardInterrupt("as the test wants")
signal.signal(signal.SIGUSR1, handler)
"""
FORKS = """
import os, signal, sys
agent.codes = []
def handler(number, frame):
    child = os.fork()
    if child == 0:
        sys.exit(0)
    agent.codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.signal(signal.SIGUSR1, handler)
"""
INTERRUPTED = """
try:
    {call}
    result = "done"
except KeyboardInterrupt as error:
    result = str(error)
"""
# In the child the exception of sys.exit comes out of the call; what else comes out is another exit code.
FORKED = """
parent, code = os.getpid(), 99
try:
    {call}
except SystemExit as end:
    code = end.code
except BaseException:
    code = 98
finally:
    if os.getpid() != parent:
        os._exit(code)
result = agent.codes
"""
BIG = {"num_tensors": 3, "shape": [1, 4 << 20], "dtype": "DT_INT8"}
CALLS = {
    "pull": "agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, {id}, 0), agent.caches['big'])",
    "pull_many": "agent.dist.kv_cache_manager.pull_many([shmkv.PullRequest(shmkv.CacheKeyByIdAndIndex(1, {id}, 0), "
                 "agent.caches['big'], 0)])",
    "prepared": "agent.prepared(shmkv.CacheKeyByIdAndIndex(1, {id}, 0))",
    "own waiting pull": "agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKeyByIdAndIndex(2, agent.caches['other'].cache_id, 0), "
                        "agent.caches['big'], wait=True)",
    "copy": "agent.dist.kv_cache_manager.copy_cache(agent.caches['big'], agent.caches['other'], 0, 0)",
}


@pytest.fixture
def house(namespace: Namespace) -> House:
    """Four linked clusters; the decoders have their buffers."""
    made = House(namespace, builds.environment("crash", builds.build("crash")))
    made.furnish()
    for decoder in DECODERS:
        made.destination(decoder)
    return made


def stop_in_pull(house: House, point: str, number: int) -> None:
    """Decoder 2 stands at a point of its pull of a key of cluster 1."""
    reader = house.peers[2]
    reader.call("execute", code=arming(point, True))
    reader.send("pull", key=req(1, number), name="buffer")
    assert reader.wait_stopped_or_dead()


def go_on(house: House) -> str:
    """What the call of decoder 2 comes to."""
    house.peers[2].cont()
    return house.peers[2].receive().outcome


def test_key_that_is_bound_anew_between_look_and_pin_is_looked_up_again(house: House) -> None:
    number = house.publish(1, "new")
    stop_in_pull(house, "hazard-set", number)
    house.peers[1].call("bind", name="new", keys=[(0, req(1, number))])
    assert go_on(house) == SUCCESS
    house.assert_right(2, number)
    house.judge()


def test_looking_again_ends_at_the_deadline(namespace: Namespace) -> None:
    house = House(namespace, builds.environment("crash", builds.build("crash")))
    house.start([1])
    house.peers[2] = namespace.start_cluster("DECODER", 2, env=house.env, sync_kv_timeout=100)
    house.link(2, [1])
    house.destination(2)
    number = house.publish(1, "new")
    stop_in_pull(house, "hazard-set", number)
    house.peers[1].call("bind", name="new", keys=[(0, req(1, number))])
    time.sleep(0.15)
    assert go_on(house) == TIMED_OUT
    house.judge()


def test_owner_that_finalizes_before_its_segment_is_opened_is_gone(house: House) -> None:
    stop_in_pull(house, "attaching", house.publish(1, "new"))
    house.peers[1].call("finalize")
    assert go_on(house) == TIMED_OUT
    house.peers.pop(1).close()
    house.links = {link for link in house.links if 1 not in link}
    house.judge()


def test_owner_that_is_swept_before_its_segment_is_opened_is_gone(house: House) -> None:
    """Its files are removed, its record stands."""
    stop_in_pull(house, "attaching", house.publish(1, "new"))
    house.peers[1].kill()
    sweeper = house.peers[9] = house.namespace.start(house.env)
    sweeper.call("execute", code=arming("sweeping", True))
    sweeper.send("init", role="PROMPT", cluster_id=9, options={}, raw={})
    assert sweeper.wait_stopped_or_dead()
    assert go_on(house) == TIMED_OUT
    sweeper.cont()
    assert sweeper.receive().outcome == SUCCESS
    house.judge()


@pytest.mark.parametrize(("bindings", "outcome"), [(1, SUCCESS), (2, NOT_EXIST)])
def test_row_without_a_key_that_gets_one_while_it_is_copied(house: House, bindings: int, outcome: str) -> None:
    """Its first key changes no byte of it; with the next one the owner may have written others."""
    cache_id = house.peers[1].call("allocate", name="new", num_tensors=4, shape=(2, 64))
    reader = house.peers[2]
    reader.call("execute", code=arming("copied", True))
    reader.send("pull", key=by_id(1, cache_id), name="buffer")
    assert reader.wait_stopped_or_dead()
    for number in range(bindings):
        house.peers[1].call("bind", name="new", keys=[(0, req(1, 1000 + number))])
    assert go_on(house) == outcome
    house.judge()


def test_key_that_another_uses_up_first_is_a_success_for_both(house: House) -> None:
    number = house.publish(1, "new")
    stop_in_pull(house, "consuming", number)
    assert house.pull(3, 1, number).outcome == SUCCESS
    assert go_on(house) == SUCCESS
    assert house.pull(3, 1, number).outcome == NOT_EXIST
    house.judge()


def test_parts_of_a_key_that_two_mark_at_once_are_both_marked(house: House) -> None:
    number = house.publish(1, "new")
    reader = house.peers[2]
    reader.call("execute", code=arming("covering", True))
    reader.send("execute", code=pull_layers(number, (0, 0), (0, 0)))
    assert reader.wait_stopped_or_dead()
    house.peers[3].call("execute", code=pull_layers(number, (1, 1), (1, 1)))
    assert go_on(house) == SUCCESS
    assert house.pull(3, 1, number).outcome == NOT_EXIST, "used up: all parts are marked"
    house.judge()


def test_part_of_a_key_that_was_bound_anew_marks_nothing(house: House) -> None:
    number = house.publish(1, "new")
    reader = house.peers[2]
    reader.call("execute", code=arming("rechecked", True))
    reader.send("execute", code=pull_layers(number, (0, 0), (0, 0)))
    assert reader.wait_stopped_or_dead()
    house.peers[1].call("bind", name="new", keys=[(0, req(1, number))])
    assert go_on(house) == SUCCESS
    house.peers[3].call("execute", code=pull_layers(number, (1, 1), (1, 1)))
    assert house.pull(3, 1, number).outcome == SUCCESS, "half of it is marked under the new binding"
    house.judge()


@pytest.mark.parametrize("point", ["word-looking", "word-marking", "word-giving-up"])
def test_lock_that_is_given_back_at_that_moment_is_not_lost(house: House, point: str) -> None:
    """By a decoder that was in a pull; the prompt wants to wait for it, or not to wait any more."""
    prompt, reader = house.peers[1], house.peers[2]
    stop_in_pull(house, "copying", house.publish(1, "new"))
    prompt.call("execute", code=arming(point, True))
    prompt.send("unlink", ids=[2], timeout=50 if point == "word-giving-up" else 20_000)
    assert prompt.wait_stopped_or_dead()
    assert go_on(house) == SUCCESS
    prompt.cont()
    answer = prompt.receive()
    assert answer.outcome == SUCCESS, answer.trace
    if point == "word-giving-up":
        assert answer.value == ["LLM_UNLINK_FAILED", ["LLM_LINK_BUSY"]]
    else:
        assert answer.value == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
        assert reader.call("unlink", ids=[1])[1] == ["LLM_NOT_YET_LINK"]
        house.links.discard((2, 1))
    house.judge()


def test_waiter_that_comes_while_the_lock_is_given_back_gets_it(house: House) -> None:
    prompt = house.peers[1]
    stop_in_pull(house, "word-freeing", house.publish(1, "new"))
    prompt.call("execute", code=arming("word-waiting", True))
    prompt.send("unlink", ids=[2])
    assert prompt.wait_stopped_or_dead()
    prompt.cont()
    assert go_on(house) == SUCCESS
    assert prompt.receive().value == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    house.links.discard((2, 1))
    house.judge()


@pytest.fixture
def signalled(house: House) -> Callable[[str, str], object]:
    """signalled(call, code): the result of `code`, in which decoder 2 makes a big `call` and has a signal between two shares."""
    reader = house.peers[2]
    cache_id = house.peers[1].call("allocate", name="big", **BIG)
    reader.call("allocate", name="big", **BIG)
    reader.call("allocate", name="other", **BIG)
    calls = {name: call.format(id=cache_id) for name, call in CALLS.items()}
    prepare = "agent.prepared = agent.dist.kv_cache_manager.prepare_pull(agent.caches['big'])"
    reader.call("execute", code=f"{prepare}\n{calls['prepared']}")

    def make(call: str, code: str) -> object:
        reader.call("execute", code=arming("copying:2", True))
        reader.send("execute", code=code.replace("{call}", calls[call]))
        assert reader.wait_stopped_or_dead()
        time.sleep(1.5 * SIGNALS_S)
        os.kill(reader.pid, signal.SIGUSR1)
        reader.cont()
        answer = reader.receive()
        assert answer.outcome == SUCCESS, answer.trace
        return answer.value

    return make


@pytest.mark.parametrize("call", list(CALLS))
def test_exception_of_a_handler_ends_a_copy(house: House, signalled: Callable[[str, str], object], call: str) -> None:
    assert signalled(call, RAISES + INTERRUPTED) == "as the test wants"
    house.judge()


@pytest.mark.parametrize("call", list(CALLS))
def test_child_of_a_handler_ends_as_it_wants_in_the_middle_of_a_copy(house: House, signalled: Callable[[str, str], object],
                                                                     call: str) -> None:
    assert signalled(call, FORKS + FORKED) == [0]
    house.judge()
