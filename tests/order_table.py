"""Which order each access needs, as far as the scenarios tell, and why an access is in none of them.

`test_orders.py` holds this against the sources and the scenarios: a call that is neither in a scenario nor in EXEMPT, an order
that no scenario needs and that is not in STRONGER, and a line that is no longer true are failures. An order that is stronger
than needed could be weakened in the code; on x86 that would change nothing for a swap, and little for a store.
"""
from __future__ import annotations

from collections.abc import Sequence

from orders_links import SCENARIOS as LINKS
from orders_pushes import SCENARIOS as PUSHES
from orders_rows import SCENARIOS as ROWS
from orders_tables import SCENARIOS as TABLES
from orders_waits import SCENARIOS as WAITS
from weak_memory import Scenario

SCENARIOS: Sequence[Scenario] = (*ROWS, *LINKS, *PUSHES, *TABLES, *WAITS)


def _all(reason: str, *sites: str) -> dict[str, str]:
    return dict.fromkeys(sites, reason)


#: No scenario: the order means nothing, or the access is not shared.
EXEMPT: dict[str, str] = {
    **_all("relaxed already: a number of this side for statistics, or of this process",
           "_core:enter_counted:add64_relaxed#1", "_core:finish:add32_relaxed#1", "_copy:move_part:add64_relaxed#1",
           "_directory:note_use:add32_relaxed#1", "_local:__cinit__:add64_relaxed#1", "_members:count_join:add32_relaxed#1"),
    **_all("a directory that nobody can read yet: its header is published last",
           "_directory:__init__:store32_release#1", "_index:__init__:exchange64_seq#1"),
    **_all("relaxed already: the dead puller's marks were there before its life byte was free, and the linker looked at that first",
           "_link_record:claim:add64_relaxed#1", "_directory:reaped_count:load64_acquire#1"),
    **_all("what is loaded is only compared by the swap that follows, on the same word",
           "_futex:word_try:load32_acquire#1", "_futex:word_wait_slice:load32_acquire#1", "_futex:word_give_up:load32_acquire#1",
           "_futex:word_release:load32_acquire#1", "_link_record:claim:load64_seq#1", "_link_record:abandon:load64_seq#1"),
    **_all("changes nothing but the word itself, which the kernel compares before it lets anybody sleep",
           "_futex:word_wait_slice:swap32_seq#1", "_futex:word_give_up:swap32_seq#1", "_futex:word_give_up:swap32_seq#2"),
    **_all("a status that is answered, with nothing read behind it: late is as good as not yet",
           "_directory:close:store32_release#1", "_link:look_at_memory:load32_acquire#1", "_link:look_at_memory:load64_acquire#1",
           "_link_record:side_lives:load64_acquire#1", "_members:directory_is_open:load32_acquire#1",
           "_pull:check:load32_acquire#1",
           "_link:link_enter:load32_acquire#1", "_link_handle:is_closing:load32_acquire#1",
           "_link_handle:mark_closing:store32_release#1", "_acceptor:end:store32_release#1", "_acceptor:end:store32_release#2"),
    **_all("a call that was refused: it has touched nothing", "_link:link_enter:add32_seq#2"),
    **_all("under the cold lock, whose system calls order more",
           "_members:clear:store64_release#1",
           "_link_record:abandon:store32_release#1", "_link_record:dead_initiators:load32_acquire#1",
           "_link_record:dead_initiators:load64_seq#1", "_link_handle:__cinit__:load64_seq#1",
           "_link_handle:__cinit__:load64_acquire#1"),
    **_all("the owner reads what it alone writes, or where only its own lock matters", "_cache_records:insert:load32_acquire#1",
           "_directory:row_generation:load64_seq#1", "_directory:row_words:load64_seq#1",
           "_directory:are_same_rows:load64_seq#1", "_directory:still_counts:load64_seq#1", "_lookup:is_published:load32_acquire#1",
           "_directory:row_key:load64_seq#1", "_directory:progress:load32_acquire#1",
           "_local:count_in:add32_seq#1"),
    **_all("a count of this process; who has one more holds one already, and the last one unmaps and loads nothing",
           "_attached:mapped_hold:add32_seq#1", "_attached:mapped_give:add32_seq#1"),
    **_all("asked again before anything hangs on it: by `copy_cache` for each slot", "_addresses:find_place:load32_acquire#1"),
    **_all("an older count means that serials are dropped again which are not mapped", "_acceptor:attach:load64_acquire#1"),
    **_all("counted with the GIL or the view's own lock held; read by the owner's thread that made it",
           "_mapping:exports:load32_acquire#1", "_view:__cinit__:add32_seq#1", "_view:__dealloc__:add32_seq#1"),
    **_all("looked at again before it is used (`body:load32_acquire#3`)",
           "_crew:body:load32_acquire#1", "_crew:body:load32_acquire#2"),
    **_all("late is as good: a count that is too high for a moment costs a wake",
           "_wait:sleeper_leave:exchange64_seq#1", "_wait:sleeper_leave:add32_seq#1"),
    **_all("stored by the thread that loads it, or 0 by one that takes back a wait for which others sleep: late costs them a look",
           "_wait_any:gather:load64_seq#1", "_wait:sleeper_seen:load64_seq#1"),
    **_all("a wait for a key reads nothing of the row", "_await:look_at_blocks:load64_seq#1"),
    **_all("shown to a person or a test: each number for itself", "_wait:is_cancelled:load32_seq#1",
           "_futex:value:load32_acquire#1", "_link_handle:word:load32_acquire#1",
           "_inspect:state:load32_acquire#1", "_inspect:copy_cache:load64_seq#3", "_inspect:count_rows:load64_seq#1",
           "_inspect:count_rows:load32_acquire#1", "_inspect:row_nbytes:load32_acquire#1",
           "_link_record:read:load64_seq#1", "_link_record:read:load32_acquire#1",
           "_link_record:busy:load64_seq#1", "_link_record:read:load64_seq#2", "_link_record:read:load64_acquire#1",
           "_link_record:read:load32_acquire#2"),
}

def _need(order: str, reason: str, *sites: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(sites, (order, reason))


#: Site -> (what the scenarios need, why no more).
STRONGER: dict[str, tuple[str, str]] = {
    **_need("release", "hands on what was done before; nothing is loaded after it that another store of it decides",
            "_local:local_leave:add32_seq#1", "_crew:body:add32_seq#2", "_crew:crew_run:add32_seq#1",
            "_cache_records:insert:exchange64_seq#1",
            "_directory:bind:exchange64_seq#2", "_directory:unbind:exchange64_seq#1", "_futex:word_release:swap32_seq#1",
            "_futex:word_release:swap32_seq#2", "_link:link_leave:add32_seq#1", "_link:shut_side:add32_seq#1",
            "_coverage:consume:add32_seq#1"),
    **_need("acquire", "what is read after it must be as new; it answers no store of this side",
            "_crew:crew_run:add32_seq#2", "_directory:mark_pulled:load64_seq#1", "_inspect:copy_cache:load64_seq#1",
            "_link_record:find:load64_seq#1", "_link_record:living:load64_seq#1", "_lookup:copy_cache:load64_seq#1",
            "_lookup:compare_row:load64_seq#1",
            "_lookup:compare_row:load64_seq#2", "_lookup:find_row:load64_seq#1", "_lookup:look_at_rows:load64_seq#1"),
    **_need("acquire", "both sides swap the count, so one of them sees the other's swap and what came before it",
            "_local:local_enter:add32_seq#1"),
    **_need("acq_rel", "both sides swap the count, so one of them sees the other's swap and what came before it",
            "_local:uses:add32_seq#1"),
    **_need("relaxed", "the swap of the count beside it orders both sides",
            "_local:local_enter:load32_seq#1", "_local:close:swap32_seq#1",
            "_crew:body:add32_seq#1", "_crew:crew_run:exchange32_seq#1"),
    **_need("relaxed", "the load and the swap of the same word stand together: either would do", "_crew:body:load32_acquire#4",
            "_crew:body:swap32_seq#1", "_directory:end_key:load64_seq#1", "_directory:end_key:swap64_seq#1",
            "_directory:end_key:load64_seq#2", "_directory:settle:load64_seq#1",
            "_directory:settle:swap64_seq#1", "_directory:settle:load64_seq#2", "_coverage:cover:load64_seq#1"),
    **_need("relaxed", "only stores follow that stand under its answer, and a store waits for its condition",
            "_crew:crew_run:swap32_seq#1", "_link_record:start:load64_seq#1", "_link_handle:close_side:load64_seq#1"),
    **_need("relaxed", "the event word is loaded before it, seq_cst", "_await:look_at_row:load64_seq#1",
            "_await:look_at_row:load64_seq#2", "_link:is_cancelled:load32_seq#1", "_wait:asked_of:swap32_seq#1"),
    **_need("relaxed", "a fence stands in front of it", "_await:look_at_ring:load64_acquire#2"),
    **_need("relaxed", "only its number counts: what there is to see was stored before the waiters were looked for",
            "_events:event_happens:add32_seq#1"),
    **_need("relaxed", "the event word has changed already, whoever is counted in", "_events:keys_changed:load32_seq#1"),
    **_need("release", "the kernel compares the word before it lets anybody sleep", "_events:keys_changed:add32_seq#1"),
    **_need("acquire", "the one before gave it back by a release", "_flow:run:exchange32_seq#1", "_flow:close:exchange32_seq#1"),
    **_need("acquire", "the store that its load allows is seen in any case, by the swap of the same word on the other side",
            "_wait:ask_for_turn:swap32_seq#1"),
    **_need("relaxed", "the end of the hazard, a release, comes after it", "_lease:lease_take:store64_release#1"),
    **_need("relaxed", "a later release in the same function comes before anybody looks", "_crew:crew_run:store64_release#1",
            "_cache_records:fill_row:exchange64_seq#1", "_directory:bind:store64_release#1", "_directory:unbind:exchange32_seq#1",
            "_link_handle:close_side:store64_release#1", "_link_record:close_dead_side:store64_release#1",
            "_link_record:start:store64_release#1", "_mapping:write_segment_header:store64_release#1"),
    **_need("relaxed", "a fence beside it does it: before what it stores, or after what it loads",
            "_cache_records:release:exchange64_seq#1",
            "_directory:bind:exchange64_seq#1", "_directory:bind:exchange32_seq#1", "_inspect:copy_cache:load64_seq#2",
            "_lookup:copy_cache:load64_seq#2", "_lookup:recheck:load64_seq#1", "_lookup:recheck_rows:load64_seq#1",
            "_link_record:find:load64_seq#2", "_link_record:living:load64_seq#2", "_members:read:load64_acquire#2",
            "_members:write:store64_release#1", "_peer_memory:copy_member:load64_acquire#2"),
    **_need("relaxed", "an acquire load stands in front of it: of `open`, of the cache word, of the entries",
            "_link_record:is_idle:load64_seq#1", "_link_record:is_idle:load64_seq#2", "_attached:copy_header:load64_acquire#1",
            "_lookup:probe:load64_seq#2"),
    **_need("relaxed", "a key that is bound anew meanwhile is found by `recheck` as well, which then answers a miss",
            "_lookup:pin:load64_seq#2"),
}

#: Second looks that no scenario misses, and what they are for.
AGAIN_FOR_ANOTHER_REASON: dict[str, str] = {
    "_lookup:pin:load64_seq#2":
        "saves the copy and the miss of a row that was bound anew before the hazard was set; `recheck` finds it too",
}
