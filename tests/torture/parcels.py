"""What a prompt pushes: rows of its parcel lanes, to all decoders that invite or to some, and which results it may get.

Half of the transfers go to addresses, half to the cache that a key names. The second is a call of the other kind of manager, which
has no rows that are filled again; what runs below that call is the same here.
"""
from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmkv import CacheKeyByIdAndIndex, LayerSynchronizer, LLMStatusCode, TransferConfig
from shmkv.cache_task import CacheTask
from shmkv.push import KeyDestination
from torture import pattern, shelves
from torture.board import Board, Field
from torture.pattern import Stamp
from torture.worker import Call, Fault, cluster_of

if TYPE_CHECKING:
    from torture.prompt import Prompt

OK = LLMStatusCode.LLM_SUCCESS
# Results that a decoder which is gone, or has taken its invitation back, is a reason for.
WITHDRAWN = {LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
             LLMStatusCode.LLM_KV_CACHE_NOT_EXIST}


@dataclass(frozen=True)
class Invitation:
    """An address of a decoder's landing, as it was found."""

    board: Board
    worker: int
    place: tuple[int, int, int]
    count: int
    address: int
    step: int
    landing: int                # the cache's id and, in the last 8 bits, the row

    @property
    def stands(self) -> bool:
        """Not withdrawn, and its decoder neither killed nor leaving."""
        board = self.board
        return (board.addresses[self.place] == self.address and board.invited[self.place] == self.count
                and not board.is_over(self.worker, self.count >> pattern.COUNT_BITS))

    def config(self, row: int, tensors: int) -> TransferConfig:
        return TransferConfig(cluster_of(self.worker), [self.address + tensor * self.step for tensor in range(tensors)], None, row)

    def by_key(self, row: int, tensors: int) -> KeyDestination:
        key = CacheKeyByIdAndIndex(cluster_of(self.worker), self.landing >> 8, self.landing & 0xFF)
        return KeyDestination(key, range(tensors // shelves.LAYER), 0, row)


@dataclass
class Begun:
    """A transfer that runs."""

    task: CacheTask
    invitations: list[Invitation]
    by_key: bool


class Layers(LayerSynchronizer):
    """Ready at once or a little later; not any more when an invitation is gone, for another's memory may have its address then."""

    def __init__(self, invitations: list[Invitation], dice: random.Random) -> None:
        self._invitations = invitations
        self._dice = dice

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        if self._dice.random() < 0.2:
            time.sleep(self._dice.uniform(0, 0.001))
        return all(each.stands for each in self._invitations)


class Parcels:
    """One prompt's, of one life."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._board = prompt.board
        for hints in (self._board.begun, self._board.ended):
            hints[prompt.number] = 0

    def step(self) -> None:
        """Some transfers at the same time, from caches that are sometimes freed under them."""
        dice = self._prompt.random
        kinds = shelves.some_parcels(dice)
        begun = [each for kind in kinds if (each := self._start(kind)) is not None]
        if begun and dice.random() < 0.3:
            self._prompt.renew(shelves.PARCEL_LANES[dice.choice(kinds)])
        for each in begun:
            with self._prompt.calls(Call.PUSH):
                results = each.task.get_results()
            self._end(each, results)

    def _start(self, kind: int) -> Begun | None:
        prompt, dice = self._prompt, self._prompt.random
        lane, shape = shelves.PARCEL_LANES[kind], shelves.PARCELS[kind]
        if lane not in prompt.in_lanes or dice.random() < 0.2:
            prompt.renew(lane)
        cache = prompt.in_lanes.get(lane)
        found = [each for decoder in range(prompt.plan.decoders) if (each := self._invitation(decoder, kind)) is not None]
        if cache is None or not found:
            return None
        row = dice.randrange(shape.rows)
        stamp = Stamp(cluster_of(prompt.number), shelves.slot_of_parcel(kind), row, pattern.generation(prompt.life, cache.cache_id))
        begun = self._begin(dice.sample(found, dice.randint(1, len(found))), pattern.pack(stamp))
        if not begun:
            return None
        layers, by_key = Layers(begun, random.Random(dice.random())), dice.random() < 0.5
        with prompt.calls(Call.PUSH):
            if by_key:
                keys = [each.by_key(row, shape.tensors) for each in begun]
                task = CacheTask(prompt.manager._pushes.start(prompt.manager._usable(cache), layers, keys, None))
            else:
                configs = [each.config(row, shape.tensors) for each in begun]
                task = prompt.manager.transfer_cache_async(cache, layers, configs)
        return Begun(task, begun, by_key)

    def _invitation(self, decoder: int, kind: int) -> Invitation | None:
        """One for this life, to be had over the link that is there."""
        board, place = self._board, (self._prompt.number, decoder, kind)
        found = Invitation(board, self._prompt.plan.prompts + decoder, place, int(board.invited[place]),
                           int(board.addresses[place]), int(board.steps[place]), int(board.landings[place]))
        is_linked = (board.lives_then[place] == self._prompt.life
                     and board.unlinks_then[place] == board.unlinks[self._prompt.number, decoder])
        is_new = board.begun[place] != found.count          # each is answered once
        return found if found.address and is_new and is_linked and found.stands else None

    def _begin(self, invitations: list[Invitation], word: int) -> list[Invitation]:
        """Said first, looked at then: who withdraws an invitation does it the other way round."""
        for each in invitations:
            self._board.stamps[each.place] = word
            self._board.begun[each.place] = each.count
        for each in invitations:
            if not each.stands:
                self._board.ended[each.place] = -each.count
        return [each for each in invitations if self._board.ended[each.place] != -each.count]

    def _end(self, begun: Begun, results: list[LLMStatusCode | None]) -> None:
        """The first failure ends a transfer, so whoever comes behind it has None."""
        invitations = begun.invitations
        is_one_gone = not all(each.stands for each in invitations)
        for each, result in zip(invitations, results, strict=True):
            self._board.ended[each.place] = each.count if result == OK else -each.count
            self._prompt.count(Field.UNDONE if result != OK else Field.PUSHED_BY_KEY, result != OK or begun.by_key)
            if result not in (OK, None) and not (is_one_gone and result in WITHDRAWN):
                raise Fault(f"a push to decoder {each.place[1]}, which has invited it, ended with {result!r}")
        if not is_one_gone and any(result is None for result in results) and all(result in (OK, None) for result in results):
            raise Fault(f"a transfer ended early and without a reason: {results}")
