"""Pulls that wait: for caches that a prompt publishes layer by layer, and for keys of rows that it will fill again.

One that waits for a streamed cache has no reason to be late: whoever offers one goes on publishing, dies, or takes it back. One
that waits for a key of a row has: it may not be bound for long, so the wait has a deadline of its own.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmkv import LLMException
from torture import shelves
from torture.board import Field
from torture.prompt import key_of_slot
from torture.pulls import Wish
from torture.worker import Call

if TYPE_CHECKING:
    from torture.decoder import Decoder, Peer

PATIENCE_MS = 20
MANY = 3


class Streams:
    """One decoder's."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def pull_lane(self, peer: Peer) -> None:
        decoder = self._decoder
        lane = decoder.random.choice(shelves.STREAMED_LANES)
        if cache_id := int(decoder.board.lanes[peer.number, lane]):
            wish = decoder.wish_by_id(peer, lane, cache_id, decoder.random.randrange(shelves.STREAMED.rows),
                                      decoder.destination(shelves.STREAMED))
            wish.waits = True
            self._pull([wish])

    def pull_rows(self, peer: Peer) -> None:
        """One that may not be there yet, or some at once with one sleep for all."""
        decoder = self._decoder
        to, rows = decoder.destination(shelves.ROWS), range(shelves.ROWS.rows)
        slots = decoder.random.sample(rows, MANY if decoder.random.random() < 0.3 else 1)
        self._pull([Wish(peer, key_of_slot(peer.number, slot), slot, slot, to, to_row,
                         int(decoder.board.published[peer.number, slot]), patience_ms=PATIENCE_MS, waits=True)
                    for slot, to_row in zip(slots, decoder.random.sample(rows, len(slots)), strict=True)])

    def _pull(self, wishes: list[Wish]) -> None:
        """Carry wishes out, all from one peer and into different rows."""
        decoder, peer = self._decoder, wishes[0].peer
        for wish in wishes:
            wish.to.make_known(wish.to_row, wish.part)
        began = decoder.clock.now()
        done, error = self._call(wishes)
        ended = decoder.clock.now()
        decoder.check([wishes[place] for place in done])
        decoder.count(Field.WAITED, len(done))
        if error is None:
            return
        for place in set(range(len(wishes))) - set(done):
            wishes[place].to.forget(wishes[place].to_row, wishes[place].part)
        decoder.judge.failure(wishes[error.failed_request or 0], error)
        if decoder.judge.is_overdue(wishes[0], error):
            decoder.count(Field.OVERDUE)
        else:
            decoder.failed(peer, error, began, ended)

    def _call(self, wishes: list[Wish]) -> tuple[Sequence[int], LLMException | None]:
        """Which were done, and what one that was not answered."""
        manager, wish, timeout_ms = self._decoder.manager, wishes[0], wishes[0].patience_ms or None
        with self._decoder.calls(Call.WAIT):
            try:
                if len(wishes) > 1:
                    manager.pull_many(self._decoder.requests(wishes), wait=True, timeout_ms=timeout_ms)
                elif self._decoder.random.random() < 0.5:
                    for _ in manager.pull_layers(wish.key, wish.to.cache, wish.to_row, timeout_ms=timeout_ms):
                        pass
                    self._decoder.count(Field.LAYERED)
                else:
                    manager.pull_cache(wish.key, wish.to.cache, wish.to_row, wait=True, timeout_ms=timeout_ms)
            except LLMException as error:
                return error.done_requests or (), error
        return range(len(wishes)), None
