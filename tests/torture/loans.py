"""Views and forks that a decoder keeps for a while: as long as one is held, nobody writes other bytes there.

Of caches in lanes alone, whose rows are never filled again: what a view showed at first it shows at last, whatever was deallocated,
unlinked, killed or restarted meanwhile.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shmkv import CacheView, KvCache, LLMException
from torture import pattern, shelves
from torture.board import Field
from torture.pattern import Stamp
from torture.pulls import Wish
from torture.shelves import Shape
from torture.worker import Call, Fault

if TYPE_CHECKING:
    from torture.decoder import Decoder, Peer

HELD = 12                               # a decoder, at most
LANES = (*shelves.TINY_LANES, *shelves.MIDDLE_LANES)
BRANCH = 254                            # cluster of bytes that a decoder wrote into its fork


@dataclass
class Held:
    """One that is open. `words`: the stamp's word of each half of its tensors, of which a fork's first may be its own."""

    what: CacheView | KvCache
    shape: Shape
    words: list[int]
    wish: str


class Loans:
    """One decoder's, of one life."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._held: list[Held] = []
        self._branches = 0

    def step(self, peer: Peer) -> None:
        """Open one, look at all that are open, or close one."""
        random = self._decoder.random
        if len(self._held) >= HELD or (self._held and random.random() < 0.4):
            self._close(random.randrange(len(self._held)))
        else:
            self._open(peer)
        for held in random.sample(self._held, min(3, len(self._held))):
            self.look(held)

    def look(self, held: Held) -> None:
        """Are the bytes what they were?"""
        half = held.shape.tensors // 2
        words = np.stack([tensor.numpy().reshape(-1) for tensor in held.what.tensors])
        for part, wanted in enumerate(held.words):
            # A part's tensors are numbered from the first one of all.
            found = pattern.read(words) if held.words[0] == held.words[1] else pattern.read(
                words[part * half:(part + 1) * half], part * half)
            if found != wanted:
                raise Fault(f"wrong bytes through {type(held.what).__name__} of {held.wish}: {pattern.unpack(wanted)} was there, "
                            f"then\n{pattern.describe(words)}")
        self._decoder.count(Field.LOOKS)

    def forget(self) -> None:
        """All views and forks go, closed or not."""
        self._held.clear()

    def _open(self, peer: Peer) -> None:
        decoder, random = self._decoder, self._decoder.random
        lane = random.choice(LANES)
        cache_id = int(decoder.board.lanes[peer.number, lane])
        if not cache_id:
            return
        shape = shelves.LANE_SHAPES[lane]
        row = random.randrange(shape.rows)
        wish = decoder.wish_by_id(peer, lane, cache_id, row, decoder.destination(Shape(shape.tensors, 1, shape.words)))
        wish.to.make_known(0, 0)
        began = decoder.clock.now()
        try:
            with decoder.calls(Call.LEND):
                manager = decoder.manager
                made = manager.view_cache(wish.key) if random.random() < 0.7 else manager.fork_cache(wish.key)
        except LLMException as error:
            ended = decoder.clock.now()
            decoder.judge.failure(wish, error)
            decoder.failed(peer, error, began, ended)
            return
        held = Held(made, shape, [wish.only_word] * 2, str(wish))
        self.look(held)
        if isinstance(made, KvCache):
            self._branch(held, wish)
        self._held.append(held)

    def _branch(self, held: Held, wish: Wish) -> None:
        """Write the first half of a fork's tensors: its own from then on."""
        self._branches += 1
        half = held.shape.tensors // 2
        held.words[0] = pattern.pack(Stamp(BRANCH, 0, wish.row, self._branches))
        for number in range(half):
            array = held.what.tensors[number].numpy().reshape(1, -1)
            pattern.fill(array, held.words[0], number)

    def _close(self, place: int) -> None:
        held = self._held.pop(place)
        self.look(held)
        with self._decoder.calls(Call.LEND):
            if isinstance(held.what, CacheView):
                held.what.close()
            else:
                self._decoder.manager.deallocate_cache(held.what)
