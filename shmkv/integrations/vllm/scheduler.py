"""The scheduler's side: which blocks of a prompt others have, and what each step loads and stores.

Keeps a note for each request from its first look-up until it is finished. Looks keys up by a callable, so it knows no cluster.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shmkv.integrations.vllm.block_keys import Prompt, block_hashes
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.plans import BlockPlace, Load, ScheduledRequest, StepPlan, Store

# A request whose load beside the batch failed is looked up again. One that fails time after time has to be computed in the end.
MOST_LOADS = 2


@dataclass
class _Note:
    """`hashes`: of the whole blocks of the prompt; `computed`: tokens that vLLM had itself at the last look-up; `loads`: how many
    were begun; `loaded`: indices of the blocks that came from others; `stored`: blocks that earlier steps have dealt with."""

    hashes: list[bytes]
    computed: int = 0
    loads: int = 0
    loaded: range = range(0)
    stored: int = 0
    block_ids: list[int] = field(default_factory=list)


class SchedulerSide:
    """`is_found(block_hash)`: would all shards of the block be found now?; None for an engine that only produces. `most_blocks`: of
    a prompt that are stored, since of one that is longer than the room for it others can use the beginning; 0: store none."""

    def __init__(self, seed: bytes, block_size: int, is_found: Callable[[bytes], bool] | None, *, most_blocks: int, is_async: bool,
                 counters: Counters) -> None:
        self._seed = seed
        self._block_size = block_size
        self._is_found = is_found
        self._most_blocks = most_blocks
        self._is_async = is_async
        self._counters = counters
        self._notes: dict[str, _Note] = {}
        self._loads: list[Load] = []
        self._forget = False

    def __len__(self) -> int:
        return len(self._notes)

    def match(self, request_id: str, prompt: Prompt | None, num_tokens: int, computed: int) -> tuple[int, bool]:
        """How many tokens beyond the first `computed` can be loaded, and whether beside the batch. `num_tokens`: of the request so
        far; one of them is left to compute. A prompt of None has no blocks that could be shared. May be repeated."""
        note = self._note(request_id, prompt)
        note.computed = computed
        if self._is_found is None or note.loads >= MOST_LOADS:
            return 0, False
        found = computed // self._block_size
        while found < len(note.hashes) and self._is_found(note.hashes[found]):
            found += 1
        # vLLM itself computes the last token of a prompt that was loaded beside the batch.
        most = num_tokens if self._is_async else num_tokens - 1
        tokens = max(0, min(found * self._block_size, most) - computed)
        return tokens, self._is_async and tokens > 0

    def _note(self, request_id: str, prompt: Prompt | None) -> _Note:
        note = self._notes.get(request_id)
        if note is None:
            note = _Note([] if prompt is None else block_hashes(self._seed, prompt, self._block_size))
            self._notes[request_id] = note
        return note

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM has room for `tokens` tokens of the last `match`; 0: it loads nothing."""
        note = self._notes.get(request_id)
        if note is None or tokens <= 0:
            return
        size = self._block_size
        note.loads += 1
        note.loaded = range(note.computed // size, -(-(note.computed + tokens) // size))
        self._counters.add(hit_tokens=tokens)
        self._loads.append(Load(request_id, tuple(BlockPlace(note.hashes[i], block_ids[i]) for i in note.loaded), self._is_async))

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
            note.block_ids = []
        note.block_ids.extend(request.block_ids)
        size = self._block_size
        first = request.computed // size
        if first >= len(note.hashes):
            return None                     # the whole prompt is done with
        end = request.computed + request.scheduled
        full = min(end // size, len(note.hashes), self._most_blocks)
        # A load that failed takes a request back to blocks that were dealt with.
        begin = min(note.stored, first)
        note.stored = full
        places = [BlockPlace(note.hashes[i], note.block_ids[i]) for i in range(begin, full) if i >= first or i not in note.loaded]
        return Store(request.request_id, tuple(places), tuple(note.block_ids[:first]), tuple(note.block_ids[first:-(-end // size)]))

    def finished(self, request_id: str) -> None:
        """The request ended, or was given up before it began."""
        self._notes.pop(request_id, None)

    def forget(self) -> None:
        """Let the worker remove all that it has published, before its next step."""
        self._forget = True
