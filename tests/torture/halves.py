"""Rows that one decoder pulls in two halves of their layers. A key is consumed once both halves of one generation were pulled, and
not before: marks of an earlier generation do not count for a later one."""
from __future__ import annotations

from typing import TYPE_CHECKING

from shmkv import LLMException
from torture import shelves
from torture.prompt import key_of_slot
from torture.pulls import CONSUMED, Wish
from torture.shelves import HALVES_A_DECODER, Shape
from torture.worker import Fault

if TYPE_CHECKING:
    from torture.decoder import Decoder, Peer


class Halves:
    """This decoder's own rows of all prompts."""

    def __init__(self, decoder: Decoder) -> None:
        plan, board = decoder.plan, decoder.board
        self.decoder = decoder
        self.slots = shelves.halves_slots(decoder.decoder)
        self.shape = Shape(4, HALVES_A_DECODER * plan.prompts, 16)
        # An earlier life of ours may have pulled, and marked, any generation that was begun before this one started.
        self.unsure = [[int(board.filling[prompt, slot]) for slot in self.slots] for prompt in range(plan.prompts)]
        self.came = [[[0, 0] for _ in self.slots] for _ in range(plan.prompts)]

    def pull(self, peer: Peer) -> None:
        """One half of some rows, then the other half."""
        rows = self.decoder.random.sample(range(HALVES_A_DECODER), self.decoder.random.randint(1, HALVES_A_DECODER))
        wishes = [wish for row in rows if (wish := self.wish(peer, row)) is not None]
        self.carry_out(peer, wishes)
        if peer.life:
            others = [wish for wish in (self.wish(peer, wish.to_row % HALVES_A_DECODER) for wish in wishes) if wish is not None]
            self.carry_out(peer, others)

    def wish(self, peer: Peer, row: int) -> Wish | None:
        """The half that was pulled longest ago, if there may be something to pull."""
        slot = self.slots[row]
        came = self.came[peer.number][row]
        published = int(self.decoder.board.published[peer.number, slot])
        if published == 0 or came[0] == came[1] >= published:
            return None
        part = self.decoder.random.randrange(2) if came[0] == came[1] else int(came[1] < came[0])
        to = self.decoder.destination(self.shape, 2)
        return Wish(peer, key_of_slot(peer.number, slot), slot, row + self.first_row, to, peer.number * HALVES_A_DECODER + row,
                    published, part)

    @property
    def first_row(self) -> int:
        """Of our rows in the shelf."""
        return self.slots.start - shelves.ROWS.rows

    def carry_out(self, peer: Peer, wishes: list[Wish]) -> None:
        if not wishes:
            return
        done = self.decoder.pull(wishes)
        for wish, generation in zip(wishes, done, strict=False):
            came = self.came[peer.number][wish.to_row % HALVES_A_DECODER]
            if came[0] == came[1] == generation:
                raise Fault(f"not consumed: both halves of generation {generation:#x} had come before one came again of {wish}")
            came[wish.part] = generation
        if len(done) < len(wishes) and self.decoder.last_error is not None:
            self.check_consumed(wishes[len(done)], self.decoder.last_error)

    def check_consumed(self, wish: Wish, error: LLMException) -> None:
        """"Consumed" is said of the generation that was published before the call, or of a later one: both its halves must have
        come, and to us, since nobody else pulls the row."""
        if CONSUMED not in str(error):
            return
        row = wish.to_row % HALVES_A_DECODER
        full = min(self.came[wish.peer.number][row])
        if wish.low > max(full, self.unsure[wish.peer.number][row]):
            raise Fault(f"lost: a key was consumed of which one half never came: {error}; published before: {wish.low:#x}, came: "
                        f"{[hex(half) for half in self.came[wish.peer.number][row]]}, {wish}")
