"""Where prompts push to: caches of a decoder, one for each prompt and parcel lane ("kind"), and what may stand in them.

A landing is a cache of canaries, of which one row is *invited*: its address and its key stand on the board under a count. A prompt
that pushes says so on the board with the count, looks whether the invitation still stands, and says in the end whether the push was
done. So a row is whole when a push was done, has nothing but canaries and words of one stamp when it was not, and rows beside it
never change.

An address is a number, and the next cache can have it. So memory of a landing is used for nothing else (no other shape of a decoder
fits it), and not again before the push that was begun has ended, or its prompt's next life is there. The exception is the sharpest
look: a link that is removed by force in the middle of a push. Who is in the old memory may go on there, so the next landing has to
be other memory, and nobody may write to it as long as there is no link.
"""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmkv import CacheDesc, DataType, KvCache
from torture import pattern, shelves
from torture.board import Field
from torture.pattern import CANARY, Stamp, Words
from torture.worker import Call, Fault, cluster_of

if TYPE_CHECKING:
    from torture.decoder import Decoder, Peer

CUT_LOOK_S = 0.005                      # how long nobody may write to what was allocated after a link was cut


@dataclass
class Landing:
    """`count`: of its last invitation, 0 before the first; `life`: of the prompt that was invited."""

    cache: KvCache
    words: Words
    canary: int
    row: int = 0
    count: int = 0
    life: int = 0
    unlinks: int = 0


class Landings:
    """One decoder's, of one life."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._board = decoder.board
        self._mine = (slice(None), decoder.decoder)
        self._held: dict[tuple[int, int], Landing] = {}
        self._pending: dict[tuple[int, int], tuple[int, int]] = {}      # withdrawn while a push may run: its count and life
        self._counted = 0
        for hints in (self._board.addresses, self._board.invited):
            hints[self._mine] = 0

    # -- what a step does -------------------------------------------------------------------------------------------

    def step(self, peer: Peer) -> None:
        for kind in shelves.some_parcels(self._decoder.random):
            if peer.life:
                self._look(peer, kind)

    def _look(self, peer: Peer, kind: int) -> None:
        landing = self._held.get((peer.number, kind))
        if landing is None:
            self._open(peer, kind)
        elif self._is_over(peer.number, kind, landing.count, landing.life):
            self._take(peer, kind, landing)
        elif self._board.begun[self._place(peer.number, kind)] == landing.count:
            self._meet(peer, kind, landing)
        else:
            self._wait(peer, kind, landing)

    def uninvite(self, number: int) -> None:
        """Before a link goes: no push that begins now finds an address."""
        self._board.addresses[number, self._decoder.decoder] = 0

    def forget(self) -> None:
        self._held.clear()
        self._pending.clear()

    def _open(self, peer: Peer, kind: int) -> None:
        if self._is_quiet(kind):
            landing = self._held[peer.number, kind] = self._make(kind)
            self._invite(peer, kind, landing)

    def _take(self, peer: Peer, kind: int, landing: Landing) -> None:
        """The push has ended: is everything as it has to be? Then the next one."""
        self._check(peer.number, kind, landing)
        if self._decoder.random.random() < 0.3:
            self._withdraw(peer.number, kind)
            return
        pattern.fill(landing.words[:, landing.row], landing.canary)
        self._invite(peer, kind, landing)

    def _meet(self, peer: Peer, kind: int, landing: Landing) -> None:
        """A push is under way: let it be, take the memory from under it, or cut the link, too."""
        chance = self._decoder.random.random()
        if chance < 0.1 and self._is_quiet(kind):
            self._cut(peer, kind)
        elif chance < 0.3:
            self._withdraw(peer.number, kind)

    def _wait(self, peer: Peer, kind: int, landing: Landing) -> None:
        """Nobody pushes yet: nothing may be there. An invitation over a link that is gone is made anew."""
        place = self._place(peer.number, kind)
        if landing.unlinks == peer.unlinks and landing.life == peer.life and self._board.addresses[place]:
            whole = all(pattern.read(landing.words[:, row]) == landing.canary for row in range(landing.words.shape[1]))
            is_begun = self._board.begun[place] == landing.count or self._is_over(peer.number, kind, landing.count, landing.life)
            if not whole and not is_begun and not self._board.is_over(peer.number, landing.life):
                raise Fault(f"wrong bytes: nobody pushed to {self._said(peer.number, kind, landing)}:\n{self._shown(landing)}")
        elif self._board.is_over(peer.number, landing.life):
            self._withdraw(peer.number, kind)           # it may have begun, and died
        else:
            self._board.addresses[place] = 0
            if self._board.begun[place] != landing.count:       # else it is met, or taken, at the next step
                self._invite(peer, kind, landing)

    # -- invitations ------------------------------------------------------------------------------------------------

    def _place(self, number: int, kind: int) -> tuple[int, int, int]:
        return number, self._decoder.decoder, kind

    def _make(self, kind: int) -> Landing:
        shape = shelves.PARCELS[kind]
        with self._decoder.calls(Call.ALLOCATE):
            cache = self._decoder.manager.allocate_cache(CacheDesc(shape.tensors, [shape.rows, shape.words], DataType.DT_UINT64))
        self._counted += 1
        landing = Landing(cache, pattern.array_of(cache, shape), pattern.pack(Stamp(CANARY, 1, kind, self._counted)))
        for row in range(shape.rows):
            pattern.fill(landing.words[:, row], landing.canary)
        return landing

    def _invite(self, peer: Peer, kind: int, landing: Landing) -> None:
        """The address last: who finds it finds the rest."""
        self._counted += 1
        landing.count = pattern.generation(self._decoder.life, self._counted)
        landing.row = self._decoder.random.randrange(landing.words.shape[1])
        landing.life, landing.unlinks = peer.life, peer.unlinks
        place, base = self._place(peer.number, kind), landing.words.ctypes.data
        self._board.steps[place] = landing.words.strides[0]
        self._board.landings[place] = landing.cache.cache_id << 8 | landing.row
        self._board.invited[place] = landing.count
        self._board.unlinks_then[place] = peer.unlinks
        self._board.lives_then[place] = peer.life
        self._board.addresses[place] = base + landing.row * landing.words.strides[1]

    def _withdraw(self, number: int, kind: int) -> None:
        place = self._place(number, kind)
        self._board.addresses[place] = 0
        landing = self._held.pop((number, kind))
        self._pending[number, kind] = landing.count, landing.life
        with self._decoder.calls(Call.FREE):
            self._decoder.manager.deallocate_cache(landing.cache)

    def _cut(self, peer: Peer, kind: int) -> None:
        """Remove the link by force, free the landing, take memory like it: who pushes may be in the old one and not in this."""
        self._decoder.remove_link(peer, force=True)
        self._withdraw(peer.number, kind)
        landing = self._make(kind)
        until = time.monotonic() + CUT_LOOK_S
        while True:
            if any(pattern.read(landing.words[:, row]) != landing.canary for row in range(landing.words.shape[1])):
                raise Fault(f"wrong bytes: memory was used again under a push of prompt {peer.number}:\n{self._shown(landing)}")
            self._decoder.count(Field.CUTS_SEEN)
            if time.monotonic() > until or self._is_quiet(kind):
                break
        with self._decoder.calls(Call.FREE):
            self._decoder.manager.deallocate_cache(landing.cache)

    # -- what has ended ---------------------------------------------------------------------------------------------

    def _is_over(self, number: int, kind: int, count: int, life: int) -> bool:
        """Has the push of this invitation ended, or did its prompt's next life begin? Not as long as nobody has begun."""
        ended = abs(int(self._board.ended[self._place(number, kind)])) == count
        return ended or int(self._board.fields[number, Field.READY]) > life

    def _is_quiet(self, kind: int) -> bool:
        """Does no push run any more to an address that was withdrawn?"""
        for (number, other), (count, life) in list(self._pending.items()):
            if shelves.PARCELS[other] != shelves.PARCELS[kind]:
                continue
            begun = self._board.begun[self._place(number, other)] == count
            if begun and not self._is_over(number, other, count, life):
                return False
            del self._pending[number, other]
        return True

    def _check(self, number: int, kind: int, landing: Landing) -> None:
        place = self._place(number, kind)
        stamp = int(self._board.stamps[place])
        done = int(self._board.ended[place]) == landing.count
        found = pattern.read(landing.words[:, landing.row])
        whose = pattern.unpack(stamp)
        if done and (found != stamp or whose.cluster != cluster_of(number) or whose.slot != shelves.slot_of_parcel(kind)):
            raise Fault(f"wrong bytes: after a push of {whose} to {self._said(number, kind, landing)}:\n{self._shown(landing)}")
        if not done and not pattern.has_only(landing.words[:, landing.row], (landing.canary, stamp)):
            raise Fault(f"wrong bytes of an unfinished push to {self._said(number, kind, landing)}:\n{self._shown(landing)}")
        beside = [row for row in range(landing.words.shape[1]) if row != landing.row]
        if any(pattern.read(landing.words[:, row]) != landing.canary for row in beside):
            raise Fault(f"wrong bytes beside {self._said(number, kind, landing)}:\n{self._shown(landing)}")
        self._decoder.count(Field.PUSHES if done else Field.PARTS)
        if done:
            self._decoder.count(Field.PUSHED_NBYTES, shelves.PARCELS[kind].row_nbytes)

    @staticmethod
    def _said(number: int, kind: int, landing: Landing) -> str:
        return f"row {landing.row} of kind {kind}, invited under {landing.count:#x} for life {landing.life} of prompt {number}"

    @staticmethod
    def _shown(landing: Landing) -> str:
        return "\n".join(f"row {row}:\n{pattern.describe(landing.words[:, row])}" for row in range(landing.words.shape[1]))
