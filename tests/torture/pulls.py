"""What a pull may answer, and which bytes it may bring: the contract, as far as a decoder can know it.

A pull that succeeded brought one generation of the wanted row, in all places, and none older than the one that was published before
the call began. One that failed had a reason that really was there: a dead peer had died, a removed link had been removed, a missing
cache had been withdrawn. And it left the destination as it was, unless the row was taken back, the peer died or the link was
removed by force.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmkv import CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode
from torture import pattern, shelves
from torture.board import Board, Field
from torture.destination import Destination
from torture.pattern import Stamp
from torture.worker import Fault, cluster_of

if TYPE_CHECKING:
    from torture.decoder import Peer

CONSUMED = "is consumed"                # in the message of a pull of a consumed key
NAMELESS = "has no name any more"
TOO_LATE = "not done within"


@dataclass
class Wish:
    """One pull: from where, to where, and what is known of it before."""

    peer: Peer
    key: CacheKey | CacheKeyByIdAndIndex
    slot: int                           # of a row that is filled again, or SLOT_OF_LANE + lane
    row: int
    to: Destination
    to_row: int
    low: int                            # the generation that was published before, of a lane's cache: its only one
    part: int = 0
    patience_ms: int = 0                # it waits so long, 0 = as long as any call may
    waits: bool = False                 # bytes come as they are published, so some may have come when it fails

    @property
    def lane(self) -> int:
        """-1 for a row that is filled again."""
        return self.slot - shelves.SLOT_OF_LANE if self.slot >= shelves.SLOT_OF_LANE else -1

    @property
    def only_word(self) -> int:
        """The word that each word of a lane's row leaves."""
        return pattern.pack(Stamp(cluster_of(self.peer.number), self.slot, self.row, self.low))

    @property
    def is_keyed(self) -> bool:
        return self.lane in shelves.KEYED_LANES

    def __str__(self) -> str:
        return f"{self.key!r} (slot {self.slot}, row {self.row}, part {self.part}) of life {self.peer.life}"


class Judge:
    """One decoder's."""

    def __init__(self, board: Board, decoder: int) -> None:
        self.board = board
        self.decoder = decoder

    # -- what succeeded ---------------------------------------------------------------------------------------------

    def generation(self, wish: Wish, word: int | None) -> int:
        """Of the bytes that a pull brought."""
        if word is None:
            raise Fault(f"wrong bytes: a mixture came of {wish}:\n{wish.to.describe(wish.to_row)}")
        found = pattern.unpack(word)
        wanted = Stamp(cluster_of(wish.peer.number), wish.slot, wish.row, found.generation)
        if found != wanted:
            raise Fault(f"wrong bytes: {found} came of {wish}")
        if found.generation < wish.low or (wish.lane >= 0 and found.generation != wish.low):
            raise Fault(f"stale bytes: generation {found.generation:#x} came of {wish} after {wish.low:#x} was published")
        self._not_from_the_future(wish, found.generation)
        if found.generation >> pattern.COUNT_BITS != wish.peer.life:
            raise Fault(f"stale bytes: generation {found.generation:#x} of another life came of {wish}")
        return found.generation

    def _not_from_the_future(self, wish: Wish, generation: int) -> None:
        if wish.lane < 0:
            begun = int(self.board.filling[wish.peer.number, wish.slot])
            if begun >> pattern.COUNT_BITS == wish.peer.life and generation > begun:
                raise Fault(f"wrong bytes: generation {generation:#x} came of {wish}; the last one that was begun is {begun:#x}")

    # -- what failed ------------------------------------------------------------------------------------------------

    def failure(self, wish: Wish, error: LLMException) -> None:
        """Was there a reason, and is the destination as it has to be?"""
        if error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            self._missing(wish, str(error))
        elif error.status_code == LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT and TOO_LATE not in str(error):
            self._gone(wish, error)
        elif self.is_overdue(wish, error):
            wish.to.forget(wish.to_row, wish.part)
        elif error.status_code == LLMStatusCode.LLM_NOT_YET_LINK:
            self._cut(wish, error)
        else:
            raise Fault(f"a pull of {wish} answered: {error}")

    @staticmethod
    def is_overdue(wish: Wish, error: LLMException) -> bool:
        """Has it waited as long as it was told to? Somebody publishes what comes in no more than that only now and then."""
        return bool(wish.patience_ms) and f"{TOO_LATE} {wish.patience_ms} ms" in str(error)

    def _missing(self, wish: Wish, text: str) -> None:
        peer = wish.peer
        if NAMELESS in text and not self.is_over(peer):
            raise Fault(f"a segment had no name and its owner lived: {text}")
        if wish.lane < 0:
            if CONSUMED in text and not isinstance(wish.key, CacheKeyByIdAndIndex) and not wish.key.req_id < 2**63:
                raise Fault(f"a prefix key was consumed: {text}")
            wish.to.forget(wish.to_row, wish.part)
            return
        cache_id = wish.low & (1 << pattern.COUNT_BITS) - 1
        if wish.is_keyed and self.board.torn[peer.number, wish.lane] >= cache_id:
            wish.to.forget(wish.to_row, wish.part)
            return
        if not self.is_over(peer):
            self._untouched(wish, text)
            if not wish.is_keyed and self.board.lanes[peer.number, wish.lane] == cache_id and not self.is_over(peer):
                raise Fault(f"a cache that is offered was refused: {text}")
        else:
            wish.to.forget(wish.to_row, wish.part)

    def _gone(self, wish: Wish, error: LLMException) -> None:
        if not self.is_over(wish.peer):
            raise Fault(f"a living peer was taken for dead: {error}")
        wish.to.forget(wish.to_row, wish.part)

    def _cut(self, wish: Wish, error: LLMException) -> None:
        """A link that was removed in turn: the pull had not begun. By force: it may have."""
        peer = wish.peer
        under_way = peer.unlinks % 2
        if self.board.unlinks[peer.number, self.decoder] == peer.unlinks and not under_way:
            raise Fault(f"nobody removed the link of {wish}: {error}")
        if self.board.forced[peer.number, self.decoder] == peer.forced and not (under_way and peer.number % 2):
            self._untouched(wish, str(error))
        else:
            wish.to.forget(wish.to_row, wish.part)

    def _untouched(self, wish: Wish, text: str) -> None:
        """A failed pull that must not have written anything, unless it waited."""
        if wish.waits:
            wish.to.forget(wish.to_row, wish.part)
            return
        known = wish.to.known[wish.to_row][wish.part]
        found = wish.to.read(wish.to_row, wish.part)
        self.board.fields[self._worker, Field.UNTOUCHED] += 1
        if found != known:
            raise Fault(f"a pull that failed has written: {text}\nbefore it: {pattern.unpack(known or 0)}, then\n"
                        f"{wish.to.describe(wish.to_row)}")

    @property
    def _worker(self) -> int:
        return self.decoder + int(self.board.published.shape[0])

    def is_over(self, peer: Peer) -> bool:
        return self.board.is_over(peer.number, peer.life)
