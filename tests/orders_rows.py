"""Orders of caches and rows: hazard, retire, recycle; bind and unbind; coverage and consume; publish.

The names of registers: of a reader `r_`, of the owner `o_`. Words are (generation, state).
"""
from __future__ import annotations

from typing import Any

from weak_memory import Access, Registers, Scenario, at, read, write

LIVE_1, RETIRED_1, FREE_1, LIVE_2 = (1, "LIVE"), (1, "RETIRED"), (1, "FREE"), (2, "LIVE")


# -- a cache is retired and its memory given to the next, while a reader gets in ---------------------------------------

def _copied(seen: Registers) -> bool:
    return bool(seen["r_word"] == seen["r_word_again"] == LIVE_1)


def _pinned(seen: Registers) -> bool:
    return _copied(seen) and seen["r_pin_cache"] == LIVE_1 and seen["r_pin_row"] == LIVE_1


def _found(seen: Registers) -> bool:
    return _pinned(seen) and seen["r_cache_last"] in (LIVE_1, RETIRED_1)


READER_OF_CACHE = (
    at("_lookup:copy_cache:load64_seq#1", "cache", into="r_word"),
    read("record", "r_record"),
    at("_lookup:copy_cache:fence_acquire#1"),
    at("_lookup:copy_cache:load64_seq#2", "cache", into="r_word_again", again="r_word"),
    at("_lookup:pin:exchange64_seq#1", "hazard", 1, when=_copied),
    at("_lookup:pin:load64_seq#1", "cache", into="r_pin_cache", again="r_word"),
    at("_lookup:pin:load64_seq#2", "row", into="r_pin_row"),
    read("bytes", "r_bytes"),
    at("_lookup:recheck:fence_acquire#1"),
    at("_lookup:is_still_there:load64_seq#1", "cache", into="r_cache_last", again="r_pin_cache"),
    at("_lookup:unpin:store64_release#1", "hazard", 0, when=_pinned),
)


def _owner_recycles(hazards_count: bool) -> tuple[Access, ...]:
    def may(seen: Registers) -> bool:
        return seen["o_hazard"] == 0 or not hazards_count

    return (
        at("_cache_records:retire:exchange64_seq#1", "cache", RETIRED_1),
        at("_link_record:names:load64_seq#1", "hazard", into="o_hazard"),
        at("_cache_records:release:exchange64_seq#1", "cache", FREE_1, when=may),
        at("_cache_records:release:fence_release#1"),
        write("record", 2, may),
        write("bytes", 2, may),
        at("_cache_records:insert:exchange64_seq#1", "cache", LIVE_2, when=may),
    )


CACHE = {"cache": LIVE_1, "row": LIVE_1, "record": 1, "bytes": 1, "hazard": 0}

HAZARD = Scenario(
    "hazard", CACHE, (READER_OF_CACHE, _owner_recycles(True)),
    # While its hazard stands the memory is the reader's, whatever its last look says.
    lambda seen: not _pinned(seen) or seen["r_bytes"] == 1)

LOST_LIFE_BYTE = Scenario(
    "hazard of a side taken for dead", CACHE, (READER_OF_CACHE, _owner_recycles(False)),
    lambda seen: not _found(seen) or seen["r_bytes"] == 1)

LEASE = Scenario(
    "lease", {**CACHE, "lease": 0},
    ((at("_lookup:pin:exchange64_seq#1", "hazard", 1), at("_lookup:pin:load64_seq#1", "cache", into="r_pin_cache"),
      read("bytes", "r_bytes")),
     (at("_cache_records:retire:exchange64_seq#1", "cache", RETIRED_1),
      at("_link_record:names:load64_seq#2", "hazard", into="o_hazard"),
      write("bytes", 2, lambda seen: seen["o_hazard"] == 0))),
    lambda seen: seen["r_pin_cache"] != LIVE_1 or seen["r_bytes"] == 1)

LEASE_AFTER_HAZARD = Scenario(
    "a lease takes the hazard's place", {**CACHE, "lease": 0},
    ((at("_lookup:pin:exchange64_seq#1", "hazard", 1), at("_lookup:pin:load64_seq#1", "cache", into="r_pin_cache"),
      at("_lease:lease_take:store64_release#1", "lease", 1), at("_lookup:unpin:store64_release#1", "hazard", 0),
      read("bytes", "r_bytes")),
     (at("_cache_records:retire:exchange64_seq#1", "cache", RETIRED_1),
      at("_link_record:names:load64_seq#1", "hazard", into="o_hazard"),
      at("_link_record:names:load64_seq#2", "lease", into="o_lease"),
      write("bytes", 2, lambda seen: seen["o_hazard"] == 0 and seen["o_lease"] == 0))),
    lambda seen: seen["r_pin_cache"] != LIVE_1 or seen["r_bytes"] == 1)

LEASE_ENDED = Scenario(
    "bytes before the end of a lease", {"lease": 1, "bytes": 1},
    ((read("bytes", "r_bytes"), at("_lease:lease_give:exchange64_seq#1", "lease", 0)),
     (at("_link_record:names:load64_seq#2", "lease", into="o_lease"), write("bytes", 2, lambda seen: seen["o_lease"] == 0))),
    lambda seen: seen["r_bytes"] == 1)

RECORD = Scenario(
    "record of a cache", {**CACHE, "cache": FREE_1, "record": 0},
    (READER_OF_CACHE[:4], (write("record", 2), at("_cache_records:insert:exchange64_seq#1", "cache", LIVE_2))),
    lambda seen: not seen["r_word"] == seen["r_word_again"] == LIVE_2 or seen["r_record"] == 2)

# A cache slot is filled again while a reader copies the record: the copy is of one cache or is not taken.
TORN_RECORD = Scenario(
    "record of a slot that is filled again", CACHE, (READER_OF_CACHE[:4], _owner_recycles(True)),
    lambda seen: seen["r_word"] != seen["r_word_again"] or seen["r_word"][1] != "LIVE" or seen["r_record"] == seen["r_word"][0])


# -- a row gets another key, its bytes become another's -----------------------------------------------------------------

def _matched(key: int, word: tuple[int, str]) -> Any:
    return lambda seen: seen["r_key"] == key and seen["r_row"] == seen["r_row_again"] == word


READER_OF_ROW = (
    at("_lookup:compare_row:load64_seq#1", "row", into="r_row"),
    read("key", "r_key"),
    at("_lookup:compare_row:fence_acquire#1"),
    at("_lookup:compare_row:load64_seq#2", "row", into="r_row_again", again="r_row"),
)
READS_ON = (
    at("_lookup:pin:load64_seq#2", "row", into="r_pin_row", again="r_row"),
    read("bytes", "r_bytes"),
    at("_lookup:recheck:fence_acquire#1"),
    at("_lookup:recheck:load64_seq#1", "row", into="r_row_last", again="r_pin_row"),
)
UNBINDS = (
    at("_directory:end_key:load64_seq#1", "row", into="o_seen"),
    at("_directory:end_key:swap64_seq#1", "row", (1, "REMOVED"), expected=(1, "LIVE")),
    at("_directory:end_key:load64_seq#2", "row", into="o_ended", again="o_seen"),
    at("_directory:end_key:exchange64_seq#1", "row", (1, "OUT")),
)
BINDS = (
    at("_directory:bind:exchange64_seq#1", "row", (3, "UNBOUND")),
    at("_directory:bind:fence_release#1"),
    at("_directory:bind:store64_release#1", "coverage", (3, 0)),
    write("key", 2),
    at("_directory:bind:exchange32_seq#1", "progress", 1),
    at("_directory:bind:exchange64_seq#2", "row", (3, "LIVE")),
)
ROW = {"row": (1, "LIVE"), "key": 1, "bytes": 1, "progress": 1, "coverage": (1, 0)}


def _good(seen: Registers) -> bool:
    return bool(_matched(1, (1, "LIVE"))(seen) and seen["r_pin_row"] == seen["r_row"] and seen["r_row_last"] == seen["r_row"])


TORN_KEY = Scenario(
    "key of a row bound anew", {**ROW, "row": (2, "UNBOUND")}, (READER_OF_ROW, BINDS),
    lambda seen: seen["r_row"] != seen["r_row_again"] or seen["r_key"] == (2 if seen["r_row"][0] == 3 else 1)
    or seen["r_row"] == (3, "UNBOUND"))

REMOVED = Scenario(
    "bytes after a remove", ROW, (READER_OF_ROW + READS_ON, (*UNBINDS, write("bytes", 2))),
    lambda seen: not _good(seen) or seen["r_bytes"] == 1)

# A row without a key, read by its cache's id.
UNBOUND = Scenario(
    "bytes after an unbind", {**ROW, "row": (1, "UNBOUND"), "key": 0},
    ((at("_core:look_at_progress:load32_acquire#1", "progress", into="r_progress"), *READS_ON),
     (at("_directory:unbind:exchange32_seq#1", "progress", 0), at("_directory:unbind:exchange64_seq#1", "row", (2, "UNBOUND")),
      at("_directory:unbind:fence_release#1"), write("bytes", 2))),
    lambda seen: seen["r_progress"] == 0 or not seen["r_pin_row"] == seen["r_row_last"] == (1, "UNBOUND") or seen["r_bytes"] == 1)

BY_ID = Scenario(
    "by id: nobody gets in after an unbind", {**ROW, "row": (1, "UNBOUND")},
    ((at("_lookup:find_row:load64_seq#1", "row", into="r_row"),
      at("_core:look_at_progress:load32_acquire#1", "progress", into="r_progress"), read("bytes", "r_bytes")),
     (at("_directory:unbind:exchange32_seq#1", "progress", 0), at("_directory:unbind:exchange64_seq#1", "row", (2, "UNBOUND")),
      at("_directory:unbind:fence_release#1"), write("bytes", 2))),
    lambda seen: seen["r_row"] != (2, "UNBOUND") or seen["r_progress"] == 0)

# A block of a list: its word, then its progress; after the copy its word again.
READER_OF_BLOCK = (
    at("_lookup:look_at_rows:load64_seq#1", "row", into="r_row"),
    at("_lookup:look_at_rows:load32_acquire#1", "progress", into="r_progress"),
    read("bytes", "r_bytes"),
    at("_lookup:recheck_rows:fence_acquire#1"),
    at("_lookup:recheck_rows:load64_seq#1", "row", into="r_row_last", again="r_row"),
)
BLOCK_UNBOUND = Scenario(
    "bytes of a block after an unbind", {**ROW, "row": (1, "UNBOUND"), "key": 0},
    (READER_OF_BLOCK,
     (at("_directory:unbind:exchange32_seq#1", "progress", 0), at("_directory:unbind:exchange64_seq#1", "row", (2, "UNBOUND")),
      at("_directory:unbind:fence_release#1"), write("bytes", 2))),
    lambda seen: seen["r_progress"] == 0 or seen["r_row"] != seen["r_row_last"]
    or (seen["r_row"] == (1, "UNBOUND") and seen["r_bytes"] == 1))

BLOCK_PUBLISHED = Scenario(
    "published bytes of a block are there", {"row": (2, "UNBOUND"), "bytes": 0, "progress": 0},
    (READER_OF_BLOCK[1:3], (write("bytes", 1), at("_directory:publish:exchange32_seq#1", "progress", 1))),
    lambda seen: seen["r_progress"] == 0 or seen["r_bytes"] == 1)

BOUND_BYTES = Scenario(
    "what bind calls published is there", {**ROW, "row": (2, "UNBOUND"), "progress": 0, "bytes": 0},
    ((at("_lookup:compare_row:load64_seq#1", "row", into="r_row"),
      at("_core:look_at_progress:load32_acquire#1", "progress", into="r_progress"), read("bytes", "r_bytes")),
     (write("bytes", 1), *BINDS)),
    lambda seen: (seen["r_progress"] == 0 or seen["r_bytes"] == 1) and (seen["r_row"] != (3, "LIVE") or seen["r_progress"] == 1))

# A puller of the new key finds coverage of its own generation, or it would never consume.
FRESH_COVERAGE = Scenario(
    "coverage of a row bound anew", {**ROW, "row": (2, "UNBOUND")},
    ((at("_lookup:compare_row:load64_seq#2", "row", into="r_row"),
      at("_coverage:cover:load64_seq#1", "coverage", into="r_coverage")),
     BINDS),
    lambda seen: seen["r_row"] != (3, "LIVE") or seen["r_coverage"] == (3, 0))


# -- coverage ----------------------------------------------------------------------------------------------------------

def _puller(me: str, other: str) -> tuple[Access, ...]:
    """Marks its own word, then looks at both; its own stands as it left it."""
    return (
        at("_coverage:cover:load64_seq#1", me, into=f"{me}_seen"),
        at("_coverage:cover:swap64_seq#1", me, 1, expected=lambda seen: seen[f"{me}_seen"]),
        at("_coverage:is_full:load64_seq#1", other, into=f"{me}_other"),
        at("_coverage:consume:swap64_seq#1", "row", (1, "CONSUMED"), expected=(1, "LIVE"),
           when=lambda seen: seen[f"{me}_other"] == 1),
    )


COVERED = Scenario(
    "two pullers cover a row", {"first": 0, "second": 0, "row": (1, "LIVE")},
    (_puller("first", "second"), _puller("second", "first")),
    lambda seen: seen["row"] == (1, "CONSUMED"))

NOTICED = Scenario(
    "the owner notices what was consumed", {"row": (1, "LIVE"), "consumed": 0},
    ((at("_coverage:consume:swap64_seq#1", "row", (1, "CONSUMED"), expected=(1, "LIVE"), into="r_done"),
      at("_coverage:consume:add32_seq#1", "consumed", lambda seen: seen["r_count"] + 1, into="r_count")),
     (at("_directory:noticed_slots:load32_acquire#1", "consumed", into="o_count"),
      at("_directory:settle:load64_seq#1", "row", into="o_row"),
      at("_directory:settle:load64_seq#2", "row", into="o_row_again", again="o_row"))),
    lambda seen: seen["o_count"] == 0 or seen["o_row_again"] == (1, "CONSUMED"))

# A puller died between its last mark and its swap: the owner's swap is the one that counts, and it sees its own.
REAPED = Scenario(
    "the owner consumes for a dead puller", {"row": (1, "LIVE")},
    ((at("_directory:settle:load64_seq#1", "row", into="o_row"),
      at("_directory:settle:swap64_seq#1", "row", (1, "CONSUMED"), expected=(1, "LIVE"), into="o_did"),
      at("_directory:settle:load64_seq#2", "row", into="o_row_again", again="o_row")),
     (at("_coverage:consume:swap64_seq#1", "row", (1, "CONSUMED"), expected=(1, "LIVE"), into="r_did"),)),
    lambda seen: seen["o_row_again"] == (1, "CONSUMED") and not (seen["o_did?"] and seen["r_did?"]))

# A pull of the owner's own out of its own cache covers and consumes as a reader does.
OWN_PULL = Scenario(
    "a pull out of the own cache", {"row": (3, "UNBOUND"), "coverage": (2, 0)},
    ((at("_directory:mark_pulled:load64_seq#1", "row", into="r_row"),
      at("_coverage:cover:load64_seq#1", "coverage", into="r_coverage")),
     (at("_directory:bind:store64_release#1", "coverage", (3, 0)), at("_directory:bind:exchange64_seq#2", "row", (3, "LIVE")))),
    lambda seen: seen["r_row"] != (3, "LIVE") or seen["r_coverage"] == (3, 0))

# What end_key remembers is how the key ended: its swap, or a reader's.
ENDED_ONCE = Scenario(
    "a removed key is not remembered as consumed", {"row": (1, "LIVE")},
    ((*UNBINDS,), (at("_coverage:consume:swap64_seq#1", "row", (1, "CONSUMED"), expected=(1, "LIVE"), into="r_did"),)),
    lambda seen: (seen["o_ended"] == (1, "CONSUMED")) == seen["r_did?"] or seen["o_seen"] == (1, "CONSUMED"))

# Consumed: the puller has read the bytes, and the owner may write others.
CONSUMED_BYTES = Scenario(
    "bytes of a consumed row are written again", {"row": (1, "LIVE"), "bytes": 1},
    ((read("bytes", "r_bytes"), at("_lookup:recheck:fence_acquire#1"),
      at("_lookup:recheck:load64_seq#1", "row", into="r_row_last"),
      at("_coverage:consume:swap64_seq#1", "row", (1, "CONSUMED"), expected=(1, "LIVE"),
         when=lambda seen: seen["r_row_last"] == (1, "LIVE"))),
     (at("_directory:settle:load64_seq#1", "row", into="o_row"), write("bytes", 2, lambda seen: seen["o_row"] == (1, "CONSUMED")))),
    lambda seen: seen["r_bytes"] == 1)


# -- publish -----------------------------------------------------------------------------------------------------------

PUBLISHED = Scenario(
    "published bytes are there", {"bytes": 0, "progress": 0},
    ((at("_core:look_at_progress:load32_acquire#1", "progress", into="r_progress"), read("bytes", "r_bytes")),
     (write("bytes", 1), at("_directory:publish:exchange32_seq#1", "progress", 1))),
    lambda seen: seen["r_progress"] == 0 or seen["r_bytes"] == 1)

SCENARIOS = (HAZARD, LOST_LIFE_BYTE, LEASE, LEASE_AFTER_HAZARD, LEASE_ENDED, RECORD, TORN_RECORD, TORN_KEY, REMOVED, UNBOUND, BY_ID,
             BLOCK_UNBOUND, BLOCK_PUBLISHED,
             BOUND_BYTES, FRESH_COVERAGE, COVERED, NOTICED, REAPED, OWN_PULL, ENDED_ONCE, CONSUMED_BYTES, PUBLISHED)
