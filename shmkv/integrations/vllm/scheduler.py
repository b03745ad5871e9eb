"""The scheduler's side: which blocks of a prompt others have, and what each step loads and stores.

Keeps a note for each request from its first look-up until it is finished. Looks keys up by a callable, so it knows no cluster.

Layers of a model may be in several KV cache groups, each with block ids of its own. In a group whose layers look through a window
vLLM keeps only the blocks that the next token looks at: those before it have no place, or one that is somebody else's by now.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shmkv.integrations.vllm.block_keys import Prompt, block_hashes
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.plans import BlockPlace, Load, ScheduledRequest, StepPlan, Store

# What vLLM has in the place of a block that it does not keep.
NULL_BLOCK = 0
# A request whose load beside the batch failed is looked up again. One that fails time after time has to be computed in the end.
MOST_LOADS = 2
# Where there is a window the longest way is looked for from the end of a prompt, and vLLM asks at every step while a request waits
# for room: what was not there is not looked up again before so long, unless what the engine has itself changed.
LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class _Look:
    """What was found at a time: with so many tokens computed and so many to take at most there was no longer way than `reach`."""

    computed: int
    most: int
    reach: int
    at_s: float


@dataclass
class _Note:
    """`hashes`: of the whole blocks of the prompt; `block_ids`: a list a group; `computed`: tokens that vLLM had itself at the last
    look-up; `look`: the last one from the end; `loads`: how many were begun; `loaded`: indices of the blocks that came from others;
    `stored`: blocks that earlier steps have dealt with."""

    hashes: list[bytes]
    block_ids: list[list[int]]
    computed: int = 0
    look: _Look | None = None
    loads: int = 0
    loaded: range = range(0)
    stored: int = 0


class SchedulerSide:
    """`windows`: for each KV cache group how many tokens a token looks at, 0 = all. `is_found(block_hash, group)`: would all shards
    of the block be found now?; None for an engine that only produces. `most_blocks`: of a prompt that are stored, since of one that
    is longer than the room for it others can use the beginning; 0: store none."""

    def __init__(self, seed: bytes, block_size: int, windows: Sequence[int], is_found: Callable[[bytes, int], bool] | None, *,
                 most_blocks: int, is_async: bool, counters: Counters) -> None:
        self._seed = seed
        self._block_size = block_size
        self._windows = tuple(windows)
        self._whole = [group for group, window in enumerate(self._windows) if not window]
        self._is_found = is_found
        self._most_blocks = most_blocks
        self._is_async = is_async
        self._counters = counters
        self._notes: dict[str, _Note] = {}
        self._loads: list[Load] = []
        self._forget = False

    def __len__(self) -> int:
        return len(self._notes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._notes

    def match(self, request_id: str, prompt: Prompt | None, num_tokens: int, computed: int, *,
              reads: bool = True) -> tuple[int, bool]:
        """How many tokens beyond the first `computed` can be loaded, and whether beside the batch. `num_tokens`: of the request so
        far; one of them is left to compute. A prompt of None has no blocks that could be shared; it is looked at the first time.
        Without `reads` all of it has to be computed. May be repeated."""
        note = self._note(request_id, prompt)
        note.computed = computed
        # What is to be forgotten is still there until the next step begins.
        if self._is_found is None or self._forget or not reads or note.loads >= MOST_LOADS:
            return 0, False
        # vLLM itself computes the last token of a prompt that was loaded beside the batch, but may have let go of the block that
        # its window begins in.
        most = num_tokens if self._is_async and not any(self._windows) else num_tokens - 1
        tokens = max(0, min(self._reach_now(note, self._is_found, most) * self._block_size, most) - computed)
        return tokens, self._is_async and tokens > 0

    def _reach_now(self, note: _Note, is_found: Callable[[bytes, int], bool], most: int) -> int:
        """`_reach`, with a window no longer for a while than it was. All that it needs is looked up each time."""
        if not any(self._windows):
            return self._reach(note, is_found, most, len(note.hashes))
        now_s, look = time.monotonic(), note.look
        if look is None or (look.computed, look.most) != (note.computed, most) or now_s >= look.at_s + LOOK_AGAIN_S:
            look = _Look(note.computed, most, len(note.hashes), now_s)
        note.look = replace(look, reach=self._reach(note, is_found, most, look.reach))
        return note.look.reach

    def _reach(self, note: _Note, is_found: Callable[[bytes, int], bool], most: int, longest: int) -> int:
        """After how many blocks, `longest` at most, a request could go on: those that the engine has itself, and behind them all in
        groups that look at everything, those in the window of the next token in the others. `most`: tokens that are taken."""
        own = note.computed // self._block_size
        reach = own if self._whole else longest
        while reach < longest and all(is_found(note.hashes[reach], group) for group in self._whole):
            reach += 1
        while reach > own:
            missing = self._missing(note, is_found, own, reach, min(reach * self._block_size, most))
            if missing is None:
                break
            reach = missing         # any more, and this block is in the window still
        return max(reach, own)

    def _missing(self, note: _Note, is_found: Callable[[bytes, int], bool], own: int, reach: int, tokens: int) -> int | None:
        """A block that a window looks at after so many tokens, and that nobody has."""
        return next((block for group, window in enumerate(self._windows) if window
                     for block in range(reach - 1, max(own, self._first(group, tokens)) - 1, -1)
                     if not is_found(note.hashes[block], group)), None)

    def _first(self, group: int, tokens: int) -> int:
        """The first block of a group that the token behind so many looks at."""
        window = self._windows[group]
        return max(0, tokens - window + 1) // self._block_size if window else 0

    def _note(self, request_id: str, prompt: Prompt | None) -> _Note:
        note = self._notes.get(request_id)
        if note is None:
            note = _Note([] if prompt is None else block_hashes(self._seed, prompt, self._block_size), self._no_blocks())
            self._notes[request_id] = note
        return note

    def _no_blocks(self) -> list[list[int]]:
        return [[] for _ in self._windows]

    def allocated(self, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has room for `tokens` tokens of the last `match`; 0: it loads nothing."""
        note = self._notes.get(request_id)
        if note is None or tokens <= 0:
            return
        size = self._block_size
        note.loads += 1
        end = note.computed + tokens
        note.loaded = range(note.computed // size, -(-end // size))
        self._counters.add(hit_tokens=tokens)
        places = [BlockPlace(note.hashes[i], ids[i], group) for group, ids in enumerate(block_ids)
                  for i in note.loaded if i >= self._first(group, end)]
        self._loads.append(Load(request_id, tuple(places), self._is_async))

    def plan(self, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """What the worker has to do in a step that computes these requests."""
        loads, self._loads = tuple(self._loads), []
        stores = tuple(store for each in scheduled if (store := self._store(each)) is not None)
        forget, self._forget = self._forget, False
        return StepPlan(loads, stores if self._most_blocks else (), forget)

    def _store(self, request: ScheduledRequest) -> Store | None:
        note = self._notes.get(request.request_id)
        if note is None:
            return None
        if request.replaces:
            note.block_ids = self._no_blocks()
        for ids, more in zip(note.block_ids, request.block_ids, strict=False):      # there may be no new ones
            ids.extend(more)
        size = self._block_size
        first = request.computed // size
        if first >= len(note.hashes) and note.stored >= min(len(note.hashes), self._most_blocks):
            return None                     # the whole prompt is done with
        end = request.computed + request.scheduled
        full = min(end // size, len(note.hashes), self._most_blocks)
        # A load that failed takes a request back to blocks that were dealt with.
        begin = min(note.stored, first)
        note.stored = full
        places: list[BlockPlace] = []
        relied_on: list[int] = []
        computed: list[int] = []
        for group, ids in enumerate(note.block_ids):
            kept = self._first(group, request.computed)
            places += [BlockPlace(note.hashes[i], ids[i], group) for i in range(max(begin, kept), full)
                       if ids[i] != NULL_BLOCK and (i >= first or i not in note.loaded)]
            relied_on += ids[kept:first]
            computed += ids[first:-(-end // size)]
        return Store(request.request_id, tuple(places), tuple(relied_on), tuple(computed))

    def finished(self, request_id: str) -> None:
        """The request ended, or was given up before it began."""
        self._notes.pop(request_id, None)

    def forget(self) -> None:
        """Let the worker remove all that it has published, before its next step; nothing is found until then."""
        self._forget = True
