"""Every order of memory in the sources is needed, by a scenario that fails without it, or stands in a table with its reason."""
from __future__ import annotations

from functools import cache

import pytest
from order_sites import sites
from order_table import AGAIN_FOR_ANOTHER_REASON, EXEMPT, SCENARIOS, STRONGER
from weak_memory import ACQUIRE, ORDERS, RELEASE, Access, Scenario, at, read, write

NAMES = {0: "relaxed", 1: "acquire", 2: "release", 3: "acq_rel", 5: "seq", 6: "seq", 7: "seq"}
COVERED = [site for site in sites() if any(site in scenario.sites() for scenario in SCENARIOS)]


def scenarios_of(site: str) -> list[Scenario]:
    return [scenario for scenario in SCENARIOS if site in scenario.sites()]


def access_of(site: str) -> Access:
    return scenarios_of(site)[0].sites()[site]


@cache
def breaks(site: str, order: int) -> tuple[str, ...]:
    """The scenarios that fail when this one access has a weaker order; a swap's two halves are weakened apart."""
    return tuple(scenario.name for scenario in scenarios_of(site) if scenario.weakened(site, order).failure())


def weaker(site: str) -> list[int]:
    """The orders that this access can be weakened to, weakest first."""
    order = access_of(site).order
    return sorted({order & mask for mask in (0, ACQUIRE, RELEASE, ACQUIRE | RELEASE)} - {order})


def needed(site: str) -> str:
    """The weakest order with which all scenarios hold."""
    return NAMES[next((order for order in weaker(site) if not breaks(site, order)), access_of(site).order)]


def again_sites() -> list[str]:
    return [site for site in COVERED if any(scenario.sites()[site].again for scenario in scenarios_of(site))]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_scenario_holds_with_the_orders_of_the_sources(scenario: Scenario) -> None:
    assert scenario.failure() == ""
    assert scenario.states[-1] > 5


@pytest.mark.parametrize("site", COVERED)
def test_access_has_the_order_it_needs_or_a_reason(site: str) -> None:
    has, needs = NAMES[access_of(site).order], needed(site)
    if needs == has:
        assert site not in STRONGER
        assert has == "relaxed" or all(breaks(site, order) for order in weaker(site))
    else:
        assert site in STRONGER, f"{site} is {has}, the scenarios need {needs}: a scenario or a reason is missing"
        assert STRONGER[site][0] == needs
        assert STRONGER[site][1]


@pytest.mark.parametrize("site", again_sites())
def test_second_look_is_missed_or_has_a_reason(site: str) -> None:
    missed = [scenario.name for scenario in scenarios_of(site) if scenario.sites()[site].again and scenario.without(site).failure()]
    assert bool(missed) != (site in AGAIN_FOR_ANOTHER_REASON)


def test_every_call_that_orders_memory_has_a_scenario_or_a_reason() -> None:
    found = sites()
    assert len(found) == len(set(found)) > 150
    assert not [site for site in found if site not in COVERED and site not in EXEMPT]


def test_tables_name_nothing_that_is_gone_or_told_twice() -> None:
    found = set(sites())
    named = {site for scenario in SCENARIOS for site in scenario.sites()}
    assert not (named | set(EXEMPT) | set(STRONGER)) - found
    assert not named & set(EXEMPT)
    assert not set(STRONGER) - set(COVERED)
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


# -- the machine itself, on what is known of weak memory ----------------------------------------------------------------

def _message(send: str, receive: str) -> Scenario:
    return Scenario("message", {"flag": 0, "data": 0},
                    ((write("data", 1), at(f"x:x:store64_{send}#1", "flag", 1)),
                     (at(f"x:x:load64_{receive}#1", "flag", into="flag_"), read("data", "data_"))),
                    lambda seen: seen["flag_"] == 0 or seen["data_"] == 1)


@pytest.mark.parametrize(("send", "receive", "holds"), [
    ("release", "acquire", True), ("relaxed", "acquire", False), ("release", "relaxed", False)])
def test_machine_passes_messages_by_release_and_acquire_alone(send: str, receive: str, holds: bool) -> None:
    assert (_message(send, receive).failure() == "") == holds


@pytest.mark.parametrize(("order", "holds"), [("seq", True), ("acquire", False)])
def test_machine_has_store_buffers_that_only_seq_cst_drains(order: str, holds: bool) -> None:
    def thread(mine: str, other: str) -> tuple[Access, ...]:
        return at("x:x:exchange64_seq#1", mine, 1), at(f"x:x:load64_{order}#1", other, into=f"{mine}_saw")

    both = Scenario("buffers", {"x": 0, "y": 0}, (thread("x", "y"), thread("y", "x")), lambda seen: seen["x_saw"] or seen["y_saw"])
    assert (both.failure() == "") == holds


@pytest.mark.parametrize(("order", "holds"), [("release", True), ("relaxed", False)])
def test_machine_lets_a_store_overtake_a_load_unless_it_releases(order: str, holds: bool) -> None:
    """Load buffering: each thread reads what the other writes afterwards."""
    def thread(reads: str, writes: str) -> tuple[Access, ...]:
        return read(reads, f"{reads}_"), at(f"x:x:store64_{order}#1", writes, 1)

    both = Scenario("loads", {"x": 0, "y": 0}, (thread("x", "y"), thread("y", "x")), lambda seen: not (seen["x_"] and seen["y_"]))
    assert (both.failure() == "") == holds


def test_machine_adds_without_losing_and_keeps_conditions_before_stores() -> None:
    add = at("x:x:add32_relaxed#1", "n", lambda seen: seen["a"] + 1, into="a")
    other = at("x:x:add32_relaxed#1", "n", lambda seen: seen["b"] + 1, into="b")
    assert Scenario("sum", {"n": 0}, ((add,), (other,)), lambda seen: seen["n"] == 2).failure() == ""
    stores = Scenario("condition", {"x": 0, "y": 0},
                      ((read("x", "x_"), write("y", 1, lambda seen: seen["x_"] == 1)),), lambda seen: seen["y"] == 0)
    assert stores.failure() == ""


def test_machine_shows_the_way_to_a_failure_and_weakens_only_what_it_is_told() -> None:
    scenario = _message("release", "acquire")
    assert "data stores" in scenario.weakened("x:x:store64_release#1", ORDERS["relaxed"]).failure()
    assert scenario.failure() == ""
    with pytest.raises(AssertionError, match="has no"):
        scenario.weakened("y:y:load32_acquire#1", 0)
