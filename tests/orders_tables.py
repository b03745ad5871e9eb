"""Orders of what grows and is found: headers, member records, reserved counts, the key index, rings, attached segments."""
from __future__ import annotations

from weak_memory import Access, Registers, Scenario, at, read, write

BOTH = 3                                # acquire and release: a fence as a system call is one


# -- what is filled and then shown ---------------------------------------------------------------------------------------

def shown(name: str, writer: str, reader: str, field: str = "field", word: str = "word") -> Scenario:
    """One store says that the rest is there; one load asks first. The writer may die before."""
    return Scenario(
        name, {word: 0, field: 0},
        ((write(field, 1), at(writer, word, 1)), (at(reader, word, into="r_word"), read(field, "r_field"))),
        lambda seen: seen["r_word"] == 0 or seen["r_field"] == 1, may_die=frozenset({0}))


HEADERS = (
    shown("header of a directory", "_mapping:publish_header:store32_release#1", "_members:read_header:load32_acquire#1"),
    shown("header of the members table", "_mapping:publish_header:store32_release#1", "_members:read_header:load32_acquire#1"),
    shown("header of a segment", "_mapping:publish_header:store32_release#1", "_attached:copy_header:load32_acquire#1"),
    shown("record of a member", "_members:write:store64_release#2", "_members:read:load64_acquire#1"),
    shown("record of a member whose memory is reached", "_members:write:store64_release#2",
          "_peer_memory:copy_member:load64_acquire#1"),
)

PAGES = tuple(
    shown(f"pages stand behind what is counted, {reader}", writer, reader, field="pages", word="reserved")
    for writer, reader in (
        ("_tables:grow:store32_release#1", "_lookup:copy_cache:load32_acquire#1"),
        ("_tables:grow:store32_release#1", "_lookup:probe:load32_acquire#1"),
        ("_tables:grow:store32_release#1", "_inspect:fault_of:load32_acquire#1"),
        ("_tables:grow:store32_release#1", "_inspect:fault_of:load32_acquire#2"),
        ("_tables:grow:store32_release#1", "_inspect:caches:load32_acquire#1"),
        ("_link_record:reserve_more:store32_release#1", "_link_record:links_reserved:load32_acquire#1"),
        ("_link_record:reserve_more:store32_release#1", "_index:reader_inside:load32_acquire#1"),
    ))

RINGS = (
    shown("serials of unlinked segments", "_rings:note_unlinked:store64_release#1", "_core:drop_unlinked:load64_acquire#1"),
    shown("ring of ended keys", "_rings:note_ended:store64_release#1", "_lookup:why_ended:load64_acquire#1"),
)

# Whoever has a new cache from the index must not call the directory damaged because it has an older count.
COUNT_IN_TIME = Scenario(
    "an entry of the index is not ahead of the counts", {"rows_reserved": 1, "entry": 0},
    ((at("_tables:grow:store32_release#1", "rows_reserved", 2), at("_index:insert:store64_release#1", "entry", 2)),
     (at("_lookup:probe:load64_acquire#1", "entry", into="r_entry"),
      at("_lookup:probe:load32_acquire#1", "rows_reserved", into="r_rows"))),
    lambda seen: seen["r_entry"] == 0 or seen["r_rows"] == 2)

CACHE_BY_ID = Scenario(
    "an id in the index leads to its cache", {"cache": (1, "FREE"), "entry": 0},
    ((at("_cache_records:insert:exchange64_seq#1", "cache", (2, "LIVE")), at("_index:insert:store64_release#1", "entry", 2)),
     (at("_lookup:probe:load64_acquire#1", "entry", into="r_entry"),
      at("_lookup:copy_cache:load64_seq#1", "cache", into="r_word"))),
    lambda seen: seen["r_entry"] == 0 or seen["r_word"] == (2, "LIVE"))

# A row handed out again: its number may be read by whoever looks for its former key.
FILLED_ROW = Scenario(
    "a row that is another cache's now", {"row": (1, "LIVE"), "cache_slot": 1, "progress": 9, "cache": (1, "FREE")},
    ((at("_directory:end_key:swap64_seq#1", "row", (1, "REMOVED"), expected=(1, "LIVE")),
      at("_directory:end_key:exchange64_seq#1", "row", (1, "OUT")),
      at("_cache_records:fill_row:exchange64_seq#1", "row", (2, "UNBOUND")),
      write("cache_slot", 2), at("_cache_records:fill_row:store32_release#1", "progress", 0),
      at("_cache_records:insert:exchange64_seq#1", "cache", (2, "LIVE"))),
     (at("_lookup:compare_row:load64_seq#1", "row", into="r_row"), read("cache_slot", "r_slot"),
      at("_lookup:compare_row:fence_acquire#1"),
      at("_lookup:compare_row:load64_seq#2", "row", into="r_row_again", again="r_row"))),
    lambda seen: not seen["r_row"] == seen["r_row_again"] == (1, "LIVE") or seen["r_slot"] == 1)

FILLED_PROGRESS = Scenario(
    "a cache is found with the progress of its rows", {"cache": (1, "FREE"), "progress": 9, "row": (1, "UNBOUND")},
    ((at("_cache_records:fill_row:exchange64_seq#1", "row", (2, "UNBOUND")),
      at("_cache_records:fill_row:store32_release#1", "progress", 0),
      at("_cache_records:insert:exchange64_seq#1", "cache", (2, "LIVE"))),
     (at("_lookup:copy_cache:load64_seq#1", "cache", into="r_word"),
      at("_lookup:find_row:load64_seq#1", "row", into="r_row"),
      at("_core:look_at_progress:load32_acquire#1", "progress", into="r_progress"))),
    lambda seen: seen["r_word"] != (2, "LIVE") or (seen["r_progress"] == 0 and seen["r_row"] == (2, "UNBOUND")))

PUBLISHED_AT_ONCE = Scenario(
    "a cache that is published as it is made has its bytes", {"cache": (1, "FREE"), "progress": 0, "bytes": 0},
    ((write("bytes", 1), at("_cache_records:fill_row:store32_release#1", "progress", 1)),
     (at("_core:look_at_progress:load32_acquire#1", "progress", into="r_progress"), read("bytes", "r_bytes"))),
    lambda seen: seen["r_progress"] == 0 or seen["r_bytes"] == 1)


# A kept segment gets another cache: who has found it finds its generation in the segment's header.
SEGMENT_AGAIN = Scenario(
    "a segment that is used again says so", {"cache": (1, "FREE"), "generation": 1},
    ((at("_mapping:write_segment_header:store64_release#1", "generation", 2),
      at("_cache_records:insert:exchange64_seq#1", "cache", (2, "LIVE"))),
     (at("_lookup:copy_cache:load64_seq#1", "cache", into="r_word"),
      at("_attached:copy_header:load64_acquire#1", "generation", into="r_generation"))),
    lambda seen: seen["r_word"] != (2, "LIVE") or seen["r_generation"] == 2)

# A slot of the members table that goes to another cluster while it is read.
MEMBER_AGAIN = tuple(Scenario(
    f"a member's record that changes hands, {reader}", {"incarnation": 1, "cluster": 1},
    ((at("_members:write:store64_release#1", "incarnation", 0), at("_members:write:fence_release#1"), write("cluster", 2),
      at("_members:write:store64_release#2", "incarnation", 2)),
     (at(f"{reader}:load64_acquire#1", "incarnation", into="r_incarnation"), read("cluster", "r_cluster"),
      at(f"{reader}:fence_acquire#1"),
      at(f"{reader}:load64_acquire#2", "incarnation", into="r_again", again="r_incarnation"))),
    lambda seen: seen["r_incarnation"] != seen["r_again"] or seen["r_incarnation"] in (0, seen["r_cluster"]))
    for reader in ("_members:read", "_peer_memory:copy_member"))

# What `ls` shows of a record is of one cache, too.
SHOWN = Scenario(
    "a record that is shown", {"cache": (1, "LIVE"), "record": 1},
    ((at("_inspect:copy_cache:load64_seq#1", "cache", into="l_word"), read("record", "l_record"),
      at("_inspect:copy_cache:fence_acquire#1"),
      at("_inspect:copy_cache:load64_seq#2", "cache", into="l_word_again", again="l_word")),
     (at("_cache_records:release:exchange64_seq#1", "cache", (1, "FREE")), at("_cache_records:release:fence_release#1"),
      write("record", 2), at("_cache_records:insert:exchange64_seq#1", "cache", (2, "LIVE")))),
    lambda seen: seen["l_word"] != seen["l_word_again"] or seen["l_word"] == (1, "FREE") or seen["l_record"] == seen["l_word"][0])


# -- the index grows -----------------------------------------------------------------------------------------------------

def _part(seen: Registers) -> int:
    return int(seen["r_index"] % 2)


def _entry(seen: Registers) -> int:
    return int(seen["r_entry_0"] if _part(seen) == 0 else seen["r_entry_1"])


PROBE = (
    at("_lookup:probe:load64_seq#1", "index_word", into="r_index"),
    at("_lookup:probe:load64_acquire#1", "entry_0", into="r_entry_0"),
    at("_lookup:probe:load64_acquire#1", "entry_1", into="r_entry_1"),
    at("_lookup:probe:load64_seq#2", "index_word", into="r_index_again", again="r_index"),
)
# Part 0 -> part 1 -> part 0 of the same size again, which is cleared first; the key lives all the time.
GROWS = (
    write("entry_1", 5),
    at("_index:make_room:exchange64_seq#1", "index_word", 3),
    at("_index:make_room:fence_release#1"),
    write("entry_0", 0),
    write("entry_0", 5),
    at("_index:make_room:exchange64_seq#1", "index_word", 4),
)
INDEX = Scenario(
    "a key that lives is found while the index grows", {"index_word": 2, "entry_0": 5, "entry_1": 0}, (PROBE, GROWS),
    lambda seen: seen["r_index"] != seen["r_index_again"] or _entry(seen) == 5)

# The pages of a replaced table go when nobody is in it: a system call, so everything before it stands. Whoever touched one
# afterwards would get a page of zeros, or a SIGBUS where memory is full.
PUNCHED = Scenario(
    "a table is not given back under a reader", {"index_word": 2, "entry_0": 5, "entry_1": 0, "word": 0},
    ((at("_futex:word_try:swap32_seq#1", "word", 1, expected=0, into="r_took"), *PROBE[:3]),
     (write("entry_1", 5), at("_index:make_room:exchange64_seq#1", "index_word", 3),
      at("_index:reader_inside:load32_seq#1", "word", into="o_word"),
      Access("", BOTH), write("entry_0", 0, lambda seen: seen["o_word"] == 0))),
    lambda seen: _entry(seen) == 5)

# A key that ended leaves the index after it has ended: who misses it may ask why.
TOMBSTONE = Scenario(
    "a key that is gone from the index has ended", {"row": (1, "LIVE"), "entry": 2, "ended": 0},
    ((at("_directory:end_key:swap64_seq#1", "row", (1, "REMOVED"), expected=(1, "LIVE")),
      at("_rings:note_ended:store64_release#1", "ended", 1), at("_index:remove:store64_release#1", "entry", 1)),
     (at("_lookup:probe:load64_acquire#1", "entry", into="r_entry"),
      at("_lookup:why_ended:load64_acquire#1", "ended", into="r_ended"))),
    lambda seen: seen["r_entry"] != 1 or seen["r_ended"] == 1)

SCENARIOS = (*HEADERS, *PAGES, *RINGS, COUNT_IN_TIME, CACHE_BY_ID, FILLED_ROW, FILLED_PROGRESS, PUBLISHED_AT_ONCE, SEGMENT_AGAIN,
             *MEMBER_AGAIN, SHOWN, INDEX, PUNCHED, TOMBSTONE)
