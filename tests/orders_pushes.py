"""Orders of pushes: the acceptor's side is opened and shut, the destination is pinned, written, given back.

The names of registers: of the acceptor, who pushes, `p_`; of the initiator, whose cache it is, `i_`; of a claimer `n_`.
"""
from __future__ import annotations

from orders_links import LIVE_1, REMOVED_1
from weak_memory import Access, Registers, Scenario, at, read, write

BROKEN_1 = (1, "BROKEN")
CACHE_LIVE, CACHE_RETIRED, CACHE_FREE = (1, "LIVE"), (1, "RETIRED"), (1, "FREE")


def _counts(site: str, place: str, by: int, into: str) -> Access:
    return at(site, place, lambda seen: seen[into] + by, into=into)


# -- the side ----------------------------------------------------------------------------------------------------------

def _goes_on(seen: Registers) -> bool:
    return bool(seen["p_state"] == LIVE_1)


def _pins(seen: Registers) -> bool:
    return _goes_on(seen) and bool(seen["p_cache"] == CACHE_LIVE)


OPENS = (
    _counts("_link:open_side:add32_seq#1", "p_open", 1, "p_in"),
    at("_link:state_of_record:load64_seq#1", "state", into="p_state"),
)
SHUTS = _counts("_link:shut_side:add32_seq#1", "p_open", -1, "p_out")

# The initiator is dead: whoever links ends its link and looks whether the acceptor is in the record.
CLAIMED = Scenario(
    "a record is used again while its acceptor opens its side", {"state": LIVE_1, "p_open": 0, "hazard": 0},
    ((*OPENS, at("_lookup:pin:exchange64_seq#1", "hazard", 1, when=_goes_on),
      at("_lookup:unpin:store64_release#1", "hazard", 0, when=_goes_on), SHUTS),
     (at("_link_record:end_link:swap64_seq#1", "state", BROKEN_1, expected=LIVE_1),
      at("_link_record:close_dead_side:load32_seq#1", "p_open", into="n_open"),
      write("hazard", 9, lambda seen: seen["n_open"] == 0))),
    # Whoever claimed it has it for itself.
    lambda seen: seen["n_open"] != 0 or seen["hazard"] == 9)


def _forgets(seen: Registers) -> bool:
    return bool(seen["i_open"] == 0 and seen["i_hazard"] == 0)


# The initiator ends the link by force and stops to look at its record; then it frees a cache.
FORGOTTEN = Scenario(
    "a record is not looked at any more while its acceptor opens its side",
    {"state": LIVE_1, "p_open": 0, "hazard": 0, "cache": CACHE_LIVE, "bytes": 0},
    ((*OPENS, at("_lookup:pin:exchange64_seq#1", "hazard", 1, when=_goes_on),
      at("_lookup:pin:load64_seq#1", "cache", into="p_cache"), write("bytes", 1, _pins)),
     (at("_link_record:end_link:swap64_seq#1", "state", REMOVED_1, expected=LIVE_1),
      at("_link_handle:peer_is_idle:load32_seq#1", "p_open", into="i_open"),
      at("_link_record:is_idle:load64_seq#1", "hazard", into="i_hazard"),
      at("_cache_records:retire:exchange64_seq#1", "cache", CACHE_RETIRED, when=_forgets), write("bytes", 2, _forgets))),
    # A cache that is freed with nobody in sight is written to by nobody.
    lambda seen: not _forgets(seen) or seen["bytes"] == 2)

# What was done in the record comes before it is shut.
LAST_WORDS = Scenario(
    "a record shows its acceptor's last words", {"p_open": 1, "hazard": 1},
    ((at("_lookup:unpin:store64_release#1", "hazard", 0), SHUTS),
     (at("_link_record:close_dead_side:load32_seq#1", "p_open", into="n_open"),
      at("_link_record:is_idle:load64_seq#1", "hazard", into="n_hazard"))),
    lambda seen: seen["n_open"] == 1 or seen["n_hazard"] == 0)


# -- the destination ---------------------------------------------------------------------------------------------------

def _written(seen: Registers) -> bool:
    return bool(seen["p_cache"] == CACHE_LIVE)


PUSH = (
    at("_lookup:pin:exchange64_seq#1", "hazard", 1),
    at("_lookup:pin:load64_seq#1", "cache", into="p_cache"),
    write("bytes", 1, _written),
    at("_lookup:recheck_written:exchange64_seq#1", "hazard", 1, when=_written),
    at("_lookup:is_still_there:load64_seq#1", "cache", into="p_last"),
    at("_lookup:unpin:store64_release#1", "hazard", 0),
)


def _owner(hazards_count: bool) -> tuple[Access, ...]:
    def may(seen: Registers) -> bool:
        return seen["i_hazard"] == 0 or not hazards_count

    return (
        at("_cache_records:retire:exchange64_seq#1", "cache", CACHE_RETIRED),
        at("_link_record:names:load64_seq#1", "hazard", into="i_hazard"),
        at("_cache_records:release:exchange64_seq#1", "cache", CACHE_FREE, when=may),
        at("_cache_records:release:fence_release#1"),
        write("bytes", 2, may),
        read("cache", "i_cache"),
    )


DESTINATION = {"cache": CACHE_LIVE, "bytes": 0, "hazard": 0}

PINNED = Scenario(
    "what is pushed stays in the cache that it was for", DESTINATION, (PUSH, _owner(True)),
    lambda seen: seen["i_cache"] != CACHE_FREE or seen["bytes"] == 2)

# One that ends in the middle, by its deadline or an end of the link, looks at nothing any more.
CUT_OFF = Scenario(
    "what a push has written that was cut off stays in its cache", DESTINATION, ((*PUSH[:3], PUSH[-1]), _owner(True)),
    lambda seen: seen["i_cache"] != CACHE_FREE or seen["bytes"] == 2)

TAKEN_FOR_DEAD = Scenario(
    "a push of a side taken for dead is not called good", DESTINATION, (PUSH, _owner(False)),
    lambda seen: not (_written(seen) and seen["p_last"] in (CACHE_LIVE, CACHE_RETIRED)) or seen["bytes"] == 2)


# -- the handle --------------------------------------------------------------------------------------------------------

LET_GO = Scenario(
    "a peer's directory is not unmapped under a push", {"users": 0, "state": LIVE_1, "mapping": 1},
    ((_counts("_link:link_enter:add32_seq#1", "users", 1, "p_in"),
      at("_link:state_of_record:load64_seq#1", "state", into="p_state"), read("mapping", "p_mapping"),
      _counts("_link:link_leave:add32_seq#1", "users", -1, "p_out")),
     (at("_link_record:end_link:swap64_seq#1", "state", BROKEN_1, expected=LIVE_1),
      at("_acceptor:let_go:load32_seq#1", "users", into="n_users"), write("mapping", 0, lambda seen: seen["n_users"] == 0))),
    lambda seen: not _goes_on(seen) or seen["p_mapping"] == 1)

SCENARIOS = (CLAIMED, FORGOTTEN, LAST_WORDS, PINNED, CUT_OFF, TAKEN_FOR_DEAD, LET_GO)
