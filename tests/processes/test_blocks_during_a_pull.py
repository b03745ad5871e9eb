"""What becomes of a pull of blocks whose owner fills them again, frees them, unlinks or dies meanwhile, and of its reader."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import builds
import pytest
from peer import SHM, Namespace, Peer, StartPeer, blocks, by_id, req
from reference import NOT_EXIST, SUCCESS, geometry

pytestmark = pytest.mark.timeout(300)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
T_MS = 20000
AT_ONCE = {"SHMKV_RECYCLE_BYTES": "0"}
KEY = blocks(1)
MIB = 1 << 20


def pull(d: Peer, src: list[int], dst: list[int], key: list[Any] = KEY, **how: Any) -> str:
    return d.outcome("pull_blocks", key=key, name="kv", src=src, dst=dst, **how)


BIG_BLOCK = 3 * MIB // 4             # a pull of four is more than one share, so that the link is looked at on the way
BIG: dict[str, Any] = {"num_tensors": 2, "shape": (8, BIG_BLOCK), "dtype": "DT_INT8"}
BIG_FORM = geometry(2, [8, BIG_BLOCK], 1)
EVERY = [6, 0, 5, 2]            # no neighbours: each block is a run of its own
INTO = [1, 3, 5, 7]


@pytest.fixture(scope="module")
def crash_env() -> dict[str, str]:
    """Variables of a build whose processes stop at crash points."""
    return builds.environment("crash", Path(builds.build("crash")))


def assert_pulled(d: Peer, generation: int) -> None:
    """D compares by itself: there are many bytes."""
    assert d.call("execute", code=f"""
import cache_bytes, reference
found, wanted = cache_bytes.read(agent.caches["kv"]), reference.pattern(reference.Geometry(*{tuple(BIG_FORM)}), {generation})
result = bool((found[:, :, {INTO}] == wanted[:, :, {EVERY}]).all())
"""), f"blocks {INTO} are blocks {EVERY} of generation {generation}"


class Stopped:
    """D stands still at a crash point of a pull of blocks; `go_on` lets it end and says how."""

    def __init__(self, p: Peer, d: Peer) -> None:
        self.p, self.d = p, d

    def stop_at(self, point: str, key: list[Any] = KEY) -> None:
        self.d.call("execute", code=f"from shmkv import _crash\n_crash.arm({point!r}, True)")
        self.d.send("pull_blocks", key=key, name="kv", src=EVERY, dst=INTO)
        assert self.d.wait_stopped_or_dead()

    def go_on(self) -> str:
        self.d.cont()
        return self.d.receive().outcome


@pytest.fixture
def stopped(prompt: StartPeer, decoder: StartPeer, crash_env: dict[str, str]) -> Stopped:
    p, d = prompt(1, env=AT_ONCE), decoder(2, env={**crash_env, "SHMKV_THREADS": "1"})
    p.call("allocate_blocks", name="kv", key=KEY, **BIG)
    p.call("fill", name="kv", generation=1)
    d.call("allocate_blocks", name="kv", **BIG)
    d.call("canary", name="kv")
    return Stopped(p, d)


MIDDLE = ["copying:1", "copying:3", "copied"]


@pytest.mark.parametrize("point", MIDDLE)
@pytest.mark.parametrize("again", [
    [("bind", {"name": "kv", "keys": [(5, req(1, 9))]})], [("publish", {"name": "kv", "rows": [5]})],
    [("bind", {"name": "kv", "keys": [(5, req(1, 9))]}), ("remove_key", {"key": req(1, 9)})], [],
], ids=["bind", "publish", "bind and remove", "nothing"])
def test_block_that_is_filled_again_during_a_pull(stopped: Stopped, point: str, again: list[tuple[str, dict[str, Any]]]) -> None:
    """From `unbind` on its owner writes other bytes, so the pull must not say that it has the old ones."""
    p = stopped.p
    stopped.stop_at(point)
    p.call("unbind", name="kv", rows=[5])
    p.call("fill", name="kv", generation=2)
    for command, arguments in again:
        p.call(command, **arguments)
    assert stopped.go_on() == NOT_EXIST
    p.call("publish", name="kv")
    assert pull(stopped.d, EVERY, INTO) == SUCCESS
    assert_pulled(stopped.d, 2)


@pytest.mark.parametrize("point", MIDDLE)
def test_row_without_a_key_that_is_filled_again_during_a_pull_by_id(stopped: Stopped, point: str) -> None:
    """The same for one row by the cache's id."""
    p, d = stopped.p, stopped.d
    d.call("execute", code=f"from shmkv import _crash\n_crash.arm({point.split(':')[0]!r}, True)")
    d.send("pull", key=by_id(1, 1, 5), name="kv")
    assert d.wait_stopped_or_dead()
    p.call("unbind", name="kv", rows=[5])
    p.call("fill", name="kv", generation=2)
    p.call("publish", name="kv", rows=[5])
    assert stopped.go_on() == NOT_EXIST


ROW_FORM: dict[str, Any] = {"num_tensors": 2, "shape": (2, 4 * BIG_BLOCK), "dtype": "DT_INT8"}


def stop_with_a_row(stopped: Stopped, point: str) -> None:
    """D stands still while a row goes into blocks, by its request key."""
    stopped.p.call("allocate", name="row", keys=[req(1, 7)], **ROW_FORM)
    stopped.d.call("execute", code=f"from shmkv import _crash\n_crash.arm({point!r}, True)")
    stopped.d.send("pull_blocks", key=req(1, 7), name="kv", src=[], dst=INTO)
    assert stopped.d.wait_stopped_or_dead()


@pytest.mark.parametrize("point", MIDDLE)
@pytest.mark.parametrize(("command", "arguments"), [
    ("remove_key", {"key": req(1, 7)}), ("unbind", {"name": "row", "rows": [0]}),
    ("bind", {"name": "row", "keys": [(0, req(1, 8))]}),
], ids=["removed", "unbound", "another key"])
def test_row_whose_key_ends_while_it_goes_into_blocks(stopped: Stopped, point: str, command: str,
                                                      arguments: dict[str, Any]) -> None:
    stop_with_a_row(stopped, point)
    stopped.p.call(command, **arguments)
    assert stopped.go_on() == NOT_EXIST


def test_row_that_another_decoder_takes_while_it_goes_into_blocks(stopped: Stopped, decoder: StartPeer) -> None:
    """Both get it, and its key is consumed once."""
    stop_with_a_row(stopped, "copying:3")
    other = decoder(3)
    other.call("allocate_blocks", name="kv", **BIG)
    other.call("pull_blocks", key=req(1, 7), name="kv", src=[], dst=[0])
    assert stopped.go_on() == SUCCESS
    for each in (stopped.d, other):
        assert each.outcome("pull_blocks", key=req(1, 7), name="kv", src=[], dst=[0]) == NOT_EXIST


def test_block_outside_the_lists_does_not_matter(stopped: Stopped) -> None:
    stopped.stop_at("copying:3")
    stopped.p.call("unbind", name="kv", rows=[7])
    stopped.p.call("bind", name="kv", keys=[(7, req(1, 9))])
    assert stopped.go_on() == SUCCESS
    assert_pulled(stopped.d, 1)


def test_block_that_gets_its_first_key_during_a_pull_is_the_same_block(stopped: Stopped) -> None:
    stopped.stop_at("copying:3")
    stopped.p.call("bind", name="kv", keys=[(5, req(1, 9))])
    assert stopped.go_on() == SUCCESS
    assert_pulled(stopped.d, 1)


@pytest.mark.parametrize("point", MIDDLE)
def test_cache_that_is_deallocated_during_a_pull(stopped: Stopped, namespace: Namespace, point: str) -> None:
    p, d = stopped.p, stopped.d
    before = namespace.segments()
    stopped.stop_at(point)
    p.call("deallocate", name="kv")
    assert namespace.segments() == before, "D is in it"
    p.call("allocate_blocks", name="kv", key=KEY, **BIG)
    p.call("fill", name="kv", generation=4)
    assert stopped.go_on() == SUCCESS, "the memory was pinned"
    assert_pulled(d, 1)
    p.call("collect")
    assert len(before - namespace.segments()) == 1, "and is freed afterwards"
    assert pull(d, EVERY, INTO) == SUCCESS, "the next pull is of the next cache"
    assert_pulled(d, 4)
    p.call("deallocate", name="kv")
    assert pull(d, EVERY, INTO) == NOT_EXIST


def test_owner_that_is_killed_during_a_pull(stopped: Stopped, namespace: Namespace, prompt: StartPeer) -> None:
    p, d = stopped.p, stopped.d
    stopped.stop_at("copying:3")
    p.kill()
    assert stopped.go_on() == TIMED_OUT, "seen before the second share"
    answer = d.attempt("pull_blocks", key=KEY, name="kv", src=EVERY, dst=INTO)
    assert (answer.outcome, answer.ms < T_MS / 2) == (TIMED_OUT, True)
    d.call("unlink", ids=[1], force=True)
    again = prompt(1)
    again.call("allocate_blocks", name="kv", key=KEY, **BIG)
    again.call("fill", name="kv", generation=5)
    d.call("link", ids=[1])
    assert pull(d, EVERY, INTO) == SUCCESS
    assert_pulled(d, 5)
    assert all((SHM / name).exists() for name in namespace.segments())


def test_reader_that_is_killed_during_a_pull_keeps_nothing(stopped: Stopped, namespace: Namespace) -> None:
    stopped.stop_at("copying:3")
    before = namespace.segments()
    stopped.d.kill()
    stopped.p.call("deallocate", name="kv")
    stopped.p.call("execute", code="import time\nfor _ in range(10):\n    agent.collect()\n    time.sleep(0.01)")
    assert len(before - namespace.segments()) == 1


@pytest.mark.parametrize("force", [False, True])
def test_link_that_is_removed_while_a_pull_stands_still(stopped: Stopped, force: bool) -> None:
    """By the prompt: by force the pull ends with a status, else the unlink waits for it in vain."""
    stopped.stop_at("copying:3")
    said = stopped.p.call("unlink", ids=[2], timeout=200, force=force)
    outcome = stopped.go_on()
    if force:
        assert said == [SUCCESS, [SUCCESS]]
        assert outcome in ("LLM_NOT_YET_LINK", TIMED_OUT, SUCCESS)
    else:
        assert outcome == SUCCESS
        assert_pulled(stopped.d, 1)
