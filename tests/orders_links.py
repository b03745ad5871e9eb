"""Orders of links and of one process: the record's life and re-use, the lock word, the queue, uses of a cache, the crew."""
from __future__ import annotations

from typing import Any

from weak_memory import Access, Registers, Scenario, at, read, write

LIVE_1, REMOVED_1, FREE_2, LIVE_2 = (1, "LIVE"), (1, "REMOVED"), (2, "FREE"), (2, "LIVE")


def _counts(site: str, place: str, by: int, into: str) -> Access:
    return at(site, place, lambda seen: seen[into] + by, into=into)


# -- a call goes in while the link is ended and its side closed, and another cluster takes the record ------------------

def _goes_in(seen: Registers) -> bool:
    return bool(seen["c_state"] == LIVE_1)


def _is_last(seen: Registers) -> bool:
    return bool(seen["e_users"] == 0)


def _claims(seen: Registers) -> bool:
    return bool(seen["n_open"] == 0 and seen["n_hazard"] == 0 and seen["n_lease"] == 0)


CALL = (
    _counts("_link:link_enter:add32_seq#1", "users", 1, "c_in"),
    at("_link:state_of_record:load64_seq#1", "state", into="c_state"),
    at("_lookup:pin:exchange64_seq#1", "hazard", 1, when=_goes_in),
    write("lease", 1, _goes_in),
    at("_lookup:unpin:store64_release#1", "hazard", 0, when=_goes_in),
    _counts("_link:link_leave:add32_seq#1", "users", -1, "c_out"),
)
ENDS_AND_CLOSES = (
    at("_link_record:end_link:swap64_seq#1", "state", REMOVED_1, expected=LIVE_1),
    at("_link:users:load32_seq#1", "users", into="e_users"),
    at("_link_handle:close_side:load64_seq#1", "state", into="e_state"),
    at("_link_handle:close_side:store64_release#1", "hazard", 0, when=_is_last),
    at("_link_handle:close_side:store32_release#1", "open", 0, when=_is_last),
)
CLAIM = (
    at("_link_record:close_dead_side:load32_seq#1", "open", into="n_open"),
    at("_link_record:is_idle:load64_seq#1", "hazard", into="n_hazard"),
    at("_link_record:is_idle:load64_seq#2", "lease", into="n_lease"),
    write("hazard", 9, _claims),
    write("lease", 9, _claims),
)
RECORD = {"users": 0, "state": LIVE_1, "open": 1, "hazard": 0, "lease": 0}

REUSED = Scenario(
    "a record is used again", RECORD, (CALL, ENDS_AND_CLOSES, CLAIM),
    # Whoever claimed it has it for itself: a lease that stands was seen, and nobody wrote to it afterwards.
    lambda seen: not _claims(seen) or (seen["hazard"] == 9 and seen["lease"] == 9))

NEW_LINK = Scenario(
    "a new link shows whose it is", {"state": REMOVED_1, "cluster": 1, "open": 0},
    ((at("_link_record:start:load64_seq#1", "state", into="n_state"),
      at("_link_record:start:store64_release#1", "state", FREE_2), write("cluster", 2),
      at("_link_record:start:store32_release#1", "open", 1), at("_link_record:start:store64_release#2", "state", LIVE_2)),
     (at("_link_record:find:load64_seq#1", "state", into="f_state"), read("cluster", "f_cluster"))),
    lambda seen: seen["f_state"] != LIVE_2 or seen["f_cluster"] == 2)


def _shown(function: str) -> Scenario:
    """What is read of a record is of the link whose state was seen before and after."""
    return Scenario(
        f"a link that is shown by {function}", {"state": LIVE_1, "cluster": 1},
        ((at("_link_record:end_link:swap64_seq#1", "state", REMOVED_1, expected=LIVE_1), at("_link_record:start:fence_release#1"),
          write("cluster", 2), at("_link_record:start:store64_release#2", "state", LIVE_2)),
         (at(f"_link_record:{function}:load64_seq#1", "state", into="f_state"), read("cluster", "f_cluster"),
          at(f"_link_record:{function}:fence_acquire#1"),
          at(f"_link_record:{function}:load64_seq#2", "state", into="f_again", again="f_state"))),
        lambda seen: seen["f_state"] != seen["f_again"] or seen["f_cluster"] == {LIVE_1: 1, LIVE_2: 2}.get(seen["f_state"],
                                                                                                      seen["f_cluster"]))


SHOWN = (_shown("find"), _shown("living"))

# A linker that dies leaves a closed side, or an open one that says whose it is.
HALF_LINKED = Scenario(
    "a linker dies while it claims", {"state": REMOVED_1, "cluster": 1, "open": 0},
    (NEW_LINK.threads[0], (at("_link_record:claim:load32_acquire#1", "open", into="f_open"), read("cluster", "f_cluster"))),
    lambda seen: seen["f_open"] == 0 or seen["f_cluster"] == 2, may_die=frozenset({0}))

# A call that ended before the link did shows its last words to the next claimer, however it was closed.
CLOSED_FOR_THE_DEAD = Scenario(
    "a dead side is closed for it", {"hazard": 1, "open": 1, "lease": 1},
    ((write("lease", 0), at("_link_record:close_dead_side:store64_release#1", "hazard", 0),
      at("_link_record:close_dead_side:store32_release#1", "open", 0)),
     (at("_link_record:close_dead_side:load32_seq#1", "open", into="n_open"),
      at("_link_record:is_idle:load64_seq#1", "hazard", into="n_hazard"),
      at("_link_record:is_idle:load64_seq#2", "lease", into="n_lease"))),
    lambda seen: seen["n_open"] == 1 or seen["n_hazard"] == seen["n_lease"] == 0)


# -- the word ----------------------------------------------------------------------------------------------------------

def _side(me: str, work: tuple[Access, ...], take: str, give: str) -> tuple[Access, ...]:
    took = f"{me}_word?"

    def has(seen: Registers) -> bool:
        return bool(seen[took])

    return (at(f"_futex:word_try:{take}", "word", me, expected="FREE", into=f"{me}_word"), *work,
            at(f"_futex:word_release:{give}", "word", "FREE", when=has, expected=me))


def _has(me: str) -> Any:
    return lambda seen: bool(seen[f"{me}_word?"])


WORK = ((write("x", 1, _has("A")), write("y", 1, _has("A"))), (read("x", "b_x"), read("y", "b_y")))

# Pulls of the two sides over one link do not mix: what one reads of memory that the other pulls into is whole.
LOCK = Scenario(
    "calls under the word do not mix", {"word": "FREE", "x": 0, "y": 0},
    (_side("A", WORK[0], "swap32_seq#1", "swap32_seq#1"), _side("B", WORK[1], "swap32_seq#1", "swap32_seq#1")),
    lambda seen: not seen["B_word?"] or seen["b_x"] == seen["b_y"])

OFFER = Scenario(
    "an offer hands on what was done under the word", {"word": "A|WAITERS", "x": 0},
    ((write("x", 1), at("_futex:word_release:swap32_seq#2", "word", "OFFERED B", expected="A|WAITERS")),
     (at("_futex:word_try:swap32_seq#1", "word", "B", expected="OFFERED B", into="B_word"), read("x", "b_x"))),
    lambda seen: not seen["B_word?"] or seen["b_x"] == 1)

UNLINKED = Scenario(
    "nobody is inside after an unlink in turn", {"word": "A", "state": LIVE_1},
    ((at("_link_record:end_link:swap64_seq#1", "state", REMOVED_1, expected=LIVE_1),
      at("_futex:word_release:swap32_seq#1", "word", "FREE", expected="A")),
     (at("_futex:word_try:swap32_seq#1", "word", "B", expected="FREE", into="B_word"),
      at("_link:state_of_record:load64_seq#1", "state", into="b_state"))),
    lambda seen: not seen["B_word?"] or seen["b_state"] == REMOVED_1)


# -- threads of one process --------------------------------------------------------------------------------------------

def _queue(number: int) -> Scenario:
    """What the thread before did to the link's table of mappings is there, by either look at the grant."""
    return Scenario(
        f"turns in the queue hand on the link's tables, look {number}", {"granted": 0, "mappings": 0},
        ((write("mappings", 1), at("_futex:queue_leave:store32_release#1", "granted", 1)),
         (at(f"_futex:queue_wait_slice:load32_acquire#{number}", "granted", into="t_granted"), read("mappings", "t_mappings"))),
        lambda seen: seen["t_granted"] == 0 or seen["t_mappings"] == 1)


def _closed(seen: Registers) -> bool:
    return bool(seen["k_uses"] == 0)


USES = Scenario(
    "a cache of this process is not freed under a call", {"uses": 0, "is_open": 1, "bytes": 1},
    ((_counts("_local:local_enter:add32_seq#1", "uses", 1, "t_in"), at("_local:local_enter:load32_seq#1", "is_open", into="t_open"),
      read("bytes", "t_bytes"), _counts("_local:local_leave:add32_seq#1", "uses", -1, "t_out")),
     (at("_local:close:swap32_seq#1", "is_open", 0, expected=1), _counts("_local:uses:add32_seq#1", "uses", 0, "k_uses"),
      write("bytes", 2, _closed))),
    lambda seen: seen["t_open"] == 0 or seen["t_bytes"] == 1)

WRITTEN = Scenario(
    "what a call wrote stands before the memory is another's", {"uses": 1, "is_open": 0, "bytes": 0},
    ((write("bytes", 1), _counts("_local:local_leave:add32_seq#1", "uses", -1, "t_out")),
     (_counts("_local:uses:add32_seq#1", "uses", 0, "k_uses"), read("bytes", "k_bytes"))),
    lambda seen: seen["k_uses"] != 0 or seen["k_bytes"] == 1)


# -- the crew ----------------------------------------------------------------------------------------------------------

def _has_place(seen: Registers) -> bool:
    return bool(seen["t_generation"] == 1 and seen["t_place?"])


CREW_CALLER = (
    write("job", 1),
    at("_crew:crew_run:store64_release#1", "next", 0),
    at("_crew:crew_run:store32_release#1", "wanted", 1),
    _counts("_crew:crew_run:add32_seq#1", "generation", 1, "k_generation"),
    at("_crew:crew_run:exchange32_seq#1", "wanted", 0),
    _counts("_crew:crew_run:add32_seq#2", "inside", 0, "k_inside"),
    read("bytes", "k_bytes"),
    write("job", 2, lambda seen: seen["k_inside"] == 0),
)


def _crew_thread(look: int) -> tuple[Access, ...]:
    return (
        at(f"_crew:body:load32_acquire#{look}", "generation", into="t_generation"),
        _counts("_crew:body:add32_seq#1", "inside", 1, "t_in"),
        at("_crew:body:load32_acquire#4", "wanted", into="t_wanted"),
        at("_crew:body:swap32_seq#1", "wanted", 0, expected=1, into="t_place",
           when=lambda seen: seen["t_generation"] == 1 and seen["t_wanted"] == 1),
        read("job", "t_job"),
        write("bytes", 1, _has_place),
        _counts("_crew:body:add32_seq#2", "inside", -1, "t_out"),
    )


CREW = Scenario(
    "a thread of the crew works on a job that is there",
    {"job": 0, "next": 9, "wanted": 0, "generation": 0, "inside": 0, "bytes": 0},
    (CREW_CALLER, _crew_thread(3)),
    lambda seen: not _has_place(seen) or (seen["t_job"] == 1 and (seen["k_inside"] != 0 or seen["k_bytes"] == 1)))

# A thread that was slow can take a place of the next job while it still thinks of the one before.
CREW_LATE = Scenario(
    "a slow thread takes a place of the next job", {"job": 0, "next": 9, "wanted": 0},
    ((write("job", 1), at("_crew:crew_run:store64_release#1", "next", 0), at("_crew:crew_run:store32_release#1", "wanted", 1)),
     (at("_crew:body:load32_acquire#4", "wanted", into="t_wanted"),
      at("_crew:body:swap32_seq#1", "wanted", 0, expected=1, into="t_place", when=lambda seen: seen["t_wanted"] == 1),
      read("job", "t_job"), at("_crew:take_shares:add64_relaxed#1", "next", lambda seen: seen["t_next"] + 1, into="t_next"))),
    lambda seen: not seen["t_place?"] or (seen["t_job"] == 1 and seen["t_next"] == 0))

CREW_NEXT = Scenario(
    "a thread that slept takes shares of the new job", {"next": 9, "generation": 0, "job": 0},
    ((write("job", 1), at("_crew:crew_run:store64_release#1", "next", 0),
      _counts("_crew:crew_run:add32_seq#1", "generation", 1, "k_generation")),
     (at("_crew:body:load32_acquire#3", "generation", into="t_generation"), read("job", "t_job"),
      at("_crew:take_shares:add64_relaxed#1", "next", lambda seen: seen["t_next"] + 1, into="t_next"))),
    lambda seen: seen["t_generation"] == 0 or (seen["t_job"] == 1 and seen["t_next"] == 0))

def _caller(me: str) -> tuple[Access, ...]:
    has = f"{me}_busy?"
    return (at("_crew:crew_run:swap32_seq#1", "busy", 1, expected=0, into=f"{me}_busy"),
            write("job", me, lambda seen: bool(seen[has])), read("job", f"{me}_job"),
            at("_crew:crew_run:store32_release#2", "busy", 0, when=lambda seen: bool(seen[has])))


CREW_BUSY = Scenario(
    "one caller after the other", {"busy": 0, "job": 0}, (_caller("k"), _caller("l")),
    lambda seen: all(not seen[f"{me}_busy?"] or seen[f"{me}_job"] == me for me in ("k", "l")))

CREW_FAILED = Scenario(
    "a share that failed says how", {"stopped": 0, "failed": 0},
    ((write("failed", 1), at("_crew:take_shares:store32_release#1", "stopped", 1)),
     (at("_crew:take_shares:load32_acquire#1", "stopped", into="t_stopped"), read("failed", "t_failed"))),
    lambda seen: seen["t_stopped"] == 0 or seen["t_failed"] == 1)

SCENARIOS = (REUSED, NEW_LINK, *SHOWN, HALF_LINKED, CLOSED_FOR_THE_DEAD, LOCK, OFFER, UNLINKED, _queue(1), _queue(2), USES, WRITTEN,
             CREW, CREW_LATE, CREW_NEXT, CREW_BUSY, CREW_FAILED)
