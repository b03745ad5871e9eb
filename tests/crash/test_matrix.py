"""Who dies, where, and what must hold afterwards: every row of the matrix in docs/reliability.md, in five ways."""
from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import builds
import pytest
from peer import Namespace
from reference import SUCCESS

from crash.block_scenarios import PullBlocks
from crash.calls import SCENARIOS
from crash.house import DECODERS, NOT_EXIST, PATIENCE_MS, PROMPTS, TIMED_OUT, House
from crash.matrix import GONE, GONE_LATER, STAYS, Row, rows
from crash.scenarios import Pull, Scenario

pytestmark = [pytest.mark.timeout(600)]     # the first one waits for a build
ROWS = rows()
FIRST_OF_CALL = list({row.call: row for row in reversed(ROWS)}.values())
# The first of all to join and the last to leave have nobody at the other end.
ROWS_OF_TWO = [row for row in ROWS if row.call not in ("first init", "last finalize")]


def each(wanted: list[Row]) -> pytest.MarkDecorator:
    """One way of dying at each of these rows: of a call the first one here, the others are for a run at length."""
    return pytest.mark.parametrize("row", [
        pytest.param(row, id=str(row), marks=() if row in FIRST_OF_CALL else pytest.mark.soak) for row in wanted])


EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=str)
# Where the other end has no part in the call it makes no difference at which step both die.
ROWS_OF_BOTH = [row for row in ROWS_OF_TWO if SCENARIOS[row.call].both_act or row in FIRST_OF_CALL]
SURVIVABLE = {SUCCESS, TIMED_OUT}
DEADLINE_S = 60


@pytest.fixture(scope="module")
def crash_build() -> Path:
    return builds.build("crash")


@pytest.fixture
def scenario(row: Row, namespace: Namespace, crash_build: Path) -> Iterator[Scenario]:
    """The house as it is right before the actor's call."""
    kind = SCENARIOS[row.call]
    house = House(namespace, {**builds.environment("crash", crash_build), **kind.env})
    made = kind(house)
    made.prepare()
    house.begin_work()
    yield made
    house.end_work()
    house.restart()
    house.assert_nothing_kept()
    house.assert_no_leftovers()


def stop_at(scenario: Scenario, row: Row) -> None:
    """The actor stands at the point."""
    scenario.arm(row.point, stop=True)
    scenario.act()
    assert scenario.peer.wait_stopped_or_dead()


@EACH_ROW
def test_the_actor_dies(row: Row, scenario: Scenario) -> None:
    house = scenario.house
    scenario.arm(row.point, stop=False)
    scenario.act()
    assert not scenario.peer.wait_stopped_or_dead()
    scenario.before_answer()
    scenario.after_answer()
    if isinstance(scenario, Pull):
        if row.afterwards == GONE_LATER:
            scenario.let_owner_look()
        answer = house.pull(3, 1, scenario.number)
        assert answer.outcome == {STAYS: SUCCESS, GONE: NOT_EXIST, GONE_LATER: NOT_EXIST}[row.afterwards], answer.trace
        if row.afterwards == STAYS:
            house.assert_right(3, scenario.number)
        scenario.assert_memory_is_free()
    elif isinstance(scenario, PullBlocks):
        scenario.pull_by_another()
    else:
        scenario.after_death()
        scenario.forget_links()
    house.judge()


@each(ROWS_OF_TWO)
def test_the_other_dies(row: Row, scenario: Scenario) -> None:
    stop_at(scenario, row)
    scenario.house.peers[scenario.other].kill()
    began = time.monotonic()
    scenario.peer.cont()
    answer = scenario.peer.receive()
    assert answer.outcome in SURVIVABLE, answer.trace
    assert time.monotonic() - began < PATIENCE_MS / 2000
    scenario.is_done()
    scenario.forget_links()
    scenario.house.judge()


@each(ROWS_OF_BOTH)
def test_both_ends_die(row: Row, scenario: Scenario) -> None:
    stop_at(scenario, row)
    ends = {scenario.actor, scenario.other}
    for cluster_id in ends:
        scenario.house.peers[cluster_id].kill()
    scenario.house.judge()
    assert not ends & set(scenario.house.living(scenario.house.peers)), "and the others were judged without them"


@each(ROWS)
def test_all_die(row: Row, scenario: Scenario, crash_build: Path) -> None:
    house = scenario.house
    stop_at(scenario, row)
    for peer in house.namespace.peers:
        if peer.is_alive:
            peer.kill()
    done = subprocess.run([sys.executable, "-m", "shmkv", "gc"], cwd=crash_build, capture_output=True, text=True,
                          env=house.namespace.environment(house.env), timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert house.namespace.names() == set()


@each(ROWS)
def test_nobody_dies(row: Row, scenario: Scenario) -> None:
    house = scenario.house
    stop_at(scenario, row)
    links, house.links = house.links, {link for link in house.links if scenario.actor not in link and scenario.is_running(link)}
    house.judge()
    house.links = links
    scenario.assert_not_taken_for_dead()
    scenario.peer.cont()
    scenario.before_answer()
    answer = scenario.peer.receive()
    assert answer.outcome == SUCCESS, answer.trace
    scenario.after_answer()
    scenario.is_done()
    scenario.forget_links()
    house.judge()


def test_the_matrix_has_every_point_of_the_sources() -> None:
    package = builds.ROOT / "shmkv"
    text = "".join(path.read_text() for path in sorted(package.iterdir()) if path.suffix in (".py", ".pyx"))
    names = set(re.findall(r"(?:crash_point\(|_crash\.reach\(|publish_header\(.*, )b?\"([a-z-]+)\"\)", text))
    assert names == {row.point.split(":")[0] for row in ROWS}


def test_everybody_has_a_part_in_the_matrix() -> None:
    assert {row.call for row in ROWS} == set(SCENARIOS)
    assert not set(PROMPTS) & set(DECODERS)
