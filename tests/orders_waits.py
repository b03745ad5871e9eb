"""Orders of waits: who sleeps on a word is woken by whoever changes what it looked at; who ends a wait of its own process is heard.

A waiter counts in, loads the event word, looks, and sleeps if the word is still the one that it loaded (the kernel's look, under
its own lock). Registers: of a waiter `r_`, of the one who changes something `o_`.
"""
from __future__ import annotations

from typing import Any

from weak_memory import Access, Registers, Scenario, at, read, write

LIVE, CONSUMED = (3, "LIVE"), (3, "CONSUMED")


def _waits(look: Access) -> tuple[Access, ...]:
    return (
        at("_wait:sleeper_count_in:add32_seq#1", "waiters", lambda seen: seen["r_waiters"] + 1, into="r_waiters"),
        at("_wait:sleeper_seen:load32_seq#1", "event", into="r_event"),
        look,
        Access("event", 5, loads=True, into="r_slept_on"),
    )


def _tells(change: Access, site: str) -> tuple[Access, ...]:
    """After the change: adds to the event, and wakes, if somebody is counted in."""
    return (
        change,
        at(site, "waiters", into="o_waiters"),
        at("_events:event_happens:add32_seq#1", "event", lambda seen: seen["o_event"] + 1, into="o_event",
           when=lambda seen: seen["o_waiters"] == 1),
    )


def _is_woken(register: str, news: Any) -> Any:
    """It saw the news, or did not sleep, or slept on a word that was changed afterwards."""
    def promise(seen: Registers) -> bool:
        return bool(seen[register] == news or seen["r_slept_on"] != seen["r_event"]
                    or (seen["o_waiters"] == 1 and seen["r_event"] == 0))
    return promise


START = {"waiters": 0, "event": 0, "progress": 0, "row": (3, "UNBOUND"), "cache": (1, "LIVE"), "lease": 1}
ROW_CHANGED = "_events:row_changed:load32_seq#1"
MEMORY_CHANGED = "_events:memory_changed:load32_seq#1"

LAYER = Scenario(
    "who waits for a layer is woken", START,
    (_waits(at("_await:progress_of:load32_acquire#1", "progress", into="r_progress")),
     _tells(at("_directory:publish:exchange32_seq#1", "progress", 1), ROW_CHANGED)),
    _is_woken("r_progress", 1))

LAYER_BYTES = Scenario(
    "bytes of a layer that was waited for", {"bytes": 0, "progress": 0},
    ((at("_await:progress_of:load32_acquire#1", "progress", into="r_progress"), read("bytes", "r_bytes")),
     (write("bytes", 1), at("_directory:publish:exchange32_seq#1", "progress", 1))),
    lambda seen: seen["r_progress"] == 0 or seen["r_bytes"] == 1)

ENDED = Scenario(
    "who waits for a layer hears that the key ended", {**START, "row": LIVE},
    (_waits(at("_await:look_at_row:load64_seq#1", "row", into="r_row")),
     _tells(at("_directory:end_key:exchange64_seq#1", "row", CONSUMED), ROW_CHANGED)),
    _is_woken("r_row", CONSUMED))

RETIRED = Scenario(
    "who waits for a layer hears that the cache goes", START,
    (_waits(at("_await:look_at_row:load64_seq#2", "cache", into="r_cache")),
     _tells(at("_cache_records:retire:exchange64_seq#1", "cache", (1, "RETIRED")), ROW_CHANGED)),
    _is_woken("r_cache", (1, "RETIRED")))

KEY = Scenario(
    "who waits for a key is woken", START,
    (_waits(at("_lookup:compare_row:load64_seq#1", "row", into="r_row")),
     (at("_directory:bind:exchange64_seq#2", "row", LIVE),
      at("_events:keys_changed:add32_seq#1", "event", lambda seen: seen["o_event"] + 1, into="o_event"),
      at("_events:keys_changed:load32_seq#1", "waiters", into="o_waiters"))),
    _is_woken("r_row", LIVE))

CONSUMED_KEY = Scenario(
    "who waits for memory hears of a consumed key", {**START, "row": LIVE},
    (_waits(at("_directory:settle:load64_seq#1", "row", into="r_row")),
     _tells(at("_coverage:consume:swap64_seq#1", "row", CONSUMED, expected=LIVE), MEMORY_CHANGED)),
    _is_woken("r_row", CONSUMED))

ENDED_LEASE = Scenario(
    "who waits for memory hears of a lease that ends", START,
    (_waits(at("_link_record:names:load64_seq#2", "lease", into="r_lease")),
     _tells(at("_lease:lease_give:exchange64_seq#1", "lease", 0), MEMORY_CHANGED)),
    _is_woken("r_lease", 0))


# -- a thread of the same process ends a wait --------------------------------------------------------------------------

def _ended(ask: str, look: str) -> Scenario:
    """`asked` is stored before the word is looked for, the word before `asked` is looked at."""
    swaps = "swap" in look
    looked = at(look, "asked", 0, into="r_asked", expected=1) if swaps else at(look, "asked", into="r_asked")
    asked = at(ask, "asked", 1, into="c_was", expected=0) if "swap" in ask else at(ask, "asked", 1, into="c_was")
    return Scenario(
        f"a wait is ended: {ask.split(':')[1]}", {"address": 0, "event": 0, "asked": 0},
        ((at("_wait:sleeper_count_in:exchange64_seq#1", "address", 1),
          at("_wait:sleeper_seen:load32_seq#1", "event", into="r_event"),
          looked,
          Access("event", 5, loads=True, into="r_slept_on")),
         (asked,
          at("_wait:sleeper_wake:load64_seq#1", "address", into="c_address"),
          at("_events:event_happens:add32_seq#1", "event", lambda seen: seen["c_event"] + 1, into="c_event",
             when=lambda seen: seen["c_address"] == 1))),
        lambda seen: seen["r_asked"] == 1 or seen["r_slept_on"] != seen["r_event"]
        or (seen["c_address"] == 1 and seen["r_event"] == 0))


CANCELLED = _ended("_wait:cancel:exchange32_seq#1", "_link:is_cancelled:load32_seq#1")
TURN = _ended("_wait:ask_for_turn:swap32_seq#1", "_wait:asked_of:swap32_seq#1")


def _alone(enter: str, leave: str, me: str) -> tuple[Access, ...]:
    """Whoever finds nobody inside does something to the flow."""
    def is_in(seen: Registers) -> bool:
        return bool(seen[me] == 0)

    return (at(enter, "running", 1, into=me), read("flow", f"{me}_flow"),
            write("flow", lambda seen: seen[f"{me}_flow"] + 1, is_in), at(leave, "running", 0, when=is_in))


ALONE = Scenario(
    "a flow is run and closed by one thread at a time", {"running": 0, "flow": 0},
    (_alone("_flow:run:exchange32_seq#1", "_flow:run:store32_release#1", "a"),
     _alone("_flow:close:exchange32_seq#1", "_flow:close:store32_release#1", "b")),
    lambda seen: seen["flow"] == (seen["a"] == 0) + (seen["b"] == 0))


# -- the ring of ended keys --------------------------------------------------------------------------------------------

RING = Scenario(
    "an entry of the ring is read whole", {"count": 0, "entry": 0},
    ((at("_await:look_at_ring:load64_acquire#1", "count", into="r_count"), read("entry", "r_entry")),
     (write("entry", 1), at("_rings:note_ended:store64_release#1", "count", 1))),
    lambda seen: seen["r_count"] == 0 or seen["r_entry"] == 1)

# The entry after the newest one takes the place of the oldest: who reads that sees the count of the newest.
OVERTAKEN = Scenario(
    "an entry of the ring that is overwritten is not used", {"count": 0, "entry": 0},
    ((read("entry", "r_entry"), at("_await:look_at_ring:fence_acquire#1"),
      at("_await:look_at_ring:load64_acquire#2", "count", into="r_count_again")),
     (at("_rings:note_ended:store64_release#1", "count", 1), at("_rings:note_ended:fence_release#1"), write("entry", 1))),
    lambda seen: seen["r_entry"] == 0 or seen["r_count_again"] == 1)

BEGINNING = Scenario(
    "a key that ends after the first look has its entry behind the count", {"count": 0, "row": (3, "UNBOUND")},
    ((at("_await:find_awaited:load64_acquire#1", "count", into="r_count"),
      at("_lookup:compare_row:load64_seq#1", "row", into="r_row")),
     (at("_directory:bind:exchange64_seq#2", "row", LIVE), at("_rings:note_ended:store64_release#1", "count", 1))),
    lambda seen: seen["r_count"] == 0 or seen["r_row"] == LIVE)

SCENARIOS = (LAYER, LAYER_BYTES, ENDED, RETIRED, KEY, CONSUMED_KEY, ENDED_LEASE, CANCELLED, TURN, ALONE, RING, OVERTAKEN, BEGINNING)
